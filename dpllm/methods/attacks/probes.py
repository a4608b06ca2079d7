"""The probes of the audit: a method's private answers about two neighbours of made-up records.

`dpllm.methods.attacks.answers` asks the same questions again and again, each time with or without a canary. Each method
has a function that makes a `Probe` from its plan. No private record is read: the records are made up, and are the worst
that the method's bounds allow. Everything between the records and the answer is the code that the command runs: the
rows of a unit, clipping, the division into groups or teachers, the charge, and the noise. Models are replaced: whoever
reads the canary from a group's answer, a teacher's vote or a unit's logits could not know more.

Predicted texts have a vocabulary of two tokens that are equally likely without the canary: with more tokens, or others,
it moves the draws less. In a federated round everybody is in the cohort, as for a server that knows the cohorts, and as
many clients drop out as the plan allows: the noise is that of the fewest survivors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpllm.config import ConfigError, PrivacyUnit, Recipe
from dpllm.data.rows import load_train_and_eval, unit_index_of
from dpllm.data.units import Int64Array, UnitIndex
from dpllm.mechanism.catalogue import noise_of, spec_of
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.aggregate import aggregate as aggregation
from dpllm.methods.aggregate.aggregate import charge_name, charged_answers
from dpllm.methods.aggregate.combination import Combined, ThresholdedCounts, combined
from dpllm.methods.count import counting
from dpllm.methods.count.counting import LabelledUnits, charge_and_count
from dpllm.methods.evolve import evolution
from dpllm.methods.evolve.evolution import Floats, exact_votes, noisy_votes
from dpllm.methods.federated.client import Clients, SharedWeights, is_secure
from dpllm.methods.federated.distributed import DistributedNoise, DistributedStep
from dpllm.methods.federated.run import Rounds, check_federated, require_federated
from dpllm.methods.pate.prepare import (
    CLASSES,
    NEW_TOKENS,
    PROMPTS,
    PUBLIC_VOTES,
    TEACHERS,
    THRESHOLD,
    TOKEN_THRESHOLD,
)
from dpllm.methods.pate.votes import (
    CHECK_CHANGE,
    CHECKS,
    LABELS,
    TOKENS,
    VOTE_CHANGE,
    Ballots,
    Partition,
    TokenVotes,
    Vote,
    ballots_of,
    released_labels,
    written_tokens,
)
from dpllm.methods.predict import run as prediction
from dpllm.methods.predict.run import TokenPlan, charged_texts
from dpllm.methods.predict.sampler import Scoring, drawn_tokens
from dpllm.methods.queries.run import QueryRun
from dpllm.methods.sections import Question
from dpllm.privacy.accounting import History
from dpllm.privacy.ledger import Ledger
from dpllm.privacy.plan import PrivacyPlan, make_plan
from dpllm.privacy.query_plan import QueryPlan

UNIT = "unit"
"""Column with the unit of each made-up record."""
EXCESS = 3
"""A canary has this many times as many rows as the plan allows, so that a missing bound shows."""
_CANARY = 0  # number of the unit, whose rows come first
_FAR_COUNTS = 10.0  # counts of this many standard deviations of the noise stay above 0


@dataclass(frozen=True)
class Probe:
    """The private answers of a method, asked about made-up records with and without a canary."""

    canary: str
    """Description of the canary."""
    answer: Callable[[QueryRun, bool], float]
    """Maps a run and whether the canary is included to a score of the answers, which is higher with it. One call
    charges the run what the method charges for all of its answers."""


def made_units(plan: QueryPlan, others: int, canary: bool) -> UnitIndex:
    """Divide made-up rows into units as the method divides records.

    The rows of the canary come first. At user level it has `EXCESS` times as many rows as the plan allows, of which the
    index keeps the allowed number.
    """
    privacy, own = PrivacyUnit(), 1
    if plan.max_rows_per_unit is not None:  # user level
        most, kept = plan.max_rows_per_unit, plan.rows_kept or "first"
        privacy = PrivacyUnit(unit=UNIT, max_rows_per_unit=most, rows_kept=kept)
        own = EXCESS * most
    ids = [0] * (own if canary else 0) + list(range(1, others + 1))
    return unit_index_of(datasets.Dataset.from_dict({UNIT: ids}), privacy, secret_rng())


def count_probe(plan: QueryPlan) -> Probe:
    """Return the probe of noisy counts of classes: all rows of the canary are of one class."""
    k = plan.max_rows_per_unit or 1
    others = math.ceil(_FAR_COUNTS * k * plan.charge(counting.CHARGE).event.noise_multiplier)
    units = {}
    for there in (False, True):
        index = made_units(plan, others, there)
        # The other units have the canary's class, since counts near 0 are clipped.
        units[there] = LabelledUnits(("first", "second"), [0] * (int(max(index.rows)) + 1), index)
    exact = {there: made.exact_counts() for there, made in units.items()}

    def answer(run: QueryRun, there: bool) -> float:
        return charge_and_count(run, units[there], exact[there])["first"]

    return Probe("a unit with all its rows in one class", answer)


_OTHERS = 8
_CANDIDATES = 4


def evolution_probe(plan: QueryPlan) -> Probe:
    """Return the probe of an evolution's plan; the score is the sum of one candidate's noisy votes."""
    charge = plan.charge(evolution.CHARGE)
    candidates = np.arange(_CANDIDATES, dtype=np.float64)[:, None]
    exact = {there: _evolution_votes(plan, candidates, there) for there in (False, True)}

    def answer(run: QueryRun, there: bool) -> float:
        noisy = (noisy_votes(run, charge.event.noise_multiplier, exact[there]) for _ in range(charge.count))
        return float(sum(votes[0] for votes in noisy))

    return Probe("a unit with all its records nearest to one candidate", answer)


def _evolution_votes(plan: QueryPlan, candidates: Floats, canary: bool) -> Floats:
    """Return the exact votes; the others' are spread over the candidates by their numbers."""
    index = made_units(plan, _OTHERS, canary)
    _, units = index.rows_of(np.arange(index.num_units))
    own = len(units) - _OTHERS
    places = np.concatenate([np.zeros(own), np.arange(_OTHERS) % len(candidates)])
    return exact_votes(candidates[places.astype(np.int64)], units, candidates)


_GROUPS = 2
_EXTREME = 1e4  # a logit far above any clip
_STOP = (1,) * 3
"""A text that begins with these tokens ends after them, so that texts differ in length."""


class _KnownLogits:
    """Rows whose logits are the same at every token."""

    def __init__(self, logits_RV: Tensor) -> None:
        self._logits_RV = logits_RV

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows at once."""
        yield slice(0, len(self._logits_RV)), self._logits_RV

    def append(self, token: int) -> None:
        """Do nothing: the logits do not depend on tokens."""


def token_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan of `dpllm.methods.predict.run`.

    The score is the number of tokens that the canary makes likelier, less that of the others, in the texts of groups
    that it is in. Texts of the other groups do not depend on it, and are not drawn.
    """
    settings = dict(plan.settings)
    scoring = Scoring(
        clip=float(settings[prediction.CLIP]),
        units=int(settings[prediction.GROUP_SIZE]),
        temperature=float(settings[prediction.TEMPERATURE]),
        around_public=settings[prediction.QUANTITY] == prediction.AROUND_PUBLIC,
    )
    per_group = int(settings[prediction.TEXTS_OF_GROUP])
    tokens = TokenPlan(scoring, _GROUPS, per_group, int(settings[prediction.TOKENS]))
    charge = plan.charge(prediction.CHARGE)
    if (charge.event, charge.count) != (tokens.event, tokens.tokens):
        raise ValueError("the settings of this plan do not match its charges: make it with plan_prediction")
    index = made_units(plan, _GROUPS * scoring.units - 1, canary=True)
    public_V = torch.zeros(2)

    def answer(run: QueryRun, there: bool) -> float:
        def made(_: int, group: Int64Array) -> list[int]:
            if _CANARY not in group:
                return []
            held = group if there else group[group != _CANARY]
            unit_R = index.rows_of(held)[1]
            rows_of_unit = np.bincount(unit_R, minlength=len(held))[unit_R].tolist()
            canary_R = torch.from_numpy(held[unit_R] == _CANARY)
            extreme_V = torch.tensor([_EXTREME, -_EXTREME])
            logits_RV = torch.where(canary_R[:, None], extreme_V, public_V)
            rows, public = _KnownLogits(logits_RV), _KnownLogits(public_V[None])
            return drawn_tokens(
                scoring, rows, public, rows_of_unit, tokens.max_new_tokens, stopped=lambda found: tuple(found) == _STOP
            )

        texts = charged_texts(run, tokens, index.num_units, _GROUPS * per_group, made)
        return float(sum(1 - 2 * token for text in texts for token in text))

    return Probe("a unit with logits beyond every clip", answer)


_FAR = 12.0
"""Groups for each standard deviation of a count's noise: sums then stay within their ranges."""
_COMMON, _RARE = "common", "rare"
_SHOWN = 1000.0  # the score of a rare answer that is released


def group_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan of `dpllm.methods.aggregate.aggregate`.

    With the canary, its group answers with the largest number, the first listed answer, and the answer that all others
    give. Without it, with the smallest, the second, and an answer that no other group gives. The score is the sum of
    the numbers of groups for the former; a rare answer that is released lowers it by a lot.
    """
    settings = dict(plan.settings)
    kinds = {
        name.removesuffix(aggregation.KIND): str(kind)
        for name, kind in plan.settings
        if name.endswith(aggregation.KIND)
    }
    ways = [_way(plan, name, kind) for name, kind in kinds.items()]
    size, noise = int(settings[aggregation.GROUP_SIZE]), plan.event.noise_multiplier
    margin = max((way.margin for _, way in ways if hasattr(way, "margin")), default=0.0)
    num_groups = math.ceil((_FAR + 2 * margin) * max(noise, 1.0))
    index = made_units(plan, num_groups * size - 1, canary=True)

    def answer(run: QueryRun, there: bool) -> float:
        def asked(question: Question, groups: Sequence[Int64Array]) -> list[Any]:
            others = itertools.count()
            return [
                _own_answer(question.kind, there) if _CANARY in group else _other_answer(question.kind, next(others))
                for group in groups
            ]

        found = charged_answers(run, ways, index.num_units, num_groups, size, asked)
        return sum(_score(kinds[name], one, num_groups) for name, one in found)

    return Probe("a unit that decides the answer of its group", answer)


def _way(plan: QueryPlan, name: str, kind: str) -> tuple[Question, Combined]:
    """Return a question of this kind, and the combination of its answers with the margin of the plan."""
    question = Question(
        name=name,
        ask="made up",
        kind=kind,
        low=0.0 if kind == "number" else None,
        high=1.0 if kind == "number" else None,
        answers=(_COMMON, _RARE) if kind == "choice" else None,
    )
    event = plan.charge(charge_name(question)).event
    return question, combined(question, event.margin if isinstance(event, ThresholdedCounts) else math.nan, 1)


def _own_answer(kind: str, there: bool) -> Any:
    """Return the answer of the canary's group, with the canary and without it."""
    answers = {"number": ("-1000000", "1000000"), "choice": (1, 0), "open": (_RARE, _COMMON)}
    return answers[kind][there]


def _other_answer(kind: str, number: int) -> Any:
    """Return the answer of another group."""
    return {"number": "0.5", "choice": number % 2, "open": _COMMON}[kind]


def _score(kind: str, found: dict[str, Any], num_groups: int) -> float:
    """Return the released number of groups that answered as the canary's does, up to a constant."""
    if kind == "number":
        return float(found["mean"]) * num_groups
    counts = found["groups"]
    if kind == "choice":
        return float(counts[_COMMON] - counts[_RARE]) / 2
    return float(counts.get(_COMMON, 0.0)) - (_SHOWN if _RARE in counts else 0.0)


_UNITS_OF_TEACHER = 2
_NAME = "a unit that decides the vote of its teacher"


def label_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan of `dpllm.methods.pate.prepare`.

    The other teachers are divided between two classes. The teacher with the canary votes for the first one, and without
    it for the second. The score is the number of texts with the first label less that with the second.
    """
    settings = dict(plan.settings)
    teachers, classes, prompts = (int(settings[name]) for name in (TEACHERS, CLASSES, PROMPTS))
    vote = _vote_of(plan, LABELS, prompts, settings.get(THRESHOLD))
    units = made_units(plan, teachers * _UNITS_OF_TEACHER, canary=True)
    own_rows = units.rows_of(np.array([_CANARY]))[0]

    def answer(run: QueryRun, there: bool) -> float:
        others = 0

        def vote_of(_: int, rows: Int64Array) -> Int64Array:
            nonlocal others
            if np.isin(own_rows, rows).any():
                return np.full(prompts, 0 if there else 1)
            others += 1
            return np.full(prompts, others % 2)

        partition = Partition(units.num_units, teachers, run.randomness.generator())
        ballots = ballots_of(partition, units, Ballots(prompts, classes), vote_of)
        labels_N = released_labels(vote, teachers, run, ballots)
        return float((labels_N == 0).sum() - (labels_N == 1).sum())

    return Probe(_NAME, answer)


def completion_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan for completions.

    As for labels, at each place: the first and the second candidate after the public model's own. The score is the
    number of the first in all texts less that of the second.
    """
    settings = dict(plan.settings)
    teachers, texts, most = (int(settings[name]) for name in (TEACHERS, PROMPTS, NEW_TOKENS))
    vote = _vote_of(plan, TOKENS, texts * most, settings.get(TOKEN_THRESHOLD))
    units = made_units(plan, teachers * _UNITS_OF_TEACHER, canary=True)
    own_rows = units.rows_of(np.array([_CANARY]))[0]

    def answer(run: QueryRun, there: bool) -> float:
        partition = Partition(units.num_units, teachers, run.randomness.generator())
        named, others = [], 0
        for teacher in range(teachers):
            if np.isin(own_rows, partition.rows_of(teacher, units)).any():
                named.append(_FIRST if there else _SECOND)
                continue
            others += 1
            named.append(_FIRST if others % 2 == 0 else _SECOND)
        votes = TokenVotes(vote, teachers, run, float(settings[PUBLIC_VOTES]))
        found = np.concatenate([[], *written_tokens(_KnownVotes(texts, named), votes, most)])
        return float((found == _FIRST).sum() - (found == _SECOND).sum())

    return Probe(_NAME, answer)


_FIRST, _SECOND = 1, 2


@dataclass
class _KnownVotes:
    """Writers with a fixed vote, the same at every place of every text."""

    num_texts: int
    named: list[int]

    @property
    def num_teachers(self) -> int:
        return len(self.named)

    def candidates(self) -> Int64Array:
        return np.tile(np.array([0, _FIRST, _SECOND]), (self.num_texts, 1))

    def vote(self, teacher: int) -> Int64Array:
        return np.full(self.num_texts, self.named[teacher])

    def append(self, tokens_R: Int64Array) -> None:
        pass


def _vote_of(plan: QueryPlan, answers: str, places: int, threshold: object) -> Vote:
    """Return the vote whose cost a plan charges."""
    charge = plan.charge(answers)
    if threshold is None:
        return Vote(places, None, charge.count, answers=answers)
    check = plan.charge(CHECKS).event.noise_multiplier * CHECK_CHANGE
    ratio = check / (charge.event.noise_multiplier * VOTE_CHANGE)
    return Vote(places, float(str(threshold)), charge.count, ratio, answers)


CANARY = "a client with an update far beyond the clip norm"
_EXCESS = 10.0  # norm of the canary's update, in clip norms
_SURVIVORS = 2
_ENTRIES = 4


def plan_of_recipe(recipe: Recipe) -> PrivacyPlan:
    """Plan a recipe; of its records only the number of clients is used.

    Raises:
        ConfigError: the recipe is not that of a federated run.
    """
    args = check_federated(recipe)
    train, _ = load_train_and_eval(recipe.data, recipe.privacy)
    return make_plan(recipe.privacy, unit_index_of(train, recipe.privacy).num_units, args.max_steps)


def small_federation(plan: PrivacyPlan, rounds: int) -> PrivacyPlan:
    """Return the plan of a few clients, all in every round, with the clip norm, noise and dropouts of a given plan.

    Raises:
        ConfigError: the plan is not that of a federated run.
    """
    require_federated(plan)
    noise, count = noise_of(plan.noise), _SURVIVORS
    if isinstance(noise, DistributedNoise):
        noise = dataclasses.replace(noise, min_batch_size=_SURVIVORS)
        count = math.ceil(_SURVIVORS / (1 - noise.dropouts))
    return dataclasses.replace(
        plan,
        num_units=count,
        sampling_rate=1.0,
        expected_batch_size=count,
        max_batch_size=count,
        num_steps=rounds,
        num_steps_wanted=None,
        noise=spec_of(noise),
        target_epsilon=None,
    )


class RoundProbe:
    """Computes rounds with and without a canary.

    Attributes:
        history: the cost of one round against somebody who knows the cohorts.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger) -> None:
        """Make the clients."""
        event = plan.event
        self.history: History = [(event.against_the_server if isinstance(event, DistributedStep) else event, 1)]
        self._updates = _Updates(plan)
        self._weight = torch.nn.Parameter(torch.zeros(_ENTRIES))
        model = torch.nn.ParameterList([self._weight])
        clients = (_FewSurvivors if is_secure(plan) else Clients)(plan, self._updates, lambda client: [client])
        optimizer = torch.optim.SGD([self._weight], lr=1.0)
        self._rounds = Rounds(plan, ledger, clients, SharedWeights(model, "freeze_a"), optimizer)
        self._divisor = plan.expected_batch_size

    def answer(self, there: bool) -> float:
        """Compute a round, and return the released sum in the direction of the canary.

        Raises:
            ValueError: the round was given up, although enough clients survive.
        """
        self._updates.there = there
        with torch.no_grad():
            self._weight.zero_()
        if not self._rounds.take():
            raise ValueError("a round with enough survivors was given up")
        return float(self._weight.detach()[0]) * self._divisor


class _Updates:
    """Replaces a training: client 0 is the canary, and the others change a different entry by the clip norm."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._clip_norm, self.there = plan.clip_norm, False

    def update(self, rows: Sequence[Any], start: NDArray[np.float32], number: int) -> NDArray[np.float64]:
        """Return the update of a client."""
        found = np.zeros(_ENTRIES)
        (client,) = rows
        if client:
            found[1] = self._clip_norm
        elif self.there:
            found[0] = _EXCESS * self._clip_norm
        return found


class _FewSurvivors(Clients):
    """Clients of which all but the first `_SURVIVORS` drop out."""

    def answers(self, cohort: Sequence[int], weights: NDArray[np.float32], number: int) -> dict[int, NDArray[Any]]:
        """Return the answers of the survivors."""
        return super().answers([client for client in cohort if client < _SURVIVORS], weights, number)


PROBES: dict[str, Callable[[QueryPlan], Probe]] = {
    "label counts": count_probe,
    "synthetic text": count_probe,  # its own charge, if any, is that of counts
    "private evolution": evolution_probe,
    "predicted text": token_probe,
    "public labels by PATE": label_probe,
    "public completions by PATE": completion_probe,
    "answers of groups": group_probe,
}
"""Method of a plan -> the function that makes its probe."""


def probe_of(plan: QueryPlan) -> Probe:
    """Return the probe of a plan's method.

    Raises:
        ConfigError: it has none.
    """
    if plan.method not in PROBES:
        raise ConfigError(f"there is no audit of {plan.method!r} yet; there is one of {', '.join(PROBES)}")
    return PROBES[plan.method](plan)
