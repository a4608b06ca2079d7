"""Choose bands, batch size and steps together: rank runs of one budget and one compute by their predicted noise.

Place in the flow: as `dpllm.planning.sweep`, for recipes with correlated noise. Nothing is trained, and no private data
are read.

The predicted noise of a point is the standard deviation of the noise in the released weights over the response of the
weights to a constant gradient of norm C in every step: σ‖wᵀM⁻¹‖ / (b Σ_t w_t), with the response w of the run
(`dpllm.mechanism.workload`). For independent noise and equal steps it is σ / (b √T), the inverse of the cumulative
signal-to-noise ratio of `dpllm.planning.sweep`.

The rule is the same as there: of the points within 10 % of the least noise, the smallest batch, which takes the most
steps, and of these the one that keeps the fewest tensors. With independent noise, larger batches have much less noise
at equal compute, while with many bands the noise hardly depends on the batch: the rule then takes smaller batches and
more steps.

Noise of a fixed order (`dpllm.mechanism.blt`) needs no sampling of units. Its points are listed with the others, for
runs whose units cannot be sampled, and recommended only if the recipe has such noise. Its predicted noise may be the
least of all, above all in one pass. But the one fine-tuning that was measured was about as good as with 16 bands
(`docs/correlated_noise.md`), a resume is charged as a second release of all units, and ε under replace-one is larger:
the user has to choose it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpllm.mechanism.blt import BltNoise
from dpllm.mechanism.catalogue import spec_of
from dpllm.mechanism.events import Event
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Noise
from dpllm.mechanism.workload import Workload
from dpllm.planning.sweep import Budget, Spending, check_counts, recommend
from dpllm.privacy.calibration import least_noise

SHOWN = 12
"""Points of the table, beside those with independent noise and those without sampling."""


@dataclass(frozen=True, kw_only=True)
class NoisePoint:
    """One way to spend the budget and the compute."""

    noise: str
    """The noise in words, for instance "8 bands, geometric with ratio 0.978"."""
    options: dict[str, Any] | str
    """`privacy.noise` of a recipe."""
    expected_batch_size: int
    """b."""
    num_steps: int
    """T."""
    noise_multiplier: float
    """σ, to about 0.2 %, without truncation."""
    predicted_noise: float
    """Noise over signal in the released weights."""
    relative: float
    """The same over that of the recipe's batch size with independent noise."""
    tensors_kept: int
    """How many tensors of the gradient's size are kept between two steps."""
    sampled: bool = True
    """Whether units are drawn at random. False: they are visited in a fixed order."""
    recommended: bool = False

    def noise_over_signal(self, gradient_rms: float) -> float:
        """Return the predicted noise; the size of the gradient is not looked at."""
        return self.predicted_noise


@dataclass(frozen=True, kw_only=True)
class NoiseSweep(Spending[NoisePoint]):
    """The points of one budget and one compute, the least noise first."""

    @property
    def independent(self) -> tuple[NoisePoint, ...]:
        """The points with independent noise."""
        return tuple(point for point in self.points if point.options == IndependentNoise.kind)

    @property
    def recommended_independent(self) -> NoisePoint:
        """The point that the same rule takes if only independent noise is allowed."""
        return recommend(self.independent)

    @property
    def recommended_without_sampling(self) -> NoisePoint | None:
        """The point that the same rule takes for units that cannot be sampled; None if none reaches the target."""
        points = [point for point in self.points if not point.sampled]
        return recommend(points) if points else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        values, fixed = dataclasses.asdict(self), self.recommended_without_sampling
        return {
            **values,
            "points": list(values["points"]),
            "recommended": dataclasses.asdict(self.recommended),
            "recommended_with_independent_noise": dataclasses.asdict(self.recommended_independent),
            "recommended_without_sampling": None if fixed is None else dataclasses.asdict(fixed),
        }


def sweep_noise(
    *,
    noise: Noise,
    workload_of: Callable[[int], Workload],
    target_epsilon: float,
    delta: float,
    num_units: int,
    expected_batch_size: int,
    expected_batch_sizes: Sequence[int],
    compute: int,
    adjacency: str = "zero-out",
    min_steps: int = 1,
) -> NoiseSweep:
    """Predict the noise of every batch size, with every noise that fits, and recommend a point.

    Args:
        noise: the noise of the recipe; its candidates are compared with each other, with independent noise, and with
            the noise of a fixed order. If it is that of a fixed order, only such points are recommended, else none.
        workload_of: a function from T to the workload of a run of T steps.
        target_epsilon: the ε that a run may cost.
        delta: δ, below 1/N.
        num_units: N.
        expected_batch_size: b of the recipe, to whose independent noise the points are compared.
        expected_batch_sizes: values of b, at most N; those with fewer than ``min_steps`` steps are left out.
        compute: K; a point takes T = K/b steps, rounded down.
        adjacency: "zero-out" or "replace-one".
        min_steps: the smallest number of steps that the optimizer needs.

    Raises:
        ValueError: a number is out of range, or no point reaches the target.
    """
    budget = Budget(target_epsilon, delta, num_units, adjacency)
    check_counts(num_units, "expected_batch_size", [*expected_batch_sizes, expected_batch_size])
    check_counts(None, "min_steps", [min_steps])
    if compute < min_steps * expected_batch_size:
        raise ValueError(
            f"compute={compute} units is too small: b={expected_batch_size} takes fewer than min_steps={min_steps} "
            "steps with it. Raise compute, or lower min_steps"
        )
    reference = math.inf
    found: list[NoisePoint] = []
    for size in sorted({*expected_batch_sizes, expected_batch_size}):
        steps = compute // size
        if steps < min_steps:
            continue
        draw = Draw(num_units=num_units, population=num_units, expected_batch_size=size, max_batch_size=num_units)
        workload = workload_of(steps)
        for one in _noises(noise, draw, workload):
            point = _point(one, draw, workload, budget)
            if point is not None:
                found.append(point)
                if size == expected_batch_size and point.options == IndependentNoise.kind:
                    reference = point.predicted_noise
    if not math.isfinite(reference):
        raise ValueError(
            f"target_epsilon={target_epsilon:g} cannot be reached with b={expected_batch_size} in "
            f"{compute // expected_batch_size} steps. Take fewer steps, or a smaller batch"
        )
    usable = [point for point in found if point.sampled == noise.is_sampled]
    if not usable:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} cannot be reached in a fixed order of the units. Raise it, or take "
            "noise=banded, whose units are sampled"
        )
    chosen = recommend(usable)
    points = (
        dataclasses.replace(point, relative=point.predicted_noise / reference, recommended=point is chosen)
        for point in sorted(found, key=lambda point: point.predicted_noise)
    )
    return NoiseSweep(
        target_epsilon=target_epsilon,
        delta=delta,
        num_units=num_units,
        adjacency=adjacency,
        compute=compute,
        points=tuple(points),
    )


def _point(noise: Noise, draw: Draw, workload: Workload, budget: Budget) -> NoisePoint | None:
    """Return the point of a noise and a batch size; None if no σ reaches the target."""

    def history(sigma: float) -> list[tuple[Event, int]]:
        return [(noise.event(draw, sigma, 1.0), workload.num_steps)]

    sigma = least_noise(budget.target, budget.delta, history, budget.adjacency, exact=False)
    if math.isinf(sigma):
        return None
    options = spec_of(noise).to_plain()
    return NoisePoint(
        noise=_words(options),
        options=options,
        expected_batch_size=draw.expected_batch_size,
        num_steps=workload.num_steps,
        noise_multiplier=sigma,
        predicted_noise=sigma * noise.error(workload) / (draw.expected_batch_size * sum(workload.response)),
        relative=math.nan,  # known when all points are
        tensors_kept=noise.tensors_kept,
        sampled=noise.is_sampled,
    )


def _noises(noise: Noise, draw: Draw, workload: Workload) -> list[Noise]:
    """Return independent noise, the recipe's candidates that fit into the groups of this batch, and a fixed order's."""
    try:
        candidates = [one for one in noise.candidates(draw, workload) if one.tensors_kept]
        for one in candidates:
            one.sampler(draw)
    except ValueError:  # the groups are smaller than a batch
        candidates = []
    fixed = BltNoise().candidates(draw, workload) if noise.is_sampled else []
    return [IndependentNoise(), *candidates, *fixed]


def _words(options: dict[str, Any] | str) -> str:
    if isinstance(options, str):
        return options
    if options["kind"] != "banded":
        number = options.get("buffers", "auto")
        return f"{options['kind']}, {number} buffer{'s' * (number != 1)}"
    ratio = f" γ = {options['ratio']:g}" if "ratio" in options else ""
    return f"{options.get('bands', '')} bands, {options.get('strategy', '')}{ratio}"


def _override(options: dict[str, Any] | str) -> str:
    """Return the noise as an override of a recipe; the plan of the run finds the same numbers of the strategy."""
    if isinstance(options, str):
        return options
    if options["kind"] != "banded":
        return f"{{kind: {options['kind']}, buffers: {options.get('buffers', 'auto')}}}"
    return f"{{kind: {options['kind']}, bands: {options.get('bands', 1)}, strategy: {options.get('strategy', 'free')}}}"


def noise_rows(sweep: NoiseSweep) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the least noise, of the recommended point, of independent noise and fixed orders."""
    shown = [
        (rank, point)
        for rank, point in enumerate(sweep.points, 1)
        if rank <= SHOWN or point.recommended or point in sweep.independent or not point.sampled
    ]
    head = ["", "rank", "noise", "b", "steps T", "σ", "predicted noise", "tensors kept", "units"]
    rows = [
        [
            "→" if point.recommended else "",
            str(rank),
            point.noise,
            f"{point.expected_batch_size:,}",
            f"{point.num_steps:,}",
            f"{point.noise_multiplier:.3f}",
            f"{point.relative:.3f}",
            str(point.tensors_kept),
            "sampled" if point.sampled else "fixed order",
        ]
        for rank, point in shown
    ]
    return head, rows


def noise_text(sweep: NoiseSweep) -> str:
    """Return the recommendation in words, beside that for independent noise, and its assumptions."""
    chosen, plain = sweep.recommended, sweep.recommended_independent
    return "\n\n".join(
        [
            f"Recommended: {chosen.num_steps:,} steps of {chosen.expected_batch_size:,} units with "
            f"privacy.noise={_override(chosen.options)}. The predicted noise is {chosen.relative:.3f} of that of the "
            "recipe's batch size with independent noise.",
            f"With independent noise: {plain.num_steps:,} steps of {plain.expected_batch_size:,} units, predicted "
            f"noise {plain.relative:.3f}.",
            *_about_a_fixed_order(sweep),
            f"Why: of the points {'with sampled units' if chosen.sampled else 'in a fixed order'} within 10 % of the "
            "least predicted noise it has the smallest batch and the most steps, and of these it keeps the fewest "
            "tensors.",
            f"Assumed: (1) All points expect {sweep.compute:,} units in all steps. (2) The weights respond to the "
            "noise as to the gradient: linearly, through momentum, schedule and averaging. Curvature is left out. "
            "(3) The learning rate is tuned again for each point. (4) σ is for batches without a bound, to 0.2 %; the "
            f"plan of a run is exact. (5) {len(sweep.points)} points were compared; --json has all of them.",
        ]
    )


def _about_a_fixed_order(sweep: NoiseSweep) -> list[str]:
    """Return the paragraph on units that cannot be sampled."""
    found = sweep.recommended_without_sampling
    if not sweep.recommended.sampled or found is None:
        return []
    return [
        f"Without sampling: {found.num_steps:,} steps of {found.expected_batch_size:,} units in a fixed order with "
        f"privacy.noise={_override(found.options)}, predicted noise {found.relative:.3f}. It is for units that cannot "
        "be sampled, and recommended only if the recipe has noise=blt: the one fine-tuning that was measured was "
        "about as good as with 16 bands, a resume is charged as a second release of all units, and ε under replace-one "
        "is larger."
    ]
