"""One text of one group, token by token.

Place in the flow: above the scores, the draw and the model's rows. Its caller has charged for as many tokens as the
text may have at most, and has checked that the groups are disjoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dpllm.config import ConfigError
from dpllm.methods.predict.prompts import PromptEncoder
from dpllm.methods.predict.scores import Scoring, draw_index
from dpllm.models.writing import Continuation


@dataclass(frozen=True, kw_only=True)
class TextLimits:
    """When a text ends: public rules about the tokens drawn."""

    max_new_tokens: int
    """T: the most tokens of a text, each of which is charged."""
    stop: str | None = None
    """A text ends before this, as it does before a token that ends texts."""
    rows_per_pass: int = 32
    """The most rows of one forward pass."""
    rows_per_unit: int = 1
    """k: the most records of a unit. Each unit takes k rows, so that the number of rows is public."""
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

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its own.
        scoring: clip, group size and temperature.
        limits: when a text ends.
        max_context: the most tokens of a record's context.

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
        """Take a loaded model."""
        if model.config.is_encoder_decoder:
            raise ConfigError(
                "the model has an encoder and a decoder: private prediction needs a causal language model (task: "
                "causal_lm)"
            )
        self._model, self._tokenizer = model, tokenizer
        self._scoring, self._limits = scoring, limits
        self._encoder = PromptEncoder(tokenizer, max_context)
        ends = model.generation_config.eos_token_id
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._ends = {*own, *(ends if isinstance(ends, list) else [] if ends is None else [ends])}

    def length(self, prompt: str) -> int:
        """Return the public number of tokens of a row with this prompt, before a token is drawn."""
        return self._encoder.length(self._encoder.prompt(prompt))

    def require_room(self, prompts: Sequence[str]) -> None:
        """Refuse prompts that leave no room for T new tokens.

        Raises:
            ConfigError: one does not.
        """
        sees = getattr(self._model.config, "max_position_embeddings", None)
        longest = max(map(self.length, prompts)) + self._limits.max_new_tokens
        if isinstance(sees, int) and 0 < sees < longest:
            raise ConfigError(
                f"context, prompt and new tokens are {longest} tokens together, and the model sees {sees}: lower "
                "data.max_length or predict.max_new_tokens"
            )

    def text(self, contexts: Sequence[Sequence[str]], prompt: str, public_context: str = "") -> str:
        """Return a text that continues the prompt.

        Args:
            contexts: of each unit of the group, the contexts of its records, one at least.
            prompt: public.
            public_context: stands in place of a record for the public model.

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
        ids = self._encoder.prompt(prompt)
        public_row = self._encoder.row(public_context, ids)
        rows, rows_of_unit = [], []
        for unit in [*contexts, *[[]] * (self._scoring.units - len(contexts))]:
            empty = most - len(unit)  # public rows, whose logits are not read: each unit has its own places
            rows += [*(self._encoder.row(one, ids) for one in unit), *[public_row] * empty]
            rows_of_unit += [len(unit)] * len(unit) + [0] * empty
        # The public row has no public length of contexts to hide, but equal shapes keep its rounding the same.
        length = self._encoder.length(ids)
        own = Continuation(self._model, rows, max(length, 1), self._limits.rows_per_pass, self._limits.cached)
        public = Continuation(self._model, [public_row], max(length, 1), 1, self._limits.cached)
        return self._until_end(own, public, rows_of_unit)

    def _until_end(self, own: Continuation, public: Continuation, rows_of_unit: list[int]) -> str:
        stop = self._limits.stop

        def stopped(tokens: list[int]) -> bool:
            return stop is not None and stop in self._decoded(tokens)

        most = self._limits.max_new_tokens
        text = self._decoded(drawn_tokens(self._scoring, own, public, rows_of_unit, most, self._ends, stopped))
        return text if stop is None else text.split(stop, 1)[0]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def drawn_tokens(
    scoring: Scoring,
    own: Rows,
    public: Rows,
    rows_of_unit: Sequence[int],
    most: int,
    ends: Collection[int] = (),
    stopped: Callable[[list[int]], bool] = lambda _: False,
) -> list[int]:
    """Return the tokens of one text of one group.

    Args:
        scoring: clip, group size and temperature.
        own: the rows of the group, with the prompt.
        public: the row without a record, with the prompt.
        rows_of_unit: of each own row, the number of rows of its unit; 0: the row counts for nothing.
        most: T, the most tokens, all of which are charged.
        ends: tokens that end a text.
        stopped: whether the tokens so far end the text; it looks at nothing else.
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
