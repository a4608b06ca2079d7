"""The calls of a model between two backward passes: a loss may be computed from several of them.

A contrastive or preference loss calls the model twice and differentiates once. Every parameter then has as many uses as
there are calls, and the gradients can be assigned to rows only if all calls use one row layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from dpllm.ghost.errors import GhostError, NoRuleError


class Calls:
    """Counts the uses of parameters, and compares the rows, of all calls since the last backward pass.

    A call that no loss depends on only makes the count too large. A parameter is then treated as one with several
    uses, which costs memory and stays exact.
    """

    def __init__(self) -> None:
        """Start without calls."""
        self._start()

    def _start(self) -> None:
        self._uses: dict[int, int] = {}
        self._num_rows: set[int | None] = set()
        self._packed: set[tuple[int, ...]] = set()
        self._spent = False

    def begin(self) -> None:
        """Note that a call of the model begins."""
        if self._spent:
            self._start()

    def note(self, num_rows: int | None, lengths: Sequence[int]) -> None:
        """Note a call of the model that returned.

        Args:
            num_rows: of its inputs; None where unknown.
            lengths: tokens of each packed row; empty where the rows are not packed.
        """
        self._num_rows.add(num_rows)
        self._packed.add(tuple(lengths))

    def note_uses(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the call of a module that uses these parameters."""
        for parameter in parameters:
            self._uses[id(parameter)] = self._uses.get(id(parameter), 0) + 1

    def used_once(self, parameter: nn.Parameter) -> bool:
        """Whether a single module call used the parameter."""
        return self._uses.get(id(parameter)) == 1

    def rows(self, num_losses: int, lengths: Sequence[int], last: int | None) -> int | None:
        """Return the number of rows of the calls behind the losses that are about to be differentiated.

        Args:
            num_losses: of the losses.
            lengths: tokens of each packed row of the last call.
            last: rows of the last call.

        Raises:
            GhostError: the calls packed their rows differently.
        """
        self.spend()
        if len(self._packed) > 1:
            layouts = sorted(map(list, self._packed))
            raise NoRuleError(
                f"The model was called {len(layouts)} times since the last backward pass with rows packed differently "
                f"(lengths {layouts[0]} and {layouts[1]}), so gradients cannot be assigned to rows. Use one "
                "layout for all calls of a loss, and torch.no_grad() for calls that are not part of it."
            )
        return last if lengths or len(self._num_rows) <= 1 else num_losses

    def spend(self) -> None:
        """Note that a loss was differentiated or dropped: the next call of the model belongs to another loss."""
        self._spent = True


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
