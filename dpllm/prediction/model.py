"""Next-token logits of many rows that continue, with a cache of keys and values.

Place in the flow: between the prompts and the scores. In private prediction each row is a private record, or none,
followed by the same public prompt; every token drawn is appended to all rows. Where groups answer questions
(`dpllm.prediction.asking`), each row is a group and continues with its own tokens. Rows are padded on the left to one
public length, and each unit or group has a public number of them: the shapes of a computation then say nothing about a
record, and a row's rounding does not depend on the length of another, or on the number of a user's records.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpllm.config import ConfigError
from dpllm.ghost import routing, scales

_RELATIVE = 1e-3
"""The largest difference of a row's logits by other rows, relative to its largest logit."""


class Continuation:
    """Rows that grow token by token.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        rows: token ids of each row; the last token is the last of the prompt.
        length: public; the rows are padded to it.
        rows_per_pass: the most rows of one forward pass.
        cached: keep keys and values of earlier tokens, which needs memory for all rows. False: compute them again for
            every token.

    Raises:
        ConfigError: a row is empty, or longer than ``length``.
    """

    def __init__(
        self, model: Any, rows: Sequence[Sequence[int]], length: int, rows_per_pass: int, cached: bool = True
    ) -> None:
        """Pad the rows."""
        longest = max(map(len, rows))
        if longest > length or not all(rows):
            raise ConfigError(f"a row has {longest} tokens or none, and needs 1 to {length}: shorten the prompt")
        device = next(model.parameters()).device
        ids_RP = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows], device=device)
        mask_RP = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device)
        self._model, self._cached = model, cached
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._passes = [_Pass(*part) for part in zip(*(t.split(rows_per_pass) for t in (ids_RP, mask_RP)), strict=True)]

    @torch.inference_mode()
    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield, pass by pass, the rows' numbers and their logits of the next token, (rows, V)."""
        first = 0
        for part in self._passes:
            yield slice(first, first + len(part.ids_RT)), self._of_pass(part)
            first += len(part.ids_RT)

    def append(self, tokens: int | Tensor) -> None:
        """Append a token to every row: the same one, or each row's own, (rows,)."""
        first = 0
        for part in self._passes:
            end = first + len(part.ids_RT)
            part.append(tokens if isinstance(tokens, int) else tokens[first:end, None])
            first = end

    def _of_pass(self, part: _Pass) -> Tensor:
        position_RT = (part.mask_RT.cumsum(dim=1) - 1).clamp(min=0)
        seen = part.seen if self._cached else 0
        found = self._model(
            input_ids=part.ids_RT[:, seen:],
            attention_mask=part.mask_RT,
            position_ids=position_RT[:, seen:],
            past_key_values=part.cache if self._cached else None,
            use_cache=self._cached,
            **({"logits_to_keep": 1} if self._keeps else {}),
        )
        if self._cached:
            part.cache, part.seen = found.past_key_values, part.ids_RT.shape[1]
        logits_RV: Tensor = found.logits[:, -1]
        return logits_RV


class _Pass:
    """The rows of one forward pass, and what is kept of earlier ones."""

    def __init__(self, ids_RT: Tensor, mask_RT: Tensor) -> None:
        self.ids_RT, self.mask_RT = ids_RT, mask_RT
        self.cache: Any = None
        self.seen = 0

    def append(self, token: int | Tensor) -> None:
        """Add a column: of one token, or (R, 1)."""
        column_R1 = torch.ones_like(self.ids_RT[:, :1])
        self.ids_RT = torch.cat((self.ids_RT, column_R1 * token), dim=1)
        self.mask_RT = torch.cat((self.mask_RT, column_R1), dim=1)


def require_independent_rows(model: Any, length: int, rows_per_pass: int) -> None:
    """Measure with public tokens that a row's logits depend neither on other rows nor on the cache.

    Args:
        model: as for `Continuation`.
        length: of the rows.
        rows_per_pass: rows of a forward pass.

    Raises:
        ConfigError: they do: the bound of one unit's contribution would not hold.
    """
    for name, module in model.named_modules():
        if reason := scales.coupling(module) or routing.coupling(module):
            raise ConfigError(f"{name}: {reason}")
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = [(7 * place + 3) % vocabulary for place in range(length)]
    others = [(11 * place + 5) % vocabulary for place in range(length)]
    count = max(2, min(rows_per_pass, 4))
    wanted = _two_tokens(Continuation(model, [tokens] * count, length, count, cached=False))
    for what, rows, cached in (
        ("on the other rows of a pass", [tokens, *[others[: max(1, length // 2)]] * (count - 1)], False),
        ("on the cache of keys and values", [tokens] * count, True),
    ):
        found = _two_tokens(Continuation(model, rows, length, count, cached=cached))
        apart = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
        if not apart <= _RELATIVE:
            raise ConfigError(
                f"the logits of a row depend {what}, by {apart:.2g} of the largest logit: a unit would change the "
                "scores of others, and no ε would hold. Take a model of another architecture"
            )


def _two_tokens(rows: Continuation) -> Tensor:
    """Return (2, V): the first row's logits of the next token, and after a public token of the one after it."""
    found = []
    for _ in range(2):
        found.append(next(rows.logits())[1][0].float())
        rows.append(1)
    return torch.stack(found)


def require_memory(model: Any, length: int, rows: int, rows_per_pass: int, cached: bool) -> None:
    """Run one pass of public tokens with the sizes of a group at its longest.

    Args:
        model: as for `Continuation`.
        length: of the rows, with all new tokens.
        rows: of one group.
        rows_per_pass: rows of a forward pass.
        cached: as for `Continuation`.

    Raises:
        ConfigError: they do not fit into memory.
    """
    try:
        for _ in Continuation(model, [[1] * length] * rows, length, rows_per_pass, cached).logits():
            pass
    except torch.OutOfMemoryError as error:
        remedy = "set predict.cached=false" if cached else "take a smaller model, or a GPU with more memory"
        raise ConfigError(
            f"{rows:,} rows of {length:,} tokens do not fit into memory, {rows_per_pass} in a pass: lower "
            f"predict.rows_per_pass, or {remedy}"
        ) from error
