"""One text of one group, token by token: bounded scores of private records, and the exact draw of a token from them.

The caller has charged for as many tokens as the text may have, and has checked that the groups are disjoint. Scores are
clipped, on a grid of whole numbers, and averaged over the public group size. The bound of a unit's contribution, on
which ε rests (`dpllm.methods.predict.token_draw`), is enforced here and nowhere else. A contribution is a whole number
of steps of c 2^-30, so a sum over units is exact: a unit changes it by its own contribution and by nothing else, in any
order of addition.

The draw takes randomness from the operating system. A float is a whole number times a power of two, so the weights have
an exact sum as a whole number, and a uniform whole number below it picks a token with exactly its share: no running sum
of floats, in which rare tokens would lose theirs, and no generator whose state could be guessed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dpllm.config import ConfigError
from dpllm.methods.predict.inputs import PublicModel
from dpllm.models.writing import Continuation

STEPS = 2**30
"""Steps of the grid in c."""
MOST = STEPS - 2**14
"""The largest contribution, in steps: c (1 - 2^-16). The rest is the margin for the rounding of weights."""
_LOWEST = -700.0
"""The lowest logarithm of a weight, against 0 for the likeliest token; exp of it is a normal float."""


@dataclass(frozen=True)
class Scoring:
    """The public parameters that turn logits into a distribution.

    With ``around_public`` the clipped quantity is the difference to the model's logits without a record (InvisibleInk,
    arXiv:2507.02974), and the public logits are added back. Otherwise a row's logits are shifted so that the largest is
    c, and clipped from below at -c (arXiv:2407.12108).

    >>> Scoring(clip=10.0, units=250, temperature=2.0).noise_multiplier
    50.0
    """

    clip: float
    """c: the bound of a unit's score of a token."""
    units: int
    """s: the public size of a group; it divides the sum."""
    temperature: float
    """τ."""
    around_public: bool = False
    """Whether differences to the public logits are clipped."""
    top_k: int | None = None
    """Tokens are drawn only from the public model's k likeliest, and those within 2c/s of them. None: from all."""

    @property
    def noise_multiplier(self) -> float:
        """sτ/c: the σ of `dpllm.methods.predict.token_draw.TokenDraw`."""
        return self.units * self.temperature / self.clip

    def contributions(self, logits_RV: Tensor, public_V: Tensor, rows_of_unit_R: Tensor) -> Tensor:
        """Return, (R, V), the contribution of each row to the sum, in whole steps.

        A unit of k rows adds the mean of its rows: each row is clipped, and divided by k towards zero. So a unit adds
        at most `MOST` steps whatever k is. A row adds 0 if a logit is not a number, or the
        largest is infinite.

        Args:
            logits_RV: one row per record.
            public_V: of the model without a record.
            rows_of_unit_R: k of each row's unit, whole numbers of at least 1.
        """
        logits_RV = logits_RV.double()
        if self.around_public:
            apart_RV = logits_RV - public_V.double()
        else:
            apart_RV = logits_RV - logits_RV.amax(dim=1, keepdim=True) + self.clip
        unusable_R = logits_RV.isnan().any(dim=1) | ~logits_RV.amax(dim=1).isfinite()
        apart_RV = apart_RV.masked_fill(unusable_R[:, None] | apart_RV.isnan(), 0.0)
        steps_RV = (apart_RV * (STEPS / self.clip)).round().clamp(-MOST, MOST).long()
        return torch.div(steps_RV, rows_of_unit_R[:, None], rounding_mode="trunc")

    def log_weights(self, sum_V: Tensor, public_V: Tensor) -> Tensor:
        """Return, (V,), the log-weights of the draw, at most 0, in float64; -inf: never drawn.

        Args:
            sum_V: the sum of all rows' contributions, whole numbers of steps.
            public_V: of the model without a record.
        """
        step = self.clip / STEPS
        total_V = sum_V
        if self.around_public:
            # This clipping is public, so it is free; it keeps the whole numbers below 2^63.
            base_V = (public_V.double() - public_V.double().amax()).nan_to_num(nan=-torch.inf)
            base_V = base_V.clamp(min=_LOWEST * self.temperature - 2 * self.clip)
            total_V = sum_V + self.units * (base_V / step).round().long()
        drawn_V = self._drawn(public_V)
        total_V = total_V - total_V[drawn_V].amax()
        logs_V = (total_V.double() * (step / (self.units * self.temperature))).clamp(min=_LOWEST)
        return logs_V.masked_fill(~drawn_V, -torch.inf)

    def _drawn(self, public_V: Tensor) -> Tensor:
        """Return, (V,), whether a token may be drawn; a function of public values."""
        usable_V = ~(public_V.isnan() | (public_V == -torch.inf)) if self.around_public or self.top_k else None
        if usable_V is None:
            return torch.ones_like(public_V, dtype=torch.bool)
        if self.top_k is None or self.top_k >= len(public_V):
            return usable_V
        kth = public_V.double().masked_fill(~usable_V, -torch.inf).topk(self.top_k).values[-1]
        return usable_V & (public_V.double() >= kth - 2 * self.clip / self.units)


_HALF = 27
"""Bits of the lower part of a mantissa: sums of either part are exact as floats."""


def draw_index(log_weights: NDArray[np.float64], below: Callable[[int], int] = secrets.randbelow) -> int:
    """Draw the number of an entry with probability proportional to its exponential.

    Args:
        log_weights: (n,), at most 0; -inf is never drawn.
        below: returns a uniform whole number from 0 to one less than its argument.

    Raises:
        ValueError: no entry can be drawn, or one is positive or not a number.

    >>> draw_index(np.array([-np.inf, 0.0, -np.inf]))
    1
    """
    if not (log_weights.size and log_weights.max() > -np.inf and log_weights.max() <= 0):
        raise ValueError(
            f"no token can be drawn: the largest of {log_weights.size} log-weights is "
            f"{log_weights.max(initial=-np.inf)}, and it must be finite and at most 0"
        )
    places = np.flatnonzero(log_weights > -np.inf)
    fractions, exponents = np.frexp(np.exp(log_weights[places]))
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    lowest = int(exponents.min())
    shifts = exponents - lowest
    upper = np.bincount(shifts, weights=mantissas >> _HALF)
    lower = np.bincount(shifts, weights=mantissas & ((1 << _HALF) - 1))
    sums = [(int(high) << _HALF) + int(low) for high, low in zip(upper, lower, strict=True)]
    left = below(sum(mass << shift for shift, mass in enumerate(sums)))
    for shift, mass in enumerate(sums):
        if left < mass << shift:
            members = np.flatnonzero(shifts == shift)
            ends = list(accumulate(mantissas[members].tolist()))
            chosen = next(number for number, end in enumerate(ends) if left >> shift < end)
            return int(places[members[chosen]])
        left -= mass << shift
    raise AssertionError("the number drawn is below the sum of all weights")


@dataclass(frozen=True, kw_only=True)
class TextLimits:
    """Public limits: when a text ends, and the size of a pass."""

    max_new_tokens: int
    """T: the most tokens of a text, each of which is charged."""
    stop: str | None = None
    """A text ends before this, as it does before a token that ends texts."""
    rows_per_pass: int = 32
    """The most rows of one forward pass."""
    rows_per_unit: int = 1
    """k: the most records of a unit. Each unit has k rows, so that the number of rows is public."""
    cached: bool = True
    """Keep keys and values of earlier tokens."""


class Rows(Protocol):
    """Rows that grow by the same tokens, such as `dpllm.models.writing.Continuation`."""

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows' numbers and their logits of the next token, (rows, V)."""
        ...

    def append(self, token: int) -> None:
        """Append a token to every row."""
        ...


class GroupSampler:
    """Draws texts from a public model and a group of private records.

    Raises:
        ConfigError: the model is an encoder with a decoder.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        scoring: Scoring,
        limits: TextLimits,
        max_context: int,
    ) -> None:
        """Store a loaded model."""
        self._public, self._max = PublicModel(model, tokenizer), max_context
        self._scoring, self._limits = scoring, limits

    def length(self, prompt: str) -> int:
        """Return the public number of tokens of a row with this prompt, before a token is drawn."""
        return len(self._public.start) + self._max + len(self._public.encoded(prompt))

    def require_room(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that leave no room for T new tokens.

        Raises:
            ConfigError: one does not.
        """
        longest = max(map(self.length, prompts)) + self._limits.max_new_tokens
        if self._public.sees is not None and longest > self._public.sees:
            raise ConfigError(
                f"context, prompt and new tokens are {longest} tokens together, and the model sees "
                f"{self._public.sees}: lower data.max_length or predict.max_new_tokens"
            )

    def text(self, contexts: Sequence[Sequence[str]], prompt: str, public_context: str = "") -> str:
        """Draw a text that continues the prompt.

        Args:
            contexts: for each unit of the group, the contexts of its records, at least one.
            prompt: public.
            public_context: replaces the record for the public model.

        Raises:
            ValueError: there are more units than the public group size, or a unit has more than k records.
        """
        if len(contexts) > self._scoring.units:
            raise ValueError(
                f"a group of {len(contexts)} units is larger than its public size {self._scoring.units}: the average "
                "would move further than is charged. Make groups of that size"
            )
        most = self._limits.rows_per_unit
        if (found := max(map(len, contexts), default=0)) > most:
            raise ValueError(f"a unit has {found} records, and {most} are public: take at most {most} of each unit")
        ids = self._public.encoded(prompt)
        public_row = self._row(public_context, ids)
        rows, rows_of_unit = [], []
        for unit in [*contexts, *[[]] * (self._scoring.units - len(contexts))]:
            empty = most - len(unit)  # public rows, whose logits are not read: each unit has its own places
            rows += [*(self._row(one, ids) for one in unit), *[public_row] * empty]
            rows_of_unit += [len(unit)] * len(unit) + [0] * empty
        # The public row has no public length of contexts to hide, but equal shapes keep its rounding the same.
        length = max(self.length(prompt), 1)
        own = Continuation(self._public.model, rows, length, self._limits.rows_per_pass, self._limits.cached)
        public = Continuation(self._public.model, [public_row], length, 1, self._limits.cached)
        return self._until_end(own, public, rows_of_unit)

    def _until_end(self, own: Continuation, public: Continuation, rows_of_unit: list[int]) -> str:
        stop = self._limits.stop

        def stopped(tokens: list[int]) -> bool:
            return stop is not None and stop in self._public.decoded(tokens)

        most = self._limits.max_new_tokens
        tokens = drawn_tokens(self._scoring, own, public, rows_of_unit, most, self._public.ends, stopped)
        text = self._public.decoded(tokens)
        return text if stop is None else text.split(stop, 1)[0]

    def _row(self, context: str, prompt: Sequence[int]) -> list[int]:
        """Return the tokens of a row: the start, the context, the prompt.

        Raises:
            ConfigError: there is no token at all.
        """
        row = [*self._public.start, *self._public.encoded(context)[: self._max], *prompt]
        end = self._public.tokenizer.eos_token_id
        if not row and end is None:
            raise ConfigError(
                "the tokenizer has no token that begins or ends a text, so nothing can follow an empty prompt: give "
                "predict.prompts"
            )
        return row or [int(end)]


def drawn_tokens(
    scoring: Scoring,
    own: Rows,
    public: Rows,
    rows_of_unit: Sequence[int],
    most: int,
    ends: Collection[int] = (),
    stopped: Callable[[list[int]], bool] = lambda _: False,
) -> list[int]:
    """Draw the tokens of one text of one group.

    Args:
        scoring: clip, group size and temperature.
        own: the rows of the group, with the prompt.
        public: the row without a record, with the prompt.
        rows_of_unit: for each own row, the number of rows of its unit; 0: the row is not counted.
        most: T, the most tokens, all of which are charged.
        ends: tokens that end a text.
        stopped: whether the tokens so far end the text; it reads nothing else.
    """
    tokens: list[int] = []
    while len(tokens) < most:
        token = _next_token(scoring, own, public, rows_of_unit)
        if token in ends:
            break
        tokens.append(token)
        if stopped(tokens):
            break
        for rows in (own, public):
            rows.append(token)
    return tokens


def _next_token(scoring: Scoring, own: Rows, public: Rows, rows_of_unit: Sequence[int]) -> int:
    ((_, public_1V),) = public.logits()
    public_V = public_1V[0]
    counts_R = torch.tensor(rows_of_unit, dtype=torch.int64, device=public_V.device)
    sum_V: Tensor = torch.zeros_like(public_V, dtype=torch.int64)
    for place, logits_RV in own.logits():
        read_R = counts_R[place] > 0
        sum_V += scoring.contributions(logits_RV[read_R], public_V, counts_R[place][read_R]).sum(dim=0)
    return draw_index(scoring.log_weights(sum_V, public_V).cpu().numpy())
