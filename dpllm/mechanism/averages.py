"""Averages of the private iterates, as recipes name them: an exponential moving average, or the mean of the last steps.

Averaging is post-processing of the releases, so ε does not depend on it. A specification is public, frozen and without
tensors; `dpllm.training.averaging` keeps a run's average. Only weights that a private step has updated are averaged.
The starting weights could be included, since they are public, but they are the oldest iterate of a model that is still
changing.

Averaging the iterates of a run with a constant learning rate replaces a falling learning rate: Polyak and Juditsky,
SIAM J. Control Optim. 30 (1992); for private training De et al., arXiv:2204.13650, and Shejwalkar et al.,
arXiv:2210.01864.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dpllm.mechanism.parts import Spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LAST_FOLDER = "last_step"
"""The subfolder of a released average that holds the model after the last step. It is not published."""
WEIGHTS = ("average", "last")
"""Which weights are evaluated during training."""


class Average(Protocol):
    """A weighted mean of the weights after the steps of a run.

    Attributes:
        evaluate: one of `WEIGHTS`.
        keep_last: whether the weights after the last step are saved next to the average.
    """

    kind: ClassVar[str]

    @property
    def evaluate(self) -> str:
        """One of `WEIGHTS`."""
        ...

    @property
    def keep_last(self) -> bool:
        """Whether the weights after the last step are saved next to the average."""
        ...

    def enters(self, step: int, num_steps: int) -> bool:
        """Return whether the weights after a step enter the average.

        Args:
            step: the index of the step among those charged to the run, starting at 1.
            num_steps: T of the plan.
        """
        ...

    def rate(self, count: int) -> float:
        """Return a in ``average += a (weights - average)`` for the count-th averaged weights; 1 for the first."""
        ...

    def words(self, num_steps: int) -> str:
        """Return a description of the released weights, for report and card: "the ..."."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Options:
    evaluate: str = "average"
    """Which weights are evaluated during training: "average" or "last"."""
    keep_last: bool = False
    """Whether the weights after the last step are saved next to the average, in a separate folder."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.evaluate not in WEIGHTS:
            raise ValueError(f"average.evaluate must be one of {', '.join(WEIGHTS)}, got {self.evaluate!r}")
        if not isinstance(self.keep_last, bool):
            raise ValueError(f"average.keep_last must be true or false, got {self.keep_last!r}")


@dataclass(frozen=True, kw_only=True)
class MovingAverage(_Options):
    """The exponential moving average: the last step has weight 1, the one before it decay, then decay², …, normalised.

    The division (as in Adam's bias correction) removes the starting weights. Without it the first iterate, or the
    start, would have the weight decay^(T-1), which is not small in a short run.

    >>> [round(MovingAverage(decay=0.5).rate(count), 3) for count in (1, 2, 3)]
    [1.0, 0.667, 0.571]
    """

    kind: ClassVar[str] = "ema"
    decay: float = 0.95
    """Factor of the weights one step earlier; about the last 1/(1 - decay) steps count."""

    def __post_init__(self) -> None:
        """Check that the decay is in (0, 1)."""
        super().__post_init__()
        if not _is_number(self.decay) or not 0 < self.decay < 1:
            raise ValueError(f"average.decay must be above 0 and below 1, got {self.decay!r}")

    def enters(self, step: int, num_steps: int) -> bool:
        """Return True: the weights after every step enter."""
        return 1 <= step <= num_steps

    def rate(self, count: int) -> float:
        """Return (1 - decay) / (1 - decay^count)."""
        return (1.0 - self.decay) / (1.0 - self.decay**count)

    def words(self, num_steps: int) -> str:
        """Return the description for report and card."""
        return (
            f"the exponential moving average, with decay {self.decay:g}, of the trained weights after each of "
            f"the steps taken, at most {num_steps}"
        )


@dataclass(frozen=True, kw_only=True)
class TailMean(_Options):
    """The mean of the weights after the last steps.

    >>> [TailMean(share=0.5).enters(step, 4) for step in (1, 2, 3, 4)]
    [False, False, True, True]
    """

    kind: ClassVar[str] = "tail"
    share: float = 0.2
    """Share of all steps; at least one step counts."""

    def __post_init__(self) -> None:
        """Check that the share is in (0, 1]."""
        super().__post_init__()
        if not _is_number(self.share) or not 0 < self.share <= 1:
            raise ValueError(f"average.share must be above 0 and at most 1, got {self.share!r}")

    def _before(self, num_steps: int) -> int:
        return num_steps - max(1, round(self.share * num_steps))

    def enters(self, step: int, num_steps: int) -> bool:
        """Return whether the step is one of the last."""
        return self._before(num_steps) < step <= num_steps

    def rate(self, count: int) -> float:
        """Return 1 / count."""
        return 1.0 / count

    def words(self, num_steps: int) -> str:
        """Return the description for report and card."""
        return (
            f"the mean of the trained weights after those of the steps {self._before(num_steps) + 1} to {num_steps} "
            "that were taken; if none was, the weights after the last step"
        )


_AVERAGES: tuple[type[Average], ...] = (MovingAverage, TailMean)
AVERAGES = {average.kind: average for average in _AVERAGES}


def is_average(value: Any) -> bool:
    """Return whether a value is one of these averages; an object of a subclass may compute differently."""
    return type(value) in _AVERAGES


def average_of(value: Any) -> Average | None:
    """Return the average that a recipe names, as a word or as a mapping with ``kind`` and options.

    Args:
        value: such as "ema" or ``{"kind": "tail", "share": 0.2}``; None: no average.

    Raises:
        ValueError: the kind or an option is unknown, or a value is out of range.

    >>> average_of({"kind": "ema", "decay": 0.9}).decay
    0.9
    """
    if value is None or is_average(value):
        return value
    if isinstance(value, _AVERAGES):
        raise ValueError(
            f"average is a {type(value).__name__}, whose weights per step nothing checks: they may depend on private "
            f"losses. It must be one of {', '.join(AVERAGES)}"
        )
    try:
        spec = Spec.of(value)
    except ValueError as error:
        raise ValueError(f"average: {error}") from error
    if spec.kind not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(AVERAGES)}, got {spec.kind!r}")
    kind: Any = AVERAGES[spec.kind]
    fields = [item.name for item in dataclasses.fields(kind)]
    options: Mapping[str, Any] = dict(spec.options)
    if unknown := sorted(set(options) - set(fields)):
        raise ValueError(f"average.{unknown[0]} is not an option of {spec.kind!r}; its options are {', '.join(fields)}")
    made: Average = kind(**options)
    return made


def weights_of(average: Average, num_steps: int) -> NDArray[np.float64]:
    """Return the weight of each step's iterate in the average of an uninterrupted run.

    Returns:
        (T,) weights, at least 0, whose sum is 1.

    >>> weights_of(TailMean(share=0.5), 4)
    array([0. , 0. , 0.5, 0.5])
    """
    import numpy as np  # not at the top: the help of a command does not wait for it

    weight_T, count = np.zeros(num_steps), 0
    for step in range(1, num_steps + 1):
        if average.enters(step, num_steps):
            count += 1
            weight_T *= 1.0 - average.rate(count)
            weight_T[step - 1] = average.rate(count)
    return weight_T


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)
