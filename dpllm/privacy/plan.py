"""Plan a training run: fix every number that determines the guarantee, before the run.

The plan follows from the privacy configuration, the public number of units and the number of steps. The sampler, the
noise and the privacy event are derived only from it, so they cannot disagree. Microbatch size, number of machines,
engine and precision are not part of it, because they cannot change ε.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dpllm.config import SAMPLINGS, UNITS, PrivacyConfig
from dpllm.config.files import write_file
from dpllm.config.versions import has_format, other_format
from dpllm.mechanism.catalogue import clipping_of, noise_of, spec_of, with_randomness
from dpllm.mechanism.events import Event
from dpllm.mechanism.limits import ADJACENCIES, RANDOMNESS
from dpllm.mechanism.parts import Draw, Mechanism, Noise, Spec
from dpllm.mechanism.selection import Selection, selected_run
from dpllm.mechanism.strategies import Workload
from dpllm.privacy.accounting import Guarantee
from dpllm.privacy.calibration import calibrate, choose_max_batch_size, choose_noise, steps_within
from dpllm.privacy.defaults import batch_size
from dpllm.privacy.ledger_reader import LedgerContents
from dpllm.privacy.rounding import format_delta, format_delta_limit, format_epsilon
from dpllm.privacy.stated import planned_steps, stated_starts, steps_of_selection, taken_starts

if TYPE_CHECKING:
    from dpllm.privacy.query_plan import PriorRelease


FLAT, INDEPENDENT = Spec("flat"), Spec("independent")
"""Clipping and noise of DP-SGD."""
PLAN_FILE = "privacy_plan.json"
PLAN_FORMAT = 1
"""Format of a plan file, for training runs and query runs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The public constants of every private run, of training or of queries: a guarantee, and a file with a hash.

    Raises:
        ValueError: the numbers contradict each other.
    """

    of_what: ClassVar[str]
    """The plan in words, for errors."""
    remedy: ClassVar[str] = "Make the plan with make_plan"
    unit: str
    """"sequence" or "user"."""
    adjacency: str
    """Adjacency of the headline ε, "zero-out" or "replace-one"."""
    max_rows_per_unit: int | None = None
    """k, the largest number of rows used per user; None at sequence level."""
    unit_column: str | None = None
    """The column with the user's id; None at sequence level."""
    rows_kept: str | None = None
    """Which k rows of a user with more rows are kept: "first" or "random"; None at sequence level."""
    dataset: str | None = None
    """Public name of the data set."""
    num_units: int
    """N."""
    delta: float
    """δ."""
    target_epsilon: float | None = None
    """The ε that the noise was calibrated to; None when the noise was given."""

    def __post_init__(self) -> None:
        """Check all rules; the error names each broken one."""
        broken = [rule for rule, holds in self.rules().items() if not holds]
        if broken:
            raise ValueError(f"a privacy plan needs {'; '.join(broken)}. {self.remedy}")

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds. A plan adds its own rules to these."""
        return {
            f"unit in {UNITS}": self.unit in UNITS,
            f"adjacency in {ADJACENCIES}": self.adjacency in ADJACENCIES,
            "num_units >= 1": self.num_units >= 1,
            f"0 < delta < 1/num_units = {format_delta_limit(1 / max(self.num_units, 1))}": (
                self.num_units >= 1 and self.delta > 0 and self.delta * self.num_units < 1
            ),
        }

    if TYPE_CHECKING:  # a field of some plans and a property of others

        @property
        def num_steps(self) -> int:
            """The steps, or answers, that may be charged."""

        @property
        def seeded(self) -> bool:
            """Whether a fixed seed replaces secret randomness."""

        @property
        def selection(self) -> Spec | None:
            """Distribution of the number of runs, only the best of which is released; None: this run is released."""

        @property
        def after(self) -> PriorRelease | None:
            """The released run on whose model this one builds; None: there is none."""

        @property
        def method(self) -> str | None:
            """The kind of private release (`dpllm.registry`); None: a training run."""

        @property
        def num_steps_wanted(self) -> int | None:
            """The steps requested, if the budget allows fewer; None if not."""

        @property
        def randomness(self) -> str:
            """The generator of the noise (`dpllm.mechanism.generators`)."""

    @property
    def event(self) -> Event:
        """The event that a ledger and a budget name."""
        raise NotImplementedError

    @property
    def reserved(self) -> tuple[Event, int]:
        """The event that the entry in a budget reserves, and how often."""
        raise NotImplementedError

    @property
    def own_history(self) -> list[tuple[Event, int]]:
        """All that this run may charge, or the release of which it is a part."""
        raise NotImplementedError

    def stops_independently(self, contents: LedgerContents) -> bool:
        """Return whether ε covers only the charged steps, as the stop was declared independent of data and releases."""
        raise NotImplementedError

    def unplanned(self, contents: LedgerContents) -> str | None:
        """Return in words what a ledger charges that is not planned; None if there is nothing."""
        raise NotImplementedError

    def stated_steps(self, contents: LedgerContents) -> tuple[tuple[Event, int], ...]:
        """Return the steps of this run whose ε is stated, without those of the run on which it builds."""
        raise NotImplementedError

    @property
    def history(self) -> list[tuple[Event, int]]:
        """The history from which ε is computed: the release on which the run builds, and all that it may charge."""
        return [*(() if self.after is None else self.after.history), *self.own_history]

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of the whole history."""
        return Guarantee(history=self.history, delta=self.delta, adjacency=self.adjacency, unit=self.unit)

    @property
    def epsilon(self) -> float:
        """ε of the whole history under the plan's adjacency; inf without noise."""
        return self.guarantee.epsilon

    def epsilon_under(self, adjacency: str) -> float:
        """Return the same ε under "zero-out" or "replace-one"."""
        return self.guarantee.under(adjacency)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the plan's fields, in hexadecimal; equal only for equal plans."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        raise NotImplementedError

    @staticmethod
    def fields_of(raw: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the fields from those in a file."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the plan and its hash durably as JSON; without the plan, the ledger cannot be continued."""
        text = json.dumps({**self.to_dict(), "hash": self.hash}, indent=2, ensure_ascii=False, allow_nan=False)
        write_file(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: the file is missing, is not such a plan, or was edited.
        """
        raw = read_plan_file(path)
        names = {item.name for item in dataclasses.fields(cls)}
        if set(raw) != names | {"format", "hash"}:
            raise ValueError(f"{path} is not the {cls.of_what}. Pass the file that the run wrote")
        try:
            plan = cls(**cls.fields_of({name: raw[name] for name in names}))
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} holds a value of the wrong type ({error}). Restore it from a backup") from error
        if plan.hash != raw["hash"]:
            raise ValueError(f"{path} was edited: its numbers do not match its hash. Restore it, or make a new plan")
        return plan


def read_plan_file(path: str | Path) -> dict[str, Any]:
    """Return the values in the file of a plan.

    Raises:
        ValueError: the file is missing, is not a plan, or has another format.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(raw, dict) or "format" not in raw or "hash" not in raw:
        raise ValueError(f"{path} is not a privacy plan. Pass the file that the run wrote")
    if not has_format(raw["format"], PLAN_FORMAT):
        raise ValueError(f"{path} {other_format('privacy plan', raw['format'], PLAN_FORMAT)}")
    return raw


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(Plan):
    """The constants of a private run. All of them are public.

    `make_plan` makes a plan, and `load` reads one.

    Raises:
        ValueError: the numbers contradict each other.
    """

    of_what = "privacy plan of a training run"

    sampling: str = "unit"
    """"unit": whole units are drawn and clipped. "example": single rows are drawn and clipped."""
    num_examples: int | None = None
    """Number of rows to draw from, at most k per user; None if units are drawn."""
    sampling_rate: float
    """q = b / N, or b / `num_examples` if rows are drawn."""
    expected_batch_size: int
    """b, the divisor of the noisy sum."""
    max_batch_size: int
    """B_max. If rows are drawn, it is `num_examples`, since no draw is truncated."""
    clip_norm: float
    """C, in the gradient's units."""
    clipping: Spec = FLAT
    """How a contribution is bounded by C (`dpllm.mechanism.catalogue`)."""
    noise_multiplier: float
    """σ, dimensionless."""
    noise: Spec = INDEPENDENT
    """Whether and how the noise of the steps is correlated."""
    randomness: str = "os"
    """The generator of the noise (`dpllm.mechanism.generators`)."""
    seeded: bool = False
    """Whether sampling and noise come from a fixed seed; if so, nothing is private."""
    num_steps: int
    """T."""
    num_steps_wanted: int | None = None
    """The steps requested, if the budget allows fewer; None if not."""
    selection: Spec | None = None
    """The distribution of the number of runs, of which this is one and only the best is released
    (`dpllm.mechanism.selection`). ε and the target then cover the selection. None: the run is released by itself."""

    @classmethod
    def untruncated(
        cls, num_units: int, batch: int, num_steps: int, noise_multiplier: float, clip_norm: float, delta: float
    ) -> PrivacyPlan:
        """Return a plan of plain Poisson sampling of single sequences, for audits and benchmarks.

        Args:
            num_units: N.
            batch: b, the expected number of units drawn; up to N may be drawn.
            num_steps: T.
            noise_multiplier: σ.
            clip_norm: C.
            delta: δ.
        """
        return cls(
            unit="sequence",
            adjacency="zero-out",
            num_units=num_units,
            sampling_rate=batch / num_units,
            expected_batch_size=batch,
            max_batch_size=num_units,
            num_steps=num_steps,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            delta=delta,
        )

    def __post_init__(self) -> None:
        """Check that the numbers are consistent and that the parts can be accounted for."""
        super().__post_init__()
        _ = self.mechanism, self.history  # these refuse parts that cannot be accounted for

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds."""
        population, size = self.population, self.expected_batch_size
        return {
            **super().rules(),
            f"sampling in {SAMPLINGS}": self.sampling in SAMPLINGS,
            "1 <= expected_batch_size <= population": 1 <= size <= population,
            "expected_batch_size <= max_batch_size <= population": size <= self.max_batch_size <= population,
            "sampling_rate = expected_batch_size / population": (
                population >= 1 and self.sampling_rate == size / population
            ),
            "num_examples and max_rows_per_unit if rows of users are drawn": self._examples_fit(),
            "0 <= noise_multiplier < inf": 0 <= self.noise_multiplier < math.inf,
            "0 < clip_norm < inf": 0 < self.clip_norm < math.inf,
            f"randomness in {RANDOMNESS}": self.randomness in RANDOMNESS,
            "num_steps >= 1": self.num_steps >= 1,
            "num_steps_wanted > num_steps": self.num_steps_wanted is None or self.num_steps_wanted > self.num_steps,
        }

    def _examples_fit(self) -> bool:
        if self.sampling != "example":
            return self.num_examples is None
        k, rows = self.max_rows_per_unit, self.num_examples
        if k is None or rows is None or self.unit != "user":
            return False
        return self.num_units <= rows <= k * self.num_units and self.max_batch_size == rows

    @property
    def population(self) -> int:
        """The number to draw from in every step: N units, or `num_examples` rows."""
        return self.num_units if self.num_examples is None else self.num_examples

    @property
    def draw(self) -> Draw:
        """The parameters of a step's draw."""
        return Draw(
            num_units=self.num_units,
            population=self.population,
            expected_batch_size=self.expected_batch_size,
            max_batch_size=self.max_batch_size,
            rows_per_unit=self.max_rows_per_unit if self.sampling == "example" else None,
        )

    @property
    def after(self) -> None:
        """None: a training run does not build on a released run."""
        return None

    @property
    def method(self) -> None:
        """None: this is a training run."""
        return None

    @property
    def noise_stddev(self) -> float:
        """σC, the standard deviation of the noise in every entry of the summed gradient (`Mechanism.noise_stddev`)."""
        return self.mechanism.noise_stddev

    @cached_property
    def mechanism(self) -> Mechanism:
        """The sampler, clipping and noise that every step of the run must use, and their event."""
        clipping = clipping_of(self.clipping, self.clip_norm)
        noise = with_randomness(noise_of(self.noise), self.randomness)
        return Mechanism(self.draw, clipping, noise, self.noise_multiplier)

    @property
    def event(self) -> Event:
        """The event that is charged for one step."""
        return self.mechanism.event

    @property
    def own_history(self) -> list[tuple[Event, int]]:
        """All planned steps, or the selection among such runs."""
        if self.selection is None:
            return self.history_of_run
        return [(selected_run(Selection.of(self.selection), self.event, self.num_steps), 1)]

    @property
    def reserved(self) -> tuple[Event, int]:
        """All steps of the run, or the one selection among such runs."""
        return (self.event, self.num_steps) if self.selection is None else self.history[0]

    @property
    def history_of_run(self) -> list[tuple[Event, int]]:
        """The history that is charged for all planned steps of this run."""
        return self.mechanism.history(self.num_steps)

    def stops_independently(self, contents: LedgerContents) -> bool:
        """Return whether the stop was declared independent; False for a selection, which is stated as a whole."""
        return contents.notes.stopped_independently and self.selection is None

    def unplanned(self, contents: LedgerContents) -> str | None:
        """Return how many of a ledger's steps differ from the plan."""
        foreign = sum(count for step, count in contents.history if step != self.event)
        return f"{foreign} steps have different numbers from the plan" if foreign else None

    def stated_steps(self, contents: LedgerContents) -> tuple[tuple[Event, int], ...]:
        """Return the steps of this run whose ε is stated (`dpllm.privacy.stated.stated_history`)."""
        if self.selection is not None and contents.num_steps:
            return steps_of_selection(self, contents)
        if contents.num_steps == 0 or contents.notes.stopped_independently:
            return taken_starts(contents.history)
        return stated_starts(contents.history, planned_steps(self, contents), contents.begins, self.num_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        parts = {name: None if fields[name] is None else fields[name].to_plain() for name in _SPECS}
        return {"format": PLAN_FORMAT, **fields, **parts}

    @staticmethod
    def fields_of(raw: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the fields from those in a file."""
        return raw | {name: Spec.of(raw[name]) for name in _SPECS if raw[name] is not None}


_SPECS = ("clipping", "noise", "selection")


def make_plan(
    privacy: PrivacyConfig,
    num_units: int,
    num_steps: int,
    num_examples: int | None = None,
    workload: Workload | None = None,
) -> PrivacyPlan:
    """Fix the numbers of a run: q, δ, B_max, and σ, which is calibrated when a target ε is given.

    Args:
        privacy: the configuration.
        num_units: N, the number of units in the training data. The plan makes it public.
        num_steps: T, the steps to take. If the configuration fixes both σ and a target ε, the plan has only the steps
            that stay within the target (``on_budget="stop"``).
        num_examples: total number of rows, at most k per unit; required if rows are drawn (``sampling="example"``). The
            plan makes it public.
        workload: how each step's noise enters the released weights; correlated noise is designed for it
            (`dpllm.training.workload.workload_of`). None: prefix sums of all steps. It does not change the guarantee.

    Returns:
        The plan. With a target, ``plan.epsilon <= privacy.epsilon``.

    Raises:
        ValueError: the data set is empty or smaller than a batch, δ is too large, there are no steps, the target cannot
            be reached, or (``on_budget="error"``) the steps would exceed the target.

    >>> privacy = PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=20)
    >>> make_plan(privacy, num_units=1000, num_steps=50).delta
    0.0001
    """
    draw = _untruncated(privacy, num_units, num_steps, num_examples)
    delta = _delta(privacy, num_units)
    noise = choose_noise(
        with_randomness(noise_of(Spec.of(privacy.noise)), privacy.randomness),
        draw,
        workload or Workload.prefix_sums(num_steps),
        target_epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        num_steps=num_steps,
        delta=delta,
        adjacency=privacy.adjacency,
    )
    noise_multiplier, max_batch_size = _noise_and_bound(privacy, noise, draw, num_steps, delta)
    plan = PrivacyPlan(
        unit=privacy.protects,
        adjacency=privacy.adjacency,
        max_rows_per_unit=privacy.max_rows_per_unit,
        unit_column=privacy.unit,
        rows_kept=privacy.rows_kept if privacy.protects == "user" else None,
        dataset=privacy.dataset,
        sampling=privacy.sampling,
        num_units=num_units,
        num_examples=num_examples if privacy.sampling == "example" else None,
        sampling_rate=draw.sampling_rate,
        expected_batch_size=draw.expected_batch_size,
        max_batch_size=max_batch_size,
        clip_norm=privacy.clip_norm,
        clipping=Spec.of(privacy.clipping),
        noise_multiplier=noise_multiplier,
        noise=spec_of(noise),
        randomness=privacy.randomness,
        seeded=privacy.seed is not None,
        num_steps=num_steps,
        delta=delta,
        target_epsilon=privacy.epsilon,
        selection=None if privacy.selection is None else Spec.of(privacy.selection),
    )
    return _within_budget(plan, privacy)


def _untruncated(privacy: PrivacyConfig, num_units: int, num_steps: int, num_examples: int | None) -> Draw:
    """Return the parameters of a draw that is never truncated; refuse a run without data or steps."""
    if num_units < 1:
        raise ValueError("the training data is empty: there is no unit to train on. Check the data section")
    if num_steps < 1:
        raise ValueError(
            f"num_steps must be at least 1, got {num_steps}; set train.max_steps or train.num_train_epochs"
        )
    by_example = privacy.sampling == "example"
    if by_example and num_examples is None:
        raise ValueError('sampling="example" draws rows. Pass num_examples, the number of rows within the bound')
    population = num_examples if by_example and num_examples is not None else num_units
    batch = batch_size(privacy, population)
    if batch > population:
        raise ValueError(
            f"expected_batch_size={batch} exceeds the number of "
            f"{'rows' if by_example else 'units'}, {population}: each enters a step at most once. Set it to "
            f"{population} or fewer"
        )
    return Draw(
        num_units=num_units,
        population=population,
        expected_batch_size=batch,
        max_batch_size=population,
        rows_per_unit=privacy.max_rows_per_unit if by_example else None,
    )


def _delta(privacy: PrivacyConfig, num_units: int) -> float:
    """Return δ, by default 1/(10 N); refuse one that is not below 1/N."""
    delta = privacy.delta if privacy.delta is not None else 1 / (10 * num_units)
    if delta * num_units >= 1:
        raise ValueError(
            f"delta={format_delta(delta)} is not below 1/N = {format_delta_limit(1 / num_units)} for N={num_units} "
            "units. At this δ, publishing one unit outright would be allowed. "
            f"Set it to 1/(10 N) = {format_delta_limit(1 / (10 * num_units))}, or omit delta"
        )
    return delta


def _within_budget(plan: PrivacyPlan, privacy: PrivacyConfig) -> PrivacyPlan:
    """Return the plan with the number of steps that its target allows; a calibrated σ allows all of them."""
    if privacy.epsilon is None or privacy.noise_multiplier is None:
        return plan
    allowed = steps_within(privacy.epsilon, plan.delta, plan.event, plan.num_steps, plan.adjacency)
    if allowed == plan.num_steps:
        return plan
    if allowed == 0 or privacy.on_budget == "error":
        raise ValueError(
            f"{plan.num_steps} steps at noise_multiplier={plan.noise_multiplier:g} cost ε = "
            f"{format_epsilon(plan.epsilon)}, but privacy.epsilon is {plan.target_epsilon:g}: {allowed} of them "
            f"would stay within it. Remove noise_multiplier, so that it is calibrated to all {plan.num_steps} steps"
            + (f', or set on_budget="stop" to end after {allowed}' if allowed else ", or take a larger one")
        )
    return dataclasses.replace(plan, num_steps=allowed, num_steps_wanted=plan.num_steps)


def _noise_and_bound(
    privacy: PrivacyConfig, noise: Noise, draw: Draw, num_steps: int, delta: float
) -> tuple[float, int]:
    """Return σ and B_max. If neither is given, B_max is chosen at the σ that suffices without truncation.

    If rows are drawn, no draw is truncated. If the batch size is fixed, it is B_max.

    Raises:
        ValueError: B_max is given and differs from a fixed batch size.
    """
    selection = None if privacy.selection is None else Selection.of(Spec.of(privacy.selection))

    def event_of(sigma: float, at_most: int) -> Event:
        event = noise.event(dataclasses.replace(draw, max_batch_size=at_most), sigma, privacy.clip_norm)
        return event if selection is None else selected_run(selection, event, num_steps)

    def calibrated(at_most: int) -> float:
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier
        assert privacy.epsilon is not None  # the configuration holds at least one of the two
        count = num_steps if selection is None else 1
        return calibrate(privacy.epsilon, delta, lambda sigma: event_of(sigma, at_most), count, privacy.adjacency)

    own_bound = noise.max_batch_size(draw)
    if own_bound is not None and not noise.is_sampled:
        if privacy.max_batch_size not in (None, own_bound):
            raise ValueError(
                f"max_batch_size={privacy.max_batch_size} bounds a random batch, but noise={noise.kind} takes exactly "
                f"{own_bound} units in every step. Remove max_batch_size"
            )
        return calibrated(own_bound), own_bound
    if draw.rows_per_unit is not None or (selection is not None and privacy.max_batch_size is None):
        return calibrated(draw.population), draw.population
    if privacy.max_batch_size is not None:
        at_most = min(privacy.max_batch_size, draw.num_units)
    elif own_bound is not None:
        at_most = own_bound
    else:
        tentative = calibrated(draw.num_units)
        at_most = choose_max_batch_size(
            draw.expected_batch_size,
            draw.num_units,
            lambda most: event_of(tentative, most),
            num_steps,
            delta,
            privacy.adjacency,
        )
    return calibrated(at_most), at_most


def format_plan(plan: PrivacyPlan) -> list[tuple[str, str]]:
    """Return the plan as (name, value) rows for people."""
    by_example, guarantee = plan.sampling == "example", plan.guarantee
    rows: list[tuple[str, str] | None] = [
        ("NOT PRIVATE", "a fixed seed makes sampling and noise predictable") if plan.seeded else None,
        ("unit of privacy", plan.unit if plan.unit == "sequence" else f"user (column {plan.unit_column})"),
        None
        if plan.max_rows_per_unit is None
        else ("rows of one user at most", f"{plan.max_rows_per_unit} ({plan.rows_kept})"),
        ("units N", f"{plan.num_units:,}"),
        ("rows, each drawn and clipped separately", f"{plan.num_examples:,}") if by_example else None,
        _rate_shown(plan),
        (
            f"{'rows' if by_example else 'units'} per step: expected b, at most",
            f"{plan.expected_batch_size:,}, {plan.max_batch_size:,}",
        ),
        ("steps T", f"{plan.num_steps:,}"),
        None
        if plan.num_steps_wanted is None
        else ("steps requested, more than the budget allows", f"{plan.num_steps_wanted:,}"),
        ("noise multiplier σ", f"{plan.noise_multiplier:.6g}"),
        ("clip norm C", f"{plan.clip_norm:g}"),
        *_parts_shown(plan),
        _noise_shown(plan),
        ("δ", format_delta(guarantee.delta)),
        *_selection_shown(plan),
        *((f"ε, {adjacency}", format_epsilon(value)) for adjacency, value in guarantee.by_adjacency.items()),
        ("adjacency of the headline", guarantee.adjacency),
        None if plan.randomness == "os" else ("randomness of the noise", plan.randomness),
    ]
    return [row for row in rows if row is not None]


def _selection_shown(plan: PrivacyPlan) -> list[tuple[str, str]]:
    """Return the rows of a selection: its distribution, and the ε of a single run."""
    if plan.selection is None:
        return []
    released = f"only the best of K such runs; {Selection.of(plan.selection).words()}; ε covers the selection"
    return [("released", released), ("ε of one run by itself", str(plan.guarantee.of(plan.history_of_run)))]


def _rate_shown(plan: PrivacyPlan) -> tuple[str, str]:
    if not plan.mechanism.noise.is_sampled:
        return "share of the units in a step, b/N", f"{plan.sampling_rate:.6g}; units are not sampled"
    return "sampling rate q", f"{plan.sampling_rate:.6g}"


def _noise_shown(plan: PrivacyPlan) -> tuple[str, str]:
    first, last = plan.mechanism.release_stddevs(plan.num_steps)
    symbol = "σC" if plan.mechanism.first_threshold is None else "σ_g C"
    if first == last == plan.noise_stddev:
        return f"noise standard deviation {symbol}", f"{plan.noise_stddev:.6g}"
    return (
        f"noise standard deviation {symbol}, before correlation",
        f"{plan.noise_stddev:.6g}; about {first:.2g} to {last:.2g} in a release",
    )


def _parts_shown(plan: PrivacyPlan) -> list[tuple[str, str]]:
    """Return the rows of clipping, noise and sampling that differ from DP-SGD."""
    rows = []
    if plan.clipping != FLAT:
        rows.append(("a unit's gradient", plan.mechanism.clipping.words()))
    if plan.noise != INDEPENDENT:
        rows.append(("sampling", plan.event.words().sampling))
        rows.append(("noise", plan.mechanism.noise.words().rstrip(",")))
    return rows
