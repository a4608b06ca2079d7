"""One answer of each group to a question: the model reads the records of the group, and then the question.

Place in the flow: between the groups and `dpllm.methods.aggregate.combined`. A group's answer is a function of its own
records and of public text only. So the rows of a pass may not influence each other: all have one public length,
whatever the records hold, every pass has a public number of rows, and `require_independent_rows` has measured the
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dpllm.config import ConfigError
from dpllm.models.writing import Continuation

_MARK = "\ue000"  # of the private use area: no template has it


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Public sizes of the groups' prompts and answers."""

    records: int
    """The most records of a group."""
    record_tokens: int
    """The most tokens of a record; a longer one loses its end."""
    max_new_tokens: int
    """The most tokens of an answer that the model writes."""
    rows_per_pass: int
    """The most rows of one forward pass."""
    cached: bool = True
    """Keep keys and values of a pass in memory."""


class Asker:
    """Asks a public model about groups of records.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its own; if it has a chat template, a prompt is a message in it.
        opening: public text before the records.
        limits: public sizes.

    Raises:
        ConfigError: the model is an encoder with a decoder, or the chat template does not hold the message.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, opening: str, limits: Limits) -> None:
        """Find the public tokens around the records."""
        if model.config.is_encoder_decoder:
            raise ConfigError("the model has an encoder and a decoder: take a causal language model")
        self._model, self._tokenizer, self._limits = model, tokenizer, limits
        before, self._after = _frame(tokenizer)
        bos = tokenizer.bos_token_id
        self._start = [*([] if bos is None else [int(bos)]), *self._ids(before + opening)]
        ends = model.generation_config.eos_token_id
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._ends = {*own, *(ends if isinstance(ends, list) else [] if ends is None else [ends])}

    def length(self, ask: str) -> int:
        """Return the public number of tokens of every prompt with this question."""
        return max(1, len(self._start) + self._limits.records * self._limits.record_tokens + len(self._question(ask)))

    def require_room(self, questions: Sequence[tuple[str, Sequence[str]]]) -> tuple[int, int]:
        """Refuse questions that leave no room for an answer.

        Args:
            questions: each with its listed answers, or none.

        Returns:
            The most tokens of a prompt, and of a prompt with its answer.

        Raises:
            ConfigError: a prompt and its answer are longer than the model can read, or a prompt is empty.
        """
        sees = getattr(self._model.config, "max_position_embeddings", None)
        most = 0
        for ask, answers in questions:
            if not self._start and not self._question(ask):
                raise ConfigError(
                    "a question without tokens, of a tokenizer that begins a text with none: ask something"
                )
            sizes = [len(ids) for ids in self._answers(ask, answers)]
            if 0 in sizes:
                raise ConfigError(f"the listed answer {answers[sizes.index(0)]!r} has no token: leave it out")
            new = max(sizes, default=self._limits.max_new_tokens)
            most = max(most, self.length(ask) + new)
        if isinstance(sees, int) and 0 < sees < most:
            raise ConfigError(
                f"the records of a group, a question and its answer are up to {most:,} tokens together, and the model "
                f"sees {sees:,}: lower data.max_length, aggregate.group_size or aggregate.max_new_tokens"
            )
        return max(self.length(ask) for ask, _ in questions), most

    def texts(self, groups: Sequence[Sequence[str]], ask: str) -> list[str]:
        """Return the likeliest continuation of each group's prompt, token by token, as a text.

        Args:
            groups: the records of each group.
            ask: the question.
        """
        rows, size = [self._row(group, ask) for group in groups], self._limits.rows_per_pass
        passes = [rows[first : first + size] for first in range(0, len(rows), size)]
        return [self._decoded(tokens) for part in passes for tokens in self._greedy(part, self.length(ask))]

    def likeliest(self, groups: Sequence[Sequence[str]], ask: str, answers: Sequence[str]) -> list[int]:
        """Return, for each group, the number of the listed answer whose likelihood its records raise most.

        The score of an answer is the logarithm of its probability after the group's prompt, less that after the same
        prompt without records (Holtzman et al., arXiv:2104.08315). The second is public.

        Args:
            groups: the records of each group.
            ask: the question.
            answers: public.
        """
        ids = self._answers(ask, answers)
        public_A = self._scores([self._row((), ask)], ask, ids)[0]
        found_GA = self._scores([self._row(group, ask) for group in groups], ask, ids)
        apart_GA = (found_GA - public_A).nan_to_num(nan=-torch.inf)
        return [int(number) for number in apart_GA.argmax(dim=1)]

    def _row(self, records: Sequence[str], ask: str) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            ValueError: a group has more records than is public.
        """
        if len(records) > self._limits.records:
            raise ValueError(
                f"a group has {len(records)} records, and {self._limits.records} is the public maximum: make groups of "
                "that size"
            )
        read = [token for record in records for token in self._ids(record)[: self._limits.record_tokens]]
        return [*self._start, *read, *self._question(ask)]

    def _greedy(self, rows: list[list[int]], length: int) -> list[list[int]]:
        """Return the new tokens of each row of a pass, up to the one that ends a text."""
        limits = self._limits
        going = Continuation(self._model, rows, length, len(rows), limits.cached)
        found: list[Tensor] = []
        for _ in range(limits.max_new_tokens):
            ((_, logits_RV),) = going.logits()
            found.append(logits_RV.float().nan_to_num(nan=-torch.inf).argmax(dim=1))
            going.append(found[-1])
        tokens_RT = torch.stack(found, dim=1).tolist()
        return [
            tokens[: next((at for at, one in enumerate(tokens) if one in self._ends), None)] for tokens in tokens_RT
        ]

    def _scores(self, rows: list[list[int]], ask: str, answers: list[list[int]]) -> Tensor:
        """Return (rows, answers): the logarithm of the probability of each answer after each row."""
        longest, size = max(map(len, answers)), self._limits.rows_per_pass
        target_RT = torch.tensor([ids + [0] * (longest - len(ids)) for ids in answers]).repeat(len(rows), 1)
        counts_R = torch.tensor([len(ids) for ids in answers]).repeat(len(rows))
        repeated = [row for row in rows for _ in answers]
        parts = [slice(first, first + size) for first in range(0, len(repeated), size)]
        found = [self._of_targets(repeated[at], self.length(ask), target_RT[at], counts_R[at]) for at in parts]
        return torch.cat(found).reshape(len(rows), len(answers))

    def _of_targets(self, rows: list[list[int]], length: int, target_RT: Tensor, counts_R: Tensor) -> Tensor:
        going = Continuation(self._model, rows, length, len(rows), self._limits.cached)
        total_R = torch.zeros(len(rows), dtype=torch.float64)
        for step in range(target_RT.shape[1]):
            ((_, logits_RV),) = going.logits()
            at_R = target_RT[:, step].to(logits_RV.device)
            logs_R = logits_RV.double().log_softmax(dim=1).gather(1, at_R[:, None])[:, 0].cpu()
            total_R += torch.where(counts_R > step, logs_R, 0.0)
            going.append(at_R)
        return total_R

    def _question(self, ask: str) -> list[int]:
        return self._ids(ask + self._after)

    def _answers(self, ask: str, answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each answer; a space comes before it unless the prompt ends with one."""
        prompt = ask + self._after
        space = "" if self._after or not prompt or prompt[-1].isspace() else " "
        return [self._ids(space + answer) for answer in answers]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the text that a chat template puts before and after a message; two empty texts without one.

    Raises:
        ConfigError: the template leaves the message out, or repeats it.
    """
    if not tokenizer.chat_template:
        return "", ""
    text = str(
        tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False)
    )
    parts = text.split(_MARK)
    if len(parts) != 2:
        raise ConfigError(
            f"the chat template of the tokenizer holds a message {len(parts) - 1} times, and once is needed: take "
            "another model"
        )
    before, after = parts
    bos = str(tokenizer.bos_token or "")
    return before.removeprefix(bos), after
