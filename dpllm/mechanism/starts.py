"""One start of a mechanism in a loop of one's own: its draws, its noise, and the count of its steps.

Place in the flow: made by `dpllm.mechanism.parts.Mechanism.start`. `dpllm.training.run.PrivateRun` has a ledger for
the same purpose. Where noise is correlated over steps, draws and noise that begin again cost more than those that go
on. This object goes on, however many loops, epochs or cells of a notebook use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.clipped import left_out
from dpllm.mechanism.sampling import secret_rng

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dpllm.mechanism.events import Event
    from dpllm.mechanism.parts import Mechanism, NormalGenerator


class Start:
    """The steps of a mechanism from one start onwards, in one process.

    Guarantee: every draw that was handed out is in `history`, and draws and noise are those of one uninterrupted
    sequence, for which `history` is accounted. Each draw has its own noise before the next one is handed out, so no
    release holds two draws under one noise. A second object of the same mechanism is another start: pass the
    steps of both to `Mechanism.history`.

    Args:
        mechanism: whose steps are taken.
        num_steps: T of the plan.
        generator: of the noise, for instance ``dpllm.NoiseSource()``.
        rng: of the draws; None: from the operating system's entropy. A seeded one is only for tests.

    >>> import torch
    >>> from dpllm import NoiseSource, PrivacyConfig, make_plan
    >>> plan = make_plan(PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=4), 100, 6)
    >>> start = plan.mechanism.start(6, NoiseSource())
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> for epoch in range(2):
    ...     for units in start.draws(3):
    ...         start.add_noise_({"weight": weight})
    >>> [count for _, count in start.history]
    [6]
    """

    def __init__(
        self,
        mechanism: Mechanism,
        num_steps: int,
        generator: NormalGenerator,
        rng: np.random.Generator | None = None,
    ) -> None:
        """Begin without a step."""
        self._mechanism = mechanism
        self._drawn = mechanism.sampler.steps(secret_rng() if rng is None else rng)
        self._stream = mechanism.noise.stream(generator, num_steps)
        self._num_steps, self._open = 0, False
        self._names: set[str] = set()  # of the parameters that had noise

    @property
    def num_steps(self) -> int:
        """The number of draws that were handed out; each is charged, whether or not a step was taken over it."""
        return self._num_steps

    @property
    def history(self) -> list[tuple[Event, int]]:
        """The charge of these steps, for `dpllm.epsilon`."""
        return self._mechanism.history(self._num_steps)

    def draws(self, num_steps: int) -> Iterator[NDArray[np.int64]]:
        """Yield the units of the next steps, in rising order; there may be none, and the step is still taken.

        Each call goes on where the last one ended. A draw is counted before it is made. It is open until
        `add_noise_` has added its noise, also when it is empty.

        Args:
            num_steps: number of draws.

        Raises:
            ValueError: the draw before, of this call or of another, has no noise yet. No draw is counted then.
        """
        for _ in range(num_steps):
            if self._open:
                raise ValueError(
                    f"draw {self._num_steps} of this start has no noise, and the next draw was asked for: one noise "
                    "over several draws does not give the ε of history. Call add_noise_ after each draw, also after "
                    "an empty one, and release each"
                )
            self._num_steps += 1
            self._open = True
            self._stream.begin(self._num_steps - 1)
            yield next(self._drawn)

    def add_noise_(self, parameters: Mapping[str, Parameter]) -> None:
        """Add the noise of the step to the clipped sums in ``.grad``, in place; a missing one counts as zero.

        Args:
            parameters: name to parameter, all that are trained (`dpllm.GhostClipper.parameters`).

        Raises:
            ValueError: no draw was made, or its noise was added already; no parameter is given, others than before,
                or not all that a GhostClipper clips together; a sum is neither float32 nor float64; or the clipping has
                changed.
        """
        if not self._open:
            raise ValueError(
                "there is no draw without noise: each draw gets its noise once. Take a draw from draws() first"
            )
        if not parameters or (self._names and self._names != set(parameters)):
            raise ValueError(
                f"add_noise_ got {len(parameters)} parameters, and {len(self._names) or 'at least one'} are needed, "
                "the same in every step: one that is left out would be released without noise. Give all that are "
                "trained (GhostClipper.parameters)"
            )
        if missing := left_out(parameters.values()):
            raise ValueError(
                f"add_noise_ got {len(parameters)} parameters, and {missing[0]} is not among them ({len(missing)} are "
                "missing), which the same GhostClipper clips: it would be released without noise. Give "
                "GhostClipper.parameters"
            )
        stddev = self._mechanism.noise_stddev
        for name, parameter in parameters.items():
            if parameter.grad is None:
                parameter.grad = parameter.detach().new_zeros(parameter.shape)
            self._stream.add_share_(name, parameter.grad, stddev, rank=0, size=1)
        self._names, self._open = set(parameters), False  # only now: a call that failed half-way leaves the draw open
