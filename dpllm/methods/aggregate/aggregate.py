"""Sample and aggregate from a recipe: its plan, its groups, and one private answer to each question.

The model reads the records of one group and then the question. A group's answer is a function of its own records and of
public text only. So the rows of a pass may not influence each other: all have one public length, whatever the records
hold, every pass has a public number of rows, and `require_independent_rows` has measured the model. Every question is
charged before a record reaches the model; whatever can be refused is refused before that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dpllm.config import ConfigError
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.units import Int64Array
from dpllm.mechanism.events import Event
from dpllm.methods.aggregate.combination import Combined, combined
from dpllm.methods.predict.inputs import (
    PrivateRecords,
    PublicModel,
    load_public_model,
    model_section,
    read_records,
    require_independent_rows,
    require_memory,
    secret_groups,
)
from dpllm.methods.queries.run import QueryCommand, QueryRun, begin_from, plan_from
from dpllm.methods.sections import AggregateConfig, Question
from dpllm.models.writing import Continuation
from dpllm.privacy.query_plan import QueryPlan, Value

_MARK = "\ue000"  # from the private use area, so no template contains it


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
        ConfigError: the model has an encoder and a decoder, or the chat template does not contain the message.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, opening: str, limits: Limits) -> None:
        """Compute the public tokens around the records."""
        self._public, self._limits = PublicModel(model, tokenizer), limits
        before, self._after = _frame(tokenizer)
        self._start = [*self._public.start, *self._public.encoded(before + opening)]

    def length(self, ask: str) -> int:
        """Return the public number of tokens of a prompt with this question."""
        return max(1, len(self._start) + self._limits.records * self._limits.record_tokens + len(self._question(ask)))

    def require_room(self, questions: Sequence[tuple[str, Sequence[str]]]) -> tuple[int, int]:
        """Refuse questions that leave no room for an answer.

        Returns:
            The most tokens of a prompt, and of a prompt with its answer.

        Raises:
            ConfigError: a prompt and its answer are longer than the model can read, or a prompt is empty.
        """
        most = 0
        for ask, answers in questions:
            if not self._start and not self._question(ask):
                raise ConfigError("a question has no tokens, and the tokenizer starts texts with none: ask something")
            sizes = [len(ids) for ids in self._answers(ask, answers)]
            if 0 in sizes:
                raise ConfigError(f"the listed answer {answers[sizes.index(0)]!r} has no token: leave it out")
            new = max(sizes, default=self._limits.max_new_tokens)
            most = max(most, self.length(ask) + new)
        if self._public.sees is not None and most > self._public.sees:
            raise ConfigError(
                f"the records of a group, a question and its answer are up to {most:,} tokens together, and the model "
                f"sees {self._public.sees:,}: lower data.max_length, aggregate.group_size or aggregate.max_new_tokens"
            )
        return max(self.length(ask) for ask, _ in questions), most

    def texts(self, groups: Sequence[Sequence[str]], ask: str) -> list[str]:
        """Return the likeliest continuation of each group's prompt, token by token, as a text."""
        rows, size = [self._row(group, ask) for group in groups], self._limits.rows_per_pass
        passes = [rows[first : first + size] for first in range(0, len(rows), size)]
        return [self._public.decoded(tokens) for part in passes for tokens in self._greedy(part, self.length(ask))]

    def likeliest(self, groups: Sequence[Sequence[str]], ask: str, answers: Sequence[str]) -> list[int]:
        """Return, for each group, the number of the listed answer whose likelihood its records increase most.

        The score of an answer is its log-probability after the group's prompt minus that after the same prompt without
        records, which is public (Holtzman et al., arXiv:2104.08315).
        """
        ids = self._answers(ask, answers)
        public_A = self._scores([self._row((), ask)], ask, ids)[0]
        found_GA = self._scores([self._row(group, ask) for group in groups], ask, ids)
        apart_GA = (found_GA - public_A).nan_to_num(nan=-torch.inf)
        return [int(number) for number in apart_GA.argmax(dim=1)]

    def _row(self, records: Sequence[str], ask: str) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            ValueError: a group has more records than the public limit.
        """
        if len(records) > self._limits.records:
            raise ValueError(
                f"a group has {len(records)} records, and {self._limits.records} is the public maximum: make groups of "
                "that size"
            )
        read = [token for record in records for token in self._public.encoded(record)[: self._limits.record_tokens]]
        return [*self._start, *read, *self._question(ask)]

    def _greedy(self, rows: list[list[int]], length: int) -> list[list[int]]:
        """Return the new tokens of each row of a pass, up to the first end token."""
        limits = self._limits
        going = Continuation(self._public.model, rows, length, len(rows), limits.cached)
        found: list[Tensor] = []
        for _ in range(limits.max_new_tokens):
            ((_, logits_RV),) = going.logits()
            found.append(logits_RV.float().nan_to_num(nan=-torch.inf).argmax(dim=1))
            going.append(found[-1])
        tokens_RT = torch.stack(found, dim=1).tolist()
        ends = self._public.ends
        return [tokens[: next((at for at, one in enumerate(tokens) if one in ends), None)] for tokens in tokens_RT]

    def _scores(self, rows: list[list[int]], ask: str, answers: list[list[int]]) -> Tensor:
        """Return the log-probability of each answer after each row, (rows, answers)."""
        longest, size = max(map(len, answers)), self._limits.rows_per_pass
        target_RT = torch.tensor([ids + [0] * (longest - len(ids)) for ids in answers]).repeat(len(rows), 1)
        counts_R = torch.tensor([len(ids) for ids in answers]).repeat(len(rows))
        repeated = [row for row in rows for _ in answers]
        parts = [slice(first, first + size) for first in range(0, len(repeated), size)]
        found = [self._of_targets(repeated[at], self.length(ask), target_RT[at], counts_R[at]) for at in parts]
        return torch.cat(found).reshape(len(rows), len(answers))

    def _of_targets(self, rows: list[list[int]], length: int, target_RT: Tensor, counts_R: Tensor) -> Tensor:
        going = Continuation(self._public.model, rows, length, len(rows), self._limits.cached)
        total_R = torch.zeros(len(rows), dtype=torch.float64)
        for step in range(target_RT.shape[1]):
            ((_, logits_RV),) = going.logits()
            at_R = target_RT[:, step].to(logits_RV.device)
            logs_R = logits_RV.double().log_softmax(dim=1).gather(1, at_R[:, None])[:, 0].cpu()
            total_R += torch.where(counts_R > step, logs_R, 0.0)
            going.append(at_R)
        return total_R

    def _question(self, ask: str) -> list[int]:
        return self._public.encoded(ask + self._after)

    def _answers(self, ask: str, answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each answer, preceded by a space unless the prompt ends with one."""
        prompt = ask + self._after
        space = "" if self._after or not prompt or prompt[-1].isspace() else " "
        return [self._public.encoded(space + answer) for answer in answers]


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the text that a chat template adds before and after a message; two empty texts without a template.

    Raises:
        ConfigError: the template omits or repeats the message.
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


METHOD = "answers of groups"
GROUPS, GROUP_SIZE, KIND = "groups", "group size, units", ": kind"
"""Names of settings of the plan; the name of a question's kind ends with the last."""
THRESHOLDS = 0.1
"""The share of δ for the thresholds of all open questions together."""


def charge_name(question: Question) -> str:
    """Return the name of a question's charge."""
    return f"answer to {question.name!r}"


def plan_aggregate(recipe: QueryRecipe, num_units: int) -> QueryPlan:
    """Plan a recipe from the number of units, without records.

    Raises:
        ConfigError: there is no question, there are too few units, or an open answer could never be released.
        ValueError: δ is out of range, or no noise reaches the target.
    """
    options: AggregateConfig = recipe.options
    if not options.questions:
        raise ConfigError("aggregate.questions is missing: list one question or more, each with name, ask and kind")
    if options.groups * options.group_size > num_units:
        raise ConfigError(
            f"aggregate.groups={options.groups:,} groups of {options.group_size:,} units need "
            f"{options.groups * options.group_size:,} units, and there are {num_units:,}: take fewer groups, or a "
            "smaller group_size. A unit cannot be in two groups"
        )
    ways = combinations(recipe, num_units)

    def charges_of(sigma: float) -> list[tuple[str, Event, int]]:
        return [(charge_name(question), way.event(sigma), 1) for question, way in ways]

    plan = plan_from(recipe, METHOD, num_units, charges_of, randomness="discrete")
    settings: list[tuple[str, Value]] = [(GROUPS, options.groups), (GROUP_SIZE, options.group_size)]
    for question, way in ways:
        try:
            numbers = way.settings(_noise(plan), options.groups)
        except ValueError as error:
            raise ConfigError(f"question {question.name!r}: {error}") from error
        settings += [
            (f"{question.name}{KIND}", question.kind),
            (f"{question.name}: asked", " ".join(question.ask.split())),
        ]
        settings += [(f"{question.name}: {name}", value) for name, value in numbers]
    return dataclasses.replace(plan, settings=tuple(settings))


def combinations(recipe: QueryRecipe, num_units: int) -> list[tuple[Question, Combined]]:
    """Return each question with its combination; open questions share a tenth of δ for their thresholds."""
    options: AggregateConfig = recipe.options
    num_open = sum(question.kind == "open" for question in options.questions)
    share = THRESHOLDS * recipe.privacy.delta_for(num_units) / max(num_open, 1)
    margin = float(stats.norm.isf(share))
    return [(question, combined(question, margin, options.max_words)) for question in options.questions]


def ask_groups(
    recipe: QueryRecipe, records: PrivateRecords, plan: QueryPlan, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a recipe and return the released answer to each question, by name.

    Raises:
        ConfigError: the model does not load, has no room, couples rows or does not fit into memory.
        ValueError: the plan belongs to a different recipe, the budget is too small, or the folder holds a run.
    """
    options: AggregateConfig = recipe.options
    ways = combinations(recipe, records.num_units)
    sizes = ((GROUPS, options.groups), (GROUP_SIZE, options.group_size))
    wanted = [(charge_name(question), way.event(_noise(plan)), 1) for question, way in ways]
    planned = [(charge.name, charge.event, charge.count) for charge in plan.charges]
    if planned != wanted or plan.num_units != records.num_units or plan.settings[:2] != sizes:
        raise ValueError("the plan does not match this recipe and these records: make it with plan_aggregate")
    say(f"loading {model_section(recipe).name}")
    asker, points = _asker(recipe)
    number = "1 question" if len(ways) == 1 else f"{len(ways)} questions"
    say(f"{number} to {options.groups:,} groups of {options.group_size:,} units; all are charged now")
    with begin_from(recipe, plan, results=[options.file]) as run:
        run.note_units(records.units)
        for point in points:
            run.open_point(point)
        found: dict[str, Any] = {}
        asked = _Asked(asker, records)
        for name, answer in charged_answers(run, ways, records.num_units, options.groups, options.group_size, asked):
            found[name] = answer
            say(f"{name} is answered")
        path = run.folder / options.file
        path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        run.release(path)
    return found


def _noise(plan: QueryPlan) -> float:
    """Return σ, which all questions share."""
    return plan.event.noise_multiplier


def charged_answers(
    run: QueryRun,
    ways: Sequence[tuple[Question, Combined]],
    num_units: int,
    num_groups: int,
    group_size: int,
    asked: Callable[[Question, Sequence[Int64Array]], Sequence[Any]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Charge all questions, divide the units, and yield the name and the private answer of each question.

    Args:
        run: with a charge for each question.
        ways: each question with its combination.
        num_units: N.
        num_groups: m.
        group_size: s.
        asked: maps a question and the units of each group to one answer of each group.

    Raises:
        ValueError: a group has no answer.
    """
    for question, _ in ways:
        run.charge(charge_name(question))
    groups = secret_groups(num_units, group_size, num_groups)
    sigma = _noise(run.plan)
    for question, way in ways:
        answers = asked(question, groups)
        if len(answers) != num_groups:
            raise ValueError(f"{len(answers)} of {num_groups} groups have answered")
        yield (
            question.name,
            way.released(answers, sigma, lambda numbers, change: run.randomness.noisy(numbers, sigma, change)),
        )


class _Asked:
    """Computes the model's answers for the records of each group."""

    def __init__(self, asker: Asker, records: PrivateRecords) -> None:
        self._asker, self._records = asker, records

    def __call__(self, question: Question, groups: Sequence[Int64Array]) -> Sequence[Any]:
        """Return one answer of each group. They are private."""
        texts = [[text for unit in self._records.contexts(group) for text in unit] for group in groups]
        if question.answers is not None:
            return self._asker.likeliest(texts, question.ask, question.answers)
        return self._asker.texts(texts, question.ask)


def _asker(recipe: QueryRecipe) -> tuple[Asker, list[str]]:
    """Load and check the model; return it with open points about it."""
    options: AggregateConfig = recipe.options
    model, tokenizer, points = load_public_model(recipe)
    limits = Limits(
        records=options.group_size * (recipe.privacy.max_rows_per_unit or 1),
        record_tokens=recipe.data.max_length,
        max_new_tokens=options.max_new_tokens,
        rows_per_pass=options.rows_per_pass,
        cached=options.cached,
    )
    asker = Asker(model, tokenizer, options.opening, limits)
    length, most = asker.require_room([(question.ask, question.answers or ()) for question in options.questions])
    require_independent_rows(model, length, options.rows_per_pass, most - length)
    if next(model.parameters()).device.type != "cpu":
        require_memory(model, most, options.rows_per_pass, options.rows_per_pass, options.cached)
    return asker, points


QUERY = QueryCommand(
    "reading the records",
    read_records,
    lambda recipe, records: plan_aggregate(recipe, records.num_units),
    ask_groups,
)
