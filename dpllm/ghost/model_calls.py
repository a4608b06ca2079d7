"""The calls of a model between two backward passes: their rows, how these are laid out, and what is refused at once.

A contrastive or preference loss calls the model twice and differentiates once. Gradients can be assigned to rows only
if all calls use one row layout.
"""

from __future__ import annotations

from torch import nn

from dpllm.ghost import memory
from dpllm.ghost.checks import (
    placeholders_of,
    refuse_long_rows,
    refuse_shared_media,
    rows_of_call,
    tokens_by_themselves,
)
from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.graph import flatten_tensors
from dpllm.ghost.packed import PackedRows


class ModelCalls:
    """What is known of the calls of a model since the last backward pass.

    Attributes:
        packed: how the rows of the last call are laid end to end.
        rows: of the last call; None where they are not known.
        tokens: of each of its rows.
        lengths: the second dimensions of all of its inputs.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start without calls."""
        self.packed = PackedRows()
        self.rows: int | None = None
        self.tokens, self.lengths = 1, frozenset[int]()
        self._most_tokens, self._placeholders = tokens_by_themselves(model), placeholders_of(model)
        self._layouts: set[tuple[int | None, tuple[int, ...]]] = set()
        self._spent = True

    def begin(self, args: tuple, kwargs: dict) -> bool:
        """Note that a call begins; return whether it is the first since the last backward pass.

        Raises:
            GhostError: rows that are too long, packed wrongly, or may take each other's images.
        """
        refuse_shared_media(kwargs, self._placeholders)
        packed = PackedRows()
        packed.start(kwargs)
        self.rows, self.tokens, self.packed = rows_of_call(args, kwargs), memory.tokens_of_call(args, kwargs), packed
        self.lengths = frozenset(t.shape[1] for t in flatten_tensors((args, kwargs)) if t.ndim > 1)
        refuse_long_rows(max(packed.lengths, default=self.tokens), self._most_tokens)
        first, self._spent = self._spent, False
        if first:
            self._layouts.clear()
        return first

    def end(self) -> None:
        """Note that the call returned."""
        self._layouts.add((self.rows, tuple(self.packed.lengths)))

    def spend(self) -> None:
        """Note that a loss was differentiated or dropped: the next call of the model belongs to another loss."""
        self._spent = True

    def differentiated(self, num_losses: int) -> None:
        """Note that losses are about to be differentiated.

        Raises:
            GhostError: there are not as many as packed rows, or the calls had other layouts.
        """
        self.spend()
        packed = sorted({lengths for _, lengths in self._layouts})
        if len(packed) > 1:
            raise NoRuleError(
                f"The model was called {len(packed)} times since the last backward pass with rows packed differently "
                f"(lengths {list(packed[0])} and {list(packed[1])}), so gradients cannot be assigned to rows. Use one "
                "layout for all calls of a loss, and torch.no_grad() for calls that are not part of it."
            )
        own = len(self.packed.lengths)
        if own and own != num_losses:
            raise GhostError(
                f"The model was called with {own} packed rows, and there are {num_losses} losses. One loss per row "
                "is needed: see dpllm.packed_sequence_loss."
            )
        if not own and len({rows for rows, _ in self._layouts}) > 1:
            self.rows = num_losses


def used_again(name: str) -> GhostError:
    """Return the error for a use of a parameter outside the calls since the last backward pass."""
    return NoRuleError(
        f"{name} is used more often in the loss than in the calls of the model since the last backward pass. Compute "
        "the losses from calls of the model that follow that pass, or clip in one pass (NormMethod(backward_passes=1))."
    )


def not_repeatable() -> GhostError:
    """Return the error for a second backward pass that differs from the first."""
    return GhostError(
        "The second backward pass gave a unit a longer gradient than the first, from which its clip factor comes: some "
        "operation is not repeatable. Call torch.use_deterministic_algorithms(True), or clip in one pass "
        "(NormMethod(backward_passes=1))."
    )
