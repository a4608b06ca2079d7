"""Compute next-token logits of many growing rows, with a cache of keys and values.

In private prediction each row is a private record, or none, followed by the same public prompt, and every drawn token
is appended to all rows. Where groups answer questions (`dpllm.methods.aggregate.aggregate`), each row is a group and
continues with its own tokens. Where teachers write public texts (`dpllm.methods.pate.teach`), each row is a text.
Rows are padded on the left to one public length, and each unit or group has a public number of them, so the shapes of a
computation reveal nothing about a record, and a row's rounding depends neither on the length of another row nor on a
user's number of records.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpllm.config import ConfigError


class Continuation:
    """Rows that grow token by token.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        rows: token ids of each row; the last token is the last of the prompt.
        length: public length to which the rows are padded.
        rows_per_pass: the largest number of rows of one forward pass.
        cached: keep keys and values of earlier tokens, which needs memory for all rows. False: recompute them for
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
            raise ConfigError(
                f"Every row needs 1 to {length} tokens, but the longest has {longest} or a row is empty. "
                "Correct the prompts"
            )
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
            use_cache=self._cached,
            **part.cache,
            **({"logits_to_keep": 1} if self._keeps else {}),
        )
        if self._cached:
            part.cache, part.seen = cache_of(found), part.ids_RT.shape[1]
        logits_RV: Tensor = found.logits[:, -1]
        return logits_RV


def cache_of(output: Any) -> dict[str, Any]:
    """Return the argument with which the next forward pass continues from this one.

    Args:
        output: output of a transformers model called with ``use_cache=True``.

    Returns:
        keys and values under the name that this version of transformers uses: ``cache``, and before 5.24
        ``past_key_values``.
    """
    name = "cache" if "cache" in output else "past_key_values"
    return {name: output[name]}


class _Pass:
    """The rows of one forward pass, and the cache of earlier passes."""

    def __init__(self, ids_RT: Tensor, mask_RT: Tensor) -> None:
        self.ids_RT, self.mask_RT = ids_RT, mask_RT
        self.cache: dict[str, Any] = {}
        self.seen = 0

    def append(self, token: int | Tensor) -> None:
        """Add a column: one token for all rows, or (R, 1)."""
        column_R1 = torch.ones_like(self.ids_RT[:, :1])
        self.ids_RT = torch.cat((self.ids_RT, column_R1 * token), dim=1)
        self.mask_RT = torch.cat((self.mask_RT, column_R1), dim=1)
