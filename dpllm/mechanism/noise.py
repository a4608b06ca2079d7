"""Independent noise: DP-SGD, where every step is a separate mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpllm.mechanism.events import Event, dp_sgd
from dpllm.mechanism.parts import Draw, NoiseStream, Normals, Written
from dpllm.mechanism.sampling import TruncatedPoissonSampler
from dpllm.mechanism.strategies import Workload

if TYPE_CHECKING:
    from torch import Tensor


def slice_of(total: Tensor, rank: int, size: int) -> Tensor:
    """Return the slice of a tensor's entries for which one process draws the noise.

    The slices of all ranks cover each entry once. When the processes' tensors are summed afterwards, every entry of the
    sum has the noise of exactly one process, so all processes that receive the sum have equal replicas.

    Args:
        total: contiguous.
        rank: this process, 0 <= rank < size.
        size: the number of processes whose tensors will be summed.

    Raises:
        ValueError: the rank is out of range, or the tensor's precision is lower than float32.

    >>> import torch
    >>> [slice_of(torch.arange(5.0), rank, 2).tolist() for rank in (0, 1)]
    [[0.0, 1.0], [2.0, 3.0, 4.0]]
    """
    if not (total.dtype.is_floating_point and total.dtype.itemsize >= 4):
        raise ValueError(
            f"Noise is added in float32 or float64, but the gradient is {total.dtype}. Keep the clipped sum in float32 "
            "until the noise is added, also when no unit was drawn."
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size} processes, but 0 <= rank < size is needed.")
    entries = total.numel()
    return total.view(-1)[rank * entries // size : (rank + 1) * entries // size]


@dataclass(frozen=True)
class IndependentNoise:
    """Noise drawn independently in every step, over a truncated Poisson sample of units or a Poisson sample of rows."""

    kind: ClassVar[str] = "independent"
    wants_total: ClassVar[bool] = False
    is_sampled: ClassVar[bool] = True
    only_discrete: ClassVar[bool] = False
    max_entries: ClassVar[int | None] = None

    @property
    def tensors_kept(self) -> int:
        """None: the steps do not depend on each other."""
        return 0

    @property
    def unit_groups(self) -> int:
        """One: every step draws from all units."""
        return 1

    def max_batch_size(self, draw: Draw) -> int | None:
        """Return None: the smallest that costs no ε."""
        return None

    def candidates(self, draw: Draw, workload: Workload) -> list[IndependentNoise]:
        """Return itself, since it has no open numbers."""
        return [self]

    def error(self, workload: Workload) -> float:
        """Return the norm of the workload's response."""
        return workload.error([1.0])

    def sampler(self, draw: Draw) -> TruncatedPoissonSampler:
        """Return the Poisson sampler."""
        return TruncatedPoissonSampler(draw.population, draw.sampling_rate, draw.max_batch_size)

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return a step of DP-SGD."""
        by_row = draw.rows_per_unit is not None
        return dp_sgd(
            num_units=draw.num_units,
            sampling_rate=draw.sampling_rate,
            max_batch_size=None if by_row else draw.max_batch_size,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            rows_per_unit=draw.rows_per_unit or 1,
        )

    def column(self, num_steps: int) -> tuple[float, ...]:
        """Return one entry, since a step's noise enters only this step."""
        return (1.0,)

    def separation(self, draw: Draw) -> int:
        """Return 1: a unit may be in any step."""
        return 1

    def variance(self, step: int, num_steps: int) -> float:
        """Return 1, since σC is the standard deviation of the noise itself."""
        return 1.0

    def stream(self, generator: Normals, num_steps: int) -> NoiseStream:
        """Return the noise of a run.

        Raises:
            ValueError: the generator's noise is discrete.
        """
        if getattr(generator, "randomness", None) == "discrete":
            raise ValueError(
                "the generator draws discrete noise, but the plan accounts for Gaussian noise, so its ε would not "
                "hold. Create the plan with randomness='discrete', or pass dpllm.NoiseSource()"
            )
        return IndependentStream(generator)

    def drawing(self, draw: Draw, drawn: str) -> str:
        """Return how a step is drawn, for the report."""
        each = (
            f"in each step every one of {draw.population} {drawn}s is drawn independently with probability "
            f"q = {draw.sampling_rate:.6g}"
        )
        if draw.rows_per_unit is not None:
            return each + ", regardless of who wrote it"
        return (
            f"{each}, and if more than {draw.max_batch_size} are drawn, {draw.max_batch_size} of them are kept, chosen "
            "uniformly (truncated Poisson sampling)"
        )

    def words(self) -> str:
        """Return the noise's description, for the report."""
        return "Gaussian noise"

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return the accounting's assumptions, and how the run ensures each of them."""
        numbers = f"the sampler is built from the plan: q = {draw.sampling_rate:.6g}"
        carried = "each step in the ledger carries these numbers"
        sampling = (
            "Units are drawn by Poisson sampling and truncated to the maximal batch (not shuffled)",
            f"{numbers}, at most {draw.max_batch_size} of {draw.num_units} units; {carried}",
        )
        if draw.rows_per_unit is not None:
            sampling = (
                "Rows are drawn by Poisson sampling, independently of each other (not shuffled)",
                f"{numbers} of {draw.population} rows; the batch is not truncated; {carried}",
            )
        noise = (
            "Noise is independent in every step and parameter entry",
            f"Gaussian noise of standard deviation {noise_stddev:.6g} is drawn once per step, on the complete sum; if "
            "the model is sharded, exactly one process draws each entry's noise",
        )
        return [sampling, noise]


class IndependentStream:
    """The noise of a run; it is not stored."""

    def __init__(self, generator: Normals) -> None:
        """Store the generator."""
        self._generator = generator

    def begin(self, step: int) -> None:
        """Do nothing, since steps do not depend on each other."""

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add independent noise to one process's slice of the entries, in place (`slice_of`)."""
        self._generator.add_(slice_of(total, rank, size), stddev)

    def write_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Write the noise that `add_share_` would add to zeros: one memory pass less for a tensor without a sum."""
        share = slice_of(total, rank, size)
        if size > 1:
            total.zero_()
        if isinstance(self._generator, Written):
            self._generator.write_(share, stddev)
        else:
            self._generator.add_(share.zero_(), stddev)
