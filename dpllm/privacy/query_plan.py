"""Plan a query run: a private release such as noisy counts, votes or tokens, without a training run.

A query run charges kinds of private answers. Each kind is an event of the catalogue and the largest number of times
that it may be charged. All of it is fixed before the first answer, and ε covers all of it. A run that builds on a model
trained on the same people names that training run (`PriorRelease`), and its ε covers both together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.mechanism.catalogue import from_fields, to_fields
from dpllm.mechanism.events import Event
from dpllm.mechanism.limits import MAX_STEPS, RANDOMNESS
from dpllm.mechanism.query import Several
from dpllm.privacy.accounting import merge
from dpllm.privacy.ledger_reader import LedgerContents
from dpllm.privacy.plan import PLAN_FILE, PLAN_FORMAT, Plan, PrivacyPlan, read_plan_file
from dpllm.registry import release_words, require_release

History = tuple[tuple[Event, int], ...]
Value = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One kind of private answer of a query run, with the largest number of times that it may be charged.

    Raises:
        ValueError: the name is empty, the count is out of range, or the event has no noise.
    """

    name: str
    """A name in plain words that is unique in the plan: "votes", "tokens of a text"."""
    event: Event
    """Privacy cost of one answer."""
    count: int
    """Largest number of times it may be charged."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not isinstance(self.name, str) or not self.name or self.name != " ".join(self.name.split()):
            raise ValueError(f"the name of a charge must be one line of text, got {self.name!r}")
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 1 <= self.count <= MAX_STEPS:
            raise ValueError(f"{self.name!r} must be charged between 1 and {MAX_STEPS:,} times, got {self.count!r}")
        if any(one.is_bare for one, _ in merge([(self.event, 1)])):
            raise ValueError(f"{self.name!r} has no noise, so it would not be private. Set a noise multiplier above 0")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"name": self.name, "count": self.count, **to_fields(self.event)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Charge:
        """Return a charge from the values of `to_dict`."""
        values = dict(plain)
        name, count = values.pop("name"), values.pop("count")
        return cls(name=name, event=from_fields(values), count=count)


@dataclass(frozen=True, kw_only=True)
class PriorRelease:
    """A released training run on the same people, on whose model a query run builds. `prior_release` makes it."""

    folder: str
    """Name of its folder, without the path."""
    run: str
    """Id of its first start, in its ledger."""
    plan_hash: str
    chain: str
    """Hash of the last line of its ledger when the query run was planned."""
    history: History
    """The steps whose ε its report states."""
    unit: str
    unit_column: str | None
    num_units: int
    dataset: str | None
    budget: tuple[str, str] | None = None
    """Name of the budget file to which it was charged, and its entry there; None: no budget."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        history = [[to_fields(event), count] for event, count in self.history]
        return {**fields, "history": history, "budget": None if self.budget is None else list(self.budget)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> PriorRelease:
        """Return a prior release from the values of `to_dict`."""
        history = tuple((from_fields(event), count) for event, count in plain["history"])
        budget = None if plain["budget"] is None else (str(plain["budget"][0]), str(plain["budget"][1]))
        return cls(**{**plain, "history": history, "budget": budget})


@dataclass(frozen=True, kw_only=True)
class QueryPlan(Plan):
    """The constants of a query run. All of them are public.

    Raises:
        ValueError: the numbers contradict each other, or the prior release is about different people.

    >>> from dpllm.mechanism.query import Query
    >>> votes = Charge(name="votes", event=Query(noise_multiplier=10.0), count=20)
    >>> plan = QueryPlan(
    ...     method="label counts", unit="sequence", adjacency="zero-out", num_units=1000, charges=(votes,), delta=1e-5
    ... )
    >>> round(plan.epsilon, 2)
    1.76
    """

    of_what = "plan of a query run"
    remedy = "Change these values in the recipe, or where the plan is made"

    method: str
    """A key of `dpllm.registry.release_words`."""
    charges: tuple[Charge, ...]
    """Everything that the run may charge."""
    settings: tuple[tuple[str, Value], ...] = ()
    """Public settings that determine sensitivity and events, by name, for the report."""
    randomness: str = "os"
    """The generator of the noise: "os", or "discrete" for exact whole numbers."""
    after: PriorRelease | None = None
    """The released run on whose model this one builds; ε then covers both together."""

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds."""
        names = [charge.name for charge in self.charges]
        keys = [name for name, _ in self.settings]
        known = release_words()
        return {
            **super().rules(),
            f"method in {tuple(known)}": self.method in known,
            "at least one charge, or a prior release": bool(names) or self.after is not None,
            "charges with different names": len(set(names)) == len(names),
            "settings with different names": len(set(keys)) == len(keys),
            f"randomness in {tuple(name for name in RANDOMNESS if name != 'chacha20')}": (
                self.randomness in ("os", "discrete")
            ),
            "target_epsilon > 0": self.target_epsilon is None or self.target_epsilon > 0,
            **_same_people(self, self.after),
        }

    @property
    def own_history(self) -> list[tuple[Event, int]]:
        """Everything that this run may charge."""
        return [(charge.event, charge.count) for charge in self.charges]

    @property
    def event(self) -> Event:
        """All charges of this run as one event, which its ledger and its budget name."""
        return Several.of(self.own_history)

    @property
    def reserved(self) -> tuple[Event, int]:
        """All charges of this run as one event."""
        return self.event, 1

    @property
    def num_steps(self) -> int:
        """The number of answers that may be charged."""
        return sum(charge.count for charge in self.charges)

    @property
    def seeded(self) -> bool:
        """False: a query run takes its randomness from the operating system."""
        return False

    @property
    def selection(self) -> None:
        """None: a query run is released by itself."""
        return None

    def charge(self, name: str) -> Charge:
        """Return the charge of this name.

        Raises:
            ValueError: the plan has none.
        """
        for charge in self.charges:
            if charge.name == name:
                return charge
        known = ", ".join(repr(charge.name) for charge in self.charges)
        raise ValueError(f"the plan of this run has no charge {name!r}, only {known}. Charge what was planned")

    @property
    def num_steps_wanted(self) -> None:
        """None: everything requested is planned."""
        return None

    def stops_independently(self, contents: LedgerContents) -> bool:
        """Return whether the stop was declared independent and no line that a crash cut off may have been a charge."""
        return contents.answers_end_independently

    def unplanned(self, contents: LedgerContents) -> str | None:
        """Return in words an answer in a ledger that is not planned, or not as often."""
        planned = {(charge.name, charge.event): charge.count for charge in self.charges}
        for (name, event), count in contents.notes.answers.items():
            if (name, event) not in planned:
                return f"{name!r} is charged with an event that is not in the plan"
            if count > planned[name, event]:
                return f"{name!r} is charged {count:,} times, but the plan allows {planned[name, event]:,}"
        counted = sum(contents.notes.answers.values()) + contents.torn_steps
        return (
            f"{contents.num_steps - counted} lines are steps of a training run"
            if counted != contents.num_steps
            else None
        )

    def stated_steps(self, contents: LedgerContents) -> tuple[tuple[Event, int], ...]:
        """Return the answers whose ε is stated (`dpllm.privacy.stated.stated_history`).

        They are all planned answers, with two exceptions: none if nothing was charged, and the charged ones if people
        declared that the stop depends neither on the data nor on the answers. A line that a crash left incomplete may
        have been any charge, so all planned answers are then stated despite such a declaration.
        """
        if contents.num_steps == 0:
            return ()
        return tuple(contents.history if self.stops_independently(contents) else self.own_history)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {
            "format": PLAN_FORMAT,
            **fields,
            "charges": [charge.to_dict() for charge in self.charges],
            "settings": dict(self.settings),
            "after": None if self.after is None else self.after.to_dict(),
        }

    @staticmethod
    def fields_of(raw: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the fields from those in a file."""
        require_release(raw["method"])  # before its events, which are then unknown as well
        return {
            **raw,
            "charges": tuple(Charge.of(charge) for charge in raw["charges"]),
            "settings": tuple(raw["settings"].items()),
            "after": None if raw["after"] is None else PriorRelease.of(raw["after"]),
        }


def load_plan(path: str | Path) -> PrivacyPlan | QueryPlan:
    """Read the plan of a training run or of a query run.

    Raises:
        ValueError: the file is missing, is not a plan, or was edited.
    """
    return QueryPlan.load(path) if "method" in read_plan_file(path) else PrivacyPlan.load(path)


def training_plan(folder: str | Path, purpose: str) -> PrivacyPlan:
    """Return the plan of a training run; refuse a query run.

    Raises:
        ValueError: the folder holds a query run, or no plan.
    """
    plan = load_plan(Path(folder) / PLAN_FILE)
    if isinstance(plan, QueryPlan):
        raise ValueError(
            f"{purpose} needs the folder of a training run, but {folder} holds {release_words()[plan.method].result}, "
            "which have no steps. Pass the training run's folder"
        )
    return plan


def _same_people(plan: QueryPlan, after: PriorRelease | None) -> dict[str, bool]:
    """Return whether a prior release has the unit, the number of units and the data set of the plan."""
    if after is None:
        return {}
    return {
        f"the {name} of the prior run, {getattr(after, name)!r}": getattr(plan, name) == getattr(after, name)
        for name in ("unit", "unit_column", "num_units", "dataset")
    }
