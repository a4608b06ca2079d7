"""The section ``privacy`` of a recipe: the guarantee, and the public constants of the mechanism that provides it.

Place in the flow: a part of `dpllm.config.recipe`; `dpllm.privacy.plan.make_plan` turns it into a plan. `PrivacyConfig`
holds public values only; nothing in it may be derived from the private data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpllm.config import values
from dpllm.config.topics import Topic
from dpllm.config.values import ConfigError
from dpllm.mechanism.limits import (
    ADJACENCIES,
    MAX_CLIP_NORM,
    MAX_NOISE,
    MAX_ROWS_DRAWN_PER_UNIT,
    MAX_TARGET_EPSILON,
    MIN_CLIP_NORM,
    MIN_NOISE,
    RANDOMNESS,
)
from dpllm.mechanism.parts import Spec

UNITS = ("sequence", "user")
ROWS_PER_UNIT = 16
"""The default of ``max_rows_per_unit``, a public constant."""
CLIP_NORM = 0.1
"""The default of ``clip_norm``, a public constant."""
SAMPLINGS = ("unit", "example")
ROWS_KEPT = ("first", "random")
ON_BUDGET = ("stop", "error")
STOPS = ("planned", "independent")
GRADIENTS = ("ghost", "per_unit", "auto")
UNUSED_PARAMETERS = ("error", "freeze")

_NO_UNIT = "each record is a unit: name the column of the units (data.columns.unit), or leave it out"
_NOT_POISSON = (
    *("shuffle", "shuffled", "random", "epoch", "sequential", "fixed", "fixed-size", "fixed_size"),
    *("balls-in-bins", "balls_in_bins", "without-replacement", "without_replacement"),
)


@dataclass(frozen=True, kw_only=True)
class PrivacyNumbers(Topic):
    """The numbers of the mechanism: C and b, the target ε or σ, and δ."""

    clip_norm: float = CLIP_NORM
    """C > 0: no unit contributes more than this to the sum of gradients of a step (L2 norm)."""
    expected_batch_size: int | None = None
    """b: average number of units (rows, with sampling="example") per step, over all machines. It divides the sum. None:
    about a fortieth of the units, between 64 and 2048 (`dpllm.privacy.defaults.batch_and_steps`)."""
    epsilon: float | None = None
    """The ε that the whole run may cost. The noise multiplier is calibrated to it. If the noise multiplier is given
    too, the run takes as many of its steps as the budget allows."""
    noise_multiplier: float | None = None
    """σ: noise standard deviation divided by `clip_norm`. 0 means no noise, and ε = inf."""
    delta: float | None = None
    """δ of (ε, δ), below 1/N for N units. None: 1/(10 N)."""

    def __post_init__(self) -> None:
        """Check the range of each number, and that one of them determines the noise."""
        super().__post_init__()
        self._set("clip_norm", values.between("clip_norm", self.clip_norm, 0, above=True))
        values.between("clip_norm", self.clip_norm, MIN_CLIP_NORM, MAX_CLIP_NORM)
        if self.expected_batch_size is not None:
            self._set("expected_batch_size", values.integer("expected_batch_size", self.expected_batch_size, 1))
        if self.epsilon is None and self.noise_multiplier is None:
            raise ConfigError(
                "give epsilon or noise_multiplier: epsilon=8 calibrates the noise to a budget, "
                "noise_multiplier=1.0 sets the noise and reports its cost, both together stop the run at the budget"
            )
        if self.epsilon is not None:
            self._set("epsilon", values.between("epsilon", self.epsilon, 0, above=True))
            if self.epsilon > MAX_TARGET_EPSILON:
                raise ConfigError(
                    f"epsilon must be at most {MAX_TARGET_EPSILON:g}, got {values.shown(self.epsilon)}: a larger ε "
                    "protects nobody. Take one below 10, or noise_multiplier=0 for a run without privacy"
                )
        if self.noise_multiplier is not None:
            self._set("noise_multiplier", values.between("noise_multiplier", self.noise_multiplier, 0, MAX_NOISE))
            if 0 < self.noise_multiplier < MIN_NOISE:
                raise ConfigError(
                    f"noise_multiplier must be 0 or at least {MIN_NOISE:g}, got {self.noise_multiplier:g}: less "
                    "noise hides nothing, and its ε is infinite. Take about 1, or 0 for a run without privacy"
                )
        if self.delta is not None:
            self._set("delta", values.number("delta", self.delta))
            if not 0 < self.delta < 1:
                raise ConfigError(f"delta must be between 0 and 1 and below 1/N, got {self.delta}; usual is 1/(10 N)")


@dataclass(frozen=True, kw_only=True)
class PrivacyUnit(Topic):
    """The protected unit, and the choice of its rows."""

    unit: str | None = None
    """The column whose value identifies the unit that a neighbouring data set lacks: all records with one value are
    protected together. None: each record is a unit. In a recipe file it is ``data.columns.unit``."""
    max_rows_per_unit: int | None = None
    """k: how many rows of one unit may be used. None: `ROWS_PER_UNIT` where there is a column, and one record else."""
    rows_kept: str = "first"
    """Which k rows of a user with more: "first", or "random", by a secret draw. Fixed before the run."""
    normalize_ids: bool = False
    """Whether user ids that differ only in case, spaces, Unicode form or the spelling of a number are one user."""

    def __post_init__(self) -> None:
        """Check that keys for units of several rows have a column of the units."""
        super().__post_init__()
        if self.unit is not None:
            values.text("unit", self.unit)
            most = ROWS_PER_UNIT if self.max_rows_per_unit is None else self.max_rows_per_unit
            self._set("max_rows_per_unit", values.integer("max_rows_per_unit", most, 1))
            values.choice("rows_kept", self.rows_kept, ROWS_KEPT)
            values.flag("normalize_ids", self.normalize_ids)
            return
        if self.normalize_ids:
            raise ConfigError(f"normalize_ids is about the ids of units, and {_NO_UNIT}")
        if self.rows_kept != "first":
            raise ConfigError(f"rows_kept chooses rows of a unit, and {_NO_UNIT}")
        if self.max_rows_per_unit is not None:
            raise ConfigError(f"max_rows_per_unit bounds the rows of a unit, and {_NO_UNIT}")

    @property
    def protects(self) -> str:
        """What a unit is, one of `UNITS`: "sequence" (one record) or "user" (all records with one value of `unit`)."""
        return "sequence" if self.unit is None else "user"


@dataclass(frozen=True, kw_only=True)
class PrivacyMechanism(PrivacyUnit, PrivacyNumbers):
    """The parts of a step: sampling, clipping and noise, and the largest batch."""

    sampling: str = "unit"
    """The items that Poisson sampling draws: "unit" draws and clips whole units; "example" draws and clips each row of
    a user separately, and the accounting assumes that every user has k rows."""
    clipping: Any = "flat"
    """How a unit's contribution is bounded: "flat" scales it down to `clip_norm` if its norm is larger; the table in
    `recipes/README.md` has all kinds (`dpllm recipes all --copy`). Options go into a mapping:
    {kind: automatic, stability: 0.01}."""
    noise: Any = "independent"
    """How the noise of the steps is correlated (`docs/correlated_noise.md`): "independent" (DP-SGD); "banded", with the
    noise of earlier steps, where the units are drawn from one of several groups in turn; or "blt", for units that
    cannot be sampled: each pass visits every unit once, in one order. Options: {kind: blt, buffers: 2}, up to 4 or
    auto; {kind: banded, bands: 8, strategy: geometric}. ``bands``: the number of groups, or auto, the best one at
    `epsilon`. ``strategy``: geometric or free; its numbers are computed for the optimizer and the schedule of
    the run, and the plan stores them. To fix them: ``ratio``, or ``coefficients``, a list."""
    max_batch_size: int | None = None
    """More units than this never enter one step. None: b + 7 sqrt(b), raised until it costs nothing in ε."""

    def __post_init__(self) -> None:
        """Check the sampling, construct clipping and noise once, and check B_max."""
        super().__post_init__()
        self._check_sampling()
        self._check_parts()
        if self.max_batch_size is not None:
            self._set("max_batch_size", values.integer("max_batch_size", self.max_batch_size, 1))
            if self.expected_batch_size is not None and self.max_batch_size < self.expected_batch_size:
                raise ConfigError(
                    f"max_batch_size={self.max_batch_size} is below expected_batch_size={self.expected_batch_size}: "
                    "raise it, or leave it out (it is then chosen so that it costs nothing in ε)"
                )

    def _check_sampling(self) -> None:
        if self.sampling in _NOT_POISSON:
            raise ConfigError(
                f"sampling={self.sampling!r} is not Poisson sampling, and the ε of Poisson sampling does not hold for "
                "it: if a run is accounted at ε = 5.2, shuffled batches reveal 19.9 or more (bound as in Chua et al., "
                "arXiv:2403.17673). Leave sampling out: every unit is then drawn independently in every step"
            )
        values.choice("sampling", self.sampling, SAMPLINGS)
        if self.sampling == "example":
            if self.max_rows_per_unit is not None and self.max_rows_per_unit > MAX_ROWS_DRAWN_PER_UNIT:
                raise ConfigError(
                    f'max_rows_per_unit must be at most {MAX_ROWS_DRAWN_PER_UNIT:,} with sampling="example", got '
                    f"{self.max_rows_per_unit:,}: computing ε for more rows of one user takes too long. Lower it, or "
                    "leave sampling out"
                )
            if self.unit is None:
                raise ConfigError(f'sampling="example" draws rows of a unit singly, and {_NO_UNIT}')
            if self.max_batch_size is not None:
                raise ConfigError(
                    'max_batch_size cannot be used with sampling="example": no accounting is known for a truncated '
                    "sample of rows. Leave it out; a large draw only takes more microbatches"
                )

    def _check_parts(self) -> None:
        """Construct clipping and noise once, so that a wrong option is found now."""
        from dpllm.mechanism.catalogue import clipping_of, noise_of  # the command line's help does not wait for it

        for name, made in (("clipping", lambda spec: clipping_of(spec, self.clip_norm)), ("noise", noise_of)):
            try:
                spec = Spec.of(getattr(self, name))
                made(spec)
            except ValueError as error:
                words = str(error)
                raise ConfigError(words if words.startswith(name) else f"{name}: {words}") from error
            self._set(name, spec.to_plain())


@dataclass(frozen=True, kw_only=True)
class PrivacyCost(Topic):
    """The stated ε, its limit, and the budget that is charged."""

    adjacency: str = "zero-out"
    """Adjacency of the headline ε: "zero-out" (a unit against nothing) or "replace-one" (a unit against another)."""
    stop: str = "planned"
    """The ε stated by a run that ends before its planned steps: "planned", the ε of all of them, or "independent", the
    ε of the steps taken. The latter holds only if the stop depends neither on the data nor on the run's releases."""
    on_budget: str = "stop"
    """When the requested steps would cost more than `epsilon`: "stop" before the step that would exceed it, or
    "error" before the first step."""
    dataset: str | None = None
    """Public name of the private data set; the costs of runs on it are added up. Required with `budget_file`."""
    budget_file: str | None = None
    """The file with the privacy budget of all runs on this data set (`dpllm budget`); it is charged beforehand."""

    def __post_init__(self) -> None:
        """Check every value, and that a budget names its data set."""
        super().__post_init__()
        values.choice("adjacency", self.adjacency, ADJACENCIES)
        values.choice("on_budget", self.on_budget, ON_BUDGET)
        values.choice("stop", self.stop, STOPS)
        for name in ("dataset", "budget_file"):
            if getattr(self, name) is not None:
                values.text(name, getattr(self, name))
        if self.budget_file is not None and self.dataset is None:
            raise ConfigError(
                "budget_file needs dataset: set it to the name of the data set that the file was made for, so that no "
                "run is charged to the budget of other data"
            )


@dataclass(frozen=True, kw_only=True)
class PrivacyGradients(Topic):
    """How the gradients of units are computed; no number of the guarantee depends on it."""

    gradients: str = "ghost"
    """"ghost" computes norms and the clipped sum of all units of a microbatch in one backward pass, by a rule for each
    layer. "per_unit" runs one unit after another by plain autograd: slower, and exact for every structure. "auto" takes
    the first where every part of the model has a rule, otherwise the second, and logs the part and the cost."""
    unused_parameters: str = "error"
    """Trainable parameters that no loss reaches: "error", or "freeze", which freezes them before the first step and
    names them in the report. Which ones is decided on rows that are made up."""

    def __post_init__(self) -> None:
        """Check the words."""
        super().__post_init__()
        values.choice("gradients", self.gradients, GRADIENTS)
        values.choice("unused_parameters", self.unused_parameters, UNUSED_PARAMETERS)


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig(PrivacyGradients, PrivacyCost, PrivacyMechanism):
    """The privacy guarantee, and the public constants of the mechanism that provides it.

    Its keywords are those of `PrivacyNumbers`, `PrivacyUnit`, `PrivacyMechanism`, `PrivacyCost` and `PrivacyGradients`,
    and these three.

    Raises:
        ConfigError: a value is of the wrong kind or out of range, or two values contradict each other.

    >>> PrivacyConfig(epsilon=8, delta=1e-6, clip_norm=1, expected_batch_size=1024).epsilon
    8.0
    """

    randomness: str = "os"
    """The generator of the noise, keyed by the operating system: "os" (NumPy's PCG64DXSM, on a GPU PyTorch's Philox),
    "chacha20" (a cipher: to tell its bits from random ones, it would have to be broken), or "discrete": exact discrete
    Gaussian numbers from that cipher, added to the sum rounded to a grid. Nothing of the noise is rounded then, and ε
    is larger (`dpllm.mechanism.discrete`)."""
    selection: Any = None
    """The number of runs of which only the best is released, `{kind: logarithmic, mean: 10}`: ε is then that of the
    selection. `dpllm methods tune` sets it; a run with it may be released by `dpllm methods tune` only."""
    seed: int | None = None
    """Fixes sampling and noise. For tests only: anyone with the seed can subtract the noise, so nothing is private."""

    def __post_init__(self) -> None:
        """Check every value and convert whole numbers where floats are meant."""
        super().__post_init__()
        values.choice("randomness", self.randomness, RANDOMNESS)
        if self.selection is not None:
            self._set("selection", checked_selection(self))
        if self.seed is not None:
            self._set("seed", values.integer("seed", self.seed, 0))


def checked_selection(privacy: PrivacyConfig) -> Any:
    """Return the selection as plain values.

    Raises:
        ConfigError: it is not one, or no selection of such runs is accounted for.
    """
    from dpllm.mechanism.selection import Selection

    try:
        spec = Spec.of(privacy.selection)
        Selection.of(spec)
    except ValueError as error:
        words = str(error)
        raise ConfigError(words if words.startswith("selection") else f"selection: {words}") from error
    wrong = {
        "seed: the fixed seed makes every run the same": privacy.seed is not None,
        "sampling=example: no Rényi bound is known for rows of a unit that are drawn singly": (
            privacy.sampling == "example" and privacy.max_rows_per_unit != 1
        ),
        "max_batch_size: no Rényi bound is known for truncated samples": privacy.max_batch_size is not None,
        "stop=independent: the ε of a selection is that of complete runs": privacy.stop != "planned",
        "both epsilon and noise_multiplier: the selection has one σ, from one of them": (
            privacy.epsilon is not None and privacy.noise_multiplier is not None
        ),
        "budget_file: `dpllm methods tune` charges it, and not each of the runs": privacy.budget_file is not None,
    }
    for what, holds in wrong.items():
        if holds:
            raise ConfigError(f"selection cannot be combined with {what}. Leave it out")
    return spec.to_plain()
