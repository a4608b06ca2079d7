"""The section ``privacy`` of a recipe: the guarantee, and the public constants of the mechanism that provides it.

`dpllm.privacy.plan.make_plan` makes a plan of a `PrivacyConfig`. Its values are public: none may be derived from the
private data.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dpllm.config.sections import BASIC, Count, Number, OneOf, Text, Whole, Why, assign, section
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

_NO_UNIT = (
    "each record is a unit: name the column of the units (data.columns.unit; in Python PrivacyConfig(unit=…)), or "
    "leave it out"
)
_NOT_POISSON = (
    *("shuffle", "shuffled", "random", "epoch", "sequential", "fixed", "fixed-size", "fixed_size"),
    *("balls-in-bins", "balls_in_bins", "without-replacement", "without_replacement"),
)


def _noise(sigma: Any) -> Any:
    if isinstance(sigma, int | float) and not isinstance(sigma, bool) and 0 < sigma < MIN_NOISE:
        raise ConfigError(
            f"noise_multiplier must be 0 or at least {MIN_NOISE:g}, got {sigma:g}: less noise hides nothing, and its ε "
            "is infinite. Take about 1, or 0 for a run without privacy"
        )
    return sigma


def _sampling(given: Any) -> Any:
    if isinstance(given, str) and given in _NOT_POISSON:
        raise ConfigError(
            f"sampling={given!r} is not Poisson sampling, and the ε of Poisson sampling does not hold for it: if a run "
            "is accounted at ε = 5.2, shuffled batches reveal 19.9 or more (bound as in Chua et al., arXiv:2403.17673)."
            " Leave sampling out: every unit is then drawn independently in every step"
        )
    return given


Epsilon = Annotated[Number, Field(gt=0, le=MAX_TARGET_EPSILON)]
NO_SUCH_EPSILON = Why("a larger ε protects nobody. Take one below 10, or noise_multiplier=0 for a run without privacy")
Delta = Annotated[Number, Field(gt=0, lt=1)]
USUAL_DELTA = Why("δ is below 1/N for N units; usual is 1/(10 N)")


@section
class PrivacyUnit:
    """The protected unit, and the choice of its rows."""

    unit: Text | None = None
    """The column whose value identifies the unit that a neighbouring data set lacks: all records with one value are
    protected together. None: each record is a unit. In a recipe file it is ``data.columns.unit``."""
    max_rows_per_unit: Annotated[Count | None, BASIC] = None
    """k: how many rows of one unit may be used, where there is a column of units. null: 16 there."""
    rows_kept: Annotated[str, OneOf(ROWS_KEPT)] = "first"
    """Which k rows of a unit with more: first, or random, by a secret draw. Fixed before the run."""
    normalize_ids: bool = False
    """Whether ids of units that differ only in case, spaces, Unicode form or the spelling of a number are one. Without
    it such ids are an error or an open point."""

    def __post_init__(self) -> None:
        """Check that keys for units of several rows have a column of the units."""
        if self.unit is not None:
            assign(self, max_rows_per_unit=self.max_rows_per_unit or ROWS_PER_UNIT)
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


@section
class PrivacyConfig(PrivacyUnit):
    """The privacy guarantee, and the public constants of the mechanism that provides it.

    Its keywords are those of `PrivacyUnit` and these.

    Raises:
        ConfigError: a value is of the wrong kind or out of range, or two values contradict each other.

    >>> PrivacyConfig(epsilon=8, delta=1e-6, clip_norm=1, expected_batch_size=1024).epsilon
    8.0
    """

    expected_batch_size: Annotated[Count | None, BASIC] = None
    """b: average number of units (rows, with sampling=example) per step, over all machines. It divides the sum. null:
    about a fortieth of the units, between 64 and 2048."""
    epsilon: Annotated[Epsilon | None, NO_SUCH_EPSILON, BASIC] = None
    """The ε that the whole run may cost; the noise is calibrated to it. If the noise multiplier is given too, the run
    takes as many of its steps as the budget allows."""
    delta: Annotated[Delta | None, USUAL_DELTA, BASIC] = None
    """δ of (ε, δ), below 1/N for N units. null: 1/(10 N)."""
    noise_multiplier: Annotated[Annotated[Number, Field(ge=0, le=MAX_NOISE)] | None, BeforeValidator(_noise), BASIC] = (
        None
    )
    """σ: noise standard deviation divided by clip_norm. 0 means no noise, and ε = inf."""
    clip_norm: Annotated[Number, Field(ge=MIN_CLIP_NORM, le=MAX_CLIP_NORM), BASIC] = CLIP_NORM
    """C: no unit contributes more than this to the sum of gradients of a step (L2 norm)."""
    clipping: Any = "flat"
    """How a unit's contribution is bounded: flat scales it down to clip_norm if its norm is larger; per-layer (each of
    G layers to C/√G); {kind: groups, parameters: {embeddings: '*embed*', rest: '*'}, shares: {embeddings: 1, rest: 3}}
    (groups by names of parameters, each to its share of C²); {kind: automatic, stability: 0.01} (AUTO-S); {kind: psac,
    stability: 0.01} (DP-PSAC); {kind: quantile, quantile: 0.5, rate: 0.2, start: 1.0, count_noise: 25} (to a threshold
    that follows a quantile of the norms by noisy counts, then scaled by C over the threshold)."""
    noise: Annotated[Any, BASIC] = "independent"
    """How the noise of the steps is correlated (docs/correlated_noise.md): independent (DP-SGD); banded, where the
    units are drawn from one of several groups in turn, {kind: banded, bands: auto or k, strategy: geometric or free};
    or blt, for units that cannot be sampled, {kind: blt, buffers: auto or 1 to 4}. To fix a strategy: ratio or
    coefficients; decays, weights and scale. In a federated run {kind: distributed, dropouts: 0.3}."""
    sampling: Annotated[str, OneOf(SAMPLINGS), BeforeValidator(_sampling)] = "unit"
    """The items that Poisson sampling draws: unit draws and clips whole units; example draws and clips each row of a
    unit separately, and the accounting assumes that every unit has k rows."""
    max_batch_size: Count | None = None
    """B_max: more units than this never enter one step. null: b + 7 sqrt(b), raised until it costs nothing in ε."""
    adjacency: Annotated[str, OneOf(ADJACENCIES), BASIC] = "zero-out"
    """Adjacency of the headline ε: zero-out (a unit against nothing) or replace-one (a unit against another)."""
    stop: Annotated[str, OneOf(STOPS)] = "planned"
    """The ε stated by a run that ends before its planned steps: planned, the ε of all of them, or independent, the ε
    of the steps taken. The latter holds only if the stop depends neither on the data nor on the run's releases."""
    on_budget: Annotated[str, OneOf(ON_BUDGET)] = "stop"
    """When the requested steps would cost more than epsilon: stop before the step that would exceed it, or error before
    the first step."""
    dataset: Annotated[Text | None, BASIC] = None
    """Public name of the private data set; the costs of runs on it are added up. Required with budget_file."""
    budget_file: Annotated[Text | None, BASIC] = None
    """The file with the privacy budget of all runs on this data set (dpllm budget); it is charged beforehand."""
    gradients: Annotated[str, OneOf(GRADIENTS)] = "ghost"
    """How the gradients of units are computed: ghost, all units of a microbatch in one backward pass, by a rule for
    each layer; per_unit, one unit at a time by plain autograd: slower, and exact for every structure; auto, the first
    where every part of the model has a rule, otherwise the second, with a line in the log. ε does not depend on it."""
    unused_parameters: Annotated[str, OneOf(UNUSED_PARAMETERS)] = "error"
    """Trainable parameters that no loss reaches: error, or freeze, which freezes them before the first step and lists
    them in the report. Which ones is decided on rows that are made up."""
    randomness: Annotated[str, OneOf(RANDOMNESS)] = "os"
    """The generator of the noise, keyed by the operating system: os (NumPy's PCG64DXSM, on a GPU PyTorch's Philox),
    chacha20 (a cipher; the noise is drawn on the CPU), or discrete: exact discrete Gaussian numbers from that cipher,
    added to the sum rounded to a grid. Nothing of the noise is rounded then, and ε is larger."""
    selection: Any = None
    """The number of runs of which only the best is released, {kind: logarithmic, mean: 10}: ε is then that of the
    selection. dpllm methods tune sets it; a run with it may be released by dpllm methods tune only."""
    seed: Annotated[Whole, Field(ge=0)] | None = None
    """For tests: fixes sampling and noise. Anyone with the seed can subtract the noise, so nothing is private."""

    def __post_init__(self) -> None:
        """Check what belongs together, and construct clipping, noise and selection once."""
        super().__post_init__()
        if self.epsilon is None and self.noise_multiplier is None:
            raise ConfigError(
                "give epsilon or noise_multiplier: epsilon=8 calibrates the noise to a budget, noise_multiplier=1.0 "
                "sets the noise and reports its cost, both together stop the run at the budget"
            )
        if self.sampling == "example":
            self._check_drawn_rows()
        if self.max_batch_size is not None and self.max_batch_size < (self.expected_batch_size or 1):
            raise ConfigError(
                f"max_batch_size={self.max_batch_size} is below expected_batch_size={self.expected_batch_size}: raise "
                "it, or leave it out (it is then chosen so that it costs nothing in ε)"
            )
        require_dataset(self.dataset, self.budget_file)
        from dpllm.mechanism.catalogue import clipping_of, noise_of  # the command line's help does not wait for it

        self._check_part("clipping", lambda spec: clipping_of(spec, self.clip_norm))
        self._check_part("noise", noise_of)
        if self.selection is not None:
            from dpllm.mechanism.selection import Selection

            self._check_part("selection", Selection.of)
            self._check_selection()

    def _check_drawn_rows(self) -> None:
        if self.unit is None:
            raise ConfigError(f"sampling=example draws rows of a unit singly, and {_NO_UNIT}")
        if self.max_rows_per_unit is not None and self.max_rows_per_unit > MAX_ROWS_DRAWN_PER_UNIT:
            raise ConfigError(
                f"max_rows_per_unit must be at most {MAX_ROWS_DRAWN_PER_UNIT:,} with sampling=example, got "
                f"{self.max_rows_per_unit:,}: computing ε for more rows of one unit takes too long. Lower it, or leave "
                "sampling out"
            )
        if self.max_batch_size is not None:
            raise ConfigError(
                "max_batch_size cannot be used with sampling=example: no accounting is known for a truncated sample of "
                "rows. Leave it out; a large draw only takes more microbatches"
            )

    def _check_part(self, name: str, made: Any) -> None:
        """Construct a part once, so that a wrong option is found now, and store its description."""
        try:
            spec = Spec.of(getattr(self, name))
            made(spec)
        except ValueError as error:
            words = str(error)
            raise ConfigError(words if words.startswith(name) else f"{name}: {words}") from error
        assign(self, **{name: spec.to_plain()})

    def _check_selection(self) -> None:
        """Raise if no selection of such runs is accounted for."""
        wrong = {
            "seed: the fixed seed makes every run the same": self.seed is not None,
            "sampling=example: no Rényi bound is known for rows of a unit that are drawn singly": (
                self.sampling == "example" and self.max_rows_per_unit != 1
            ),
            "max_batch_size: no Rényi bound is known for truncated samples": self.max_batch_size is not None,
            "stop=independent: the ε of a selection is that of complete runs": self.stop != "planned",
            "both epsilon and noise_multiplier: the selection has one σ, from one of them": (
                self.epsilon is not None and self.noise_multiplier is not None
            ),
            "budget_file: `dpllm methods tune` charges it, and not each of the runs": self.budget_file is not None,
        }
        for what, holds in wrong.items():
            if holds:
                raise ConfigError(f"selection cannot be combined with {what}. Leave it out")


def require_dataset(dataset: str | None, budget_file: str | None) -> None:
    """Raise unless a budget comes with the name of its data set."""
    if budget_file is not None and dataset is None:
        raise ConfigError(
            "budget_file needs dataset: set it to the name of the data set that the file was made for, so that no run "
            "is charged to the budget of other data"
        )
