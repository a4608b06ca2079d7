"""Define the parts of a plan: the protected unit, the draw of a step, the noise of a step, and what every plan has.

The plans in `dpllm.privacy.plan` and `dpllm.privacy.query_plan` inherit these fields. Each part checks its own fields.
A function that needs one part has that part as its argument's type; a function that accepts any plan has `Plan`.
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

from dpllm.config import SAMPLINGS, UNITS
from dpllm.config.files import write_file
from dpllm.config.versions import has_format, other_format
from dpllm.mechanism.limits import ADJACENCIES, RANDOMNESS
from dpllm.mechanism.parts import Draw, Spec
from dpllm.privacy.accounting import Guarantee
from dpllm.privacy.rounding import format_delta_limit

if TYPE_CHECKING:
    from dpllm.mechanism.events import Event
    from dpllm.privacy.ledger_reader import LedgerContents
    from dpllm.privacy.query_plan import PriorRelease

FLAT, INDEPENDENT = Spec("flat"), Spec("independent")
"""Clipping and noise of DP-SGD."""


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """A group of a private run's public constants.

    Raises:
        ValueError: the values contradict each other.
    """

    remedy = "Make the plan with make_plan"

    def __post_init__(self) -> None:
        """Check all rules; the error names each broken one."""
        broken = [rule for rule, holds in self.rules().items() if not holds]
        if broken:
            raise ValueError(f"a privacy plan needs {'; '.join(broken)}. {self.remedy}")

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds. A part adds its own rules to those of its bases."""
        return {}


@dataclass(frozen=True, kw_only=True)
class PlannedUnit(PlanPart):
    """The protected unit, its neighbours, and the data set."""

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

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds."""
        return {
            **super().rules(),
            f"unit in {UNITS}": self.unit in UNITS,
            f"adjacency in {ADJACENCIES}": self.adjacency in ADJACENCIES,
        }


@dataclass(frozen=True, kw_only=True)
class PlannedDraw(PlannedUnit):
    """The number of units, and the draw of a step."""

    sampling: str = "unit"
    """"unit": whole units are drawn and clipped. "example": single rows are drawn and clipped."""
    num_units: int
    """N."""
    num_examples: int | None = None
    """Number of rows to draw from, at most k per user; None if units are drawn."""
    sampling_rate: float
    """q = b / N, or b / `num_examples` if rows are drawn."""
    expected_batch_size: int
    """b, the divisor of the noisy sum."""
    max_batch_size: int
    """B_max. If rows are drawn, it is `num_examples`, since no draw is truncated."""

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


@dataclass(frozen=True, kw_only=True)
class PlannedNoise(PlanPart):
    """The clipping of a contribution, and the noise of a step."""

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

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds."""
        return {
            **super().rules(),
            "0 <= noise_multiplier < inf": 0 <= self.noise_multiplier < math.inf,
            "0 < clip_norm < inf": 0 < self.clip_norm < math.inf,
            f"randomness in {RANDOMNESS}": self.randomness in RANDOMNESS,
        }


PLAN_FILE = "privacy_plan.json"
PLAN_FORMAT = 1
"""Format of a plan file, for training runs and query runs."""


@dataclass(frozen=True, kw_only=True)
class Plan(PlannedUnit):
    """The base of every plan, of training runs and query runs: a guarantee, and a file with a hash.

    Raises:
        ValueError: the numbers contradict each other.
    """

    of_what: ClassVar[str]
    """The plan in words, for errors."""

    num_units: int
    """N."""
    delta: float
    """δ."""
    target_epsilon: float | None = None
    """The ε that the noise was calibrated to; None when the noise was given."""

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds."""
        return {
            **super().rules(),
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
            """The kind of private release (`dpllm.privacy.release_words`); None: a training run."""

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
