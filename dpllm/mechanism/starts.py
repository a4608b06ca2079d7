"""One start of a mechanism in a loop of one's own: its draws, its noise, and the count of its steps.

Place in the flow: made by `dpllm.mechanism.parts.Mechanism.start`. `dpllm.training.run.PrivateRun` has a ledger for
the same purpose. Where noise is correlated over steps, draws and noise that begin again cost more than those that go
on. This object goes on, however many loops, epochs or cells of a notebook use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.clipped import Clipped, clippers_of
from dpllm.mechanism.events import dp_sgd
from dpllm.mechanism.order import UnitsApart
from dpllm.mechanism.sampling import secret_rng
from dpllm.mechanism.sources import require_generator, require_secret, require_standard_normal, words_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from dpllm.mechanism.events import Event
    from dpllm.mechanism.normals import NormalGenerator
    from dpllm.mechanism.parts import Mechanism

NOT_PRIVATE = "NOT PRIVATE: this start was declared to be for tests"
"""The words of a start whose randomness may have a seed."""


class Start:
    """The steps of a mechanism from one start onwards, in one process.

    Guarantee: every draw that was handed out is in `history`, and draws and noise are those of one uninterrupted
    sequence, for which `history` is accounted. Each draw has its own noise before the next one is handed out, so no
    release holds two draws under one noise. A second object of the same mechanism is another start: pass the
    steps of both to `Mechanism.history`.

    Args:
        mechanism: whose steps are taken.
        num_steps: T of the plan.
        generator: of the noise, for instance ``dpllm.NoiseSource()``, or a `dpllm.NormalGenerator` of one's own.
        rng: of the draws; only for tests. None: from the operating system's entropy.
        for_tests: declares that nothing is private. The history then has ε = inf, whatever was drawn.

    Raises:
        ValueError: one of them is something else; or without ``for_tests``, a source has a seed or may have one.

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
        *,
        for_tests: bool = False,
    ) -> None:
        """Begin without a step."""
        if not _is_count(num_steps):
            raise ValueError(f"num_steps is {num_steps!r}; the number of steps of the plan is needed")
        require_generator(generator)
        if not for_tests:
            require_secret(generator, rng)
        self._mechanism, self._generator = mechanism, generator
        self._words = NOT_PRIVATE if for_tests else f"for a unit of {mechanism.draw.num_units}, {words_of(generator)}"
        self._drawn = mechanism.sampler.steps(secret_rng() if rng is None else rng)
        self._stream = mechanism.noise.stream(generator, num_steps)
        self._apart = UnitsApart(mechanism.noise.separation(mechanism.draw))
        self._num_steps, self._num_drawn, self._open = 0, 0, False
        self._names: set[str] = set()  # of the parameters that had noise

    @property
    def num_steps(self) -> int:
        """The number of draws that were handed out; each is charged, whether or not a step was taken over it."""
        return self._num_steps

    @property
    def history(self) -> list[tuple[Event, int]]:
        """The charge of these steps, for `dpllm.epsilon`; of a start for tests steps without noise, of infinite ε."""
        if self._words == NOT_PRIVATE:
            return [(dp_sgd(sampling_rate=1.0, noise_multiplier=0.0), self._num_steps)]
        return self._mechanism.history(self._num_steps)

    @property
    def words(self) -> str:
        """For whom the ε of `history` holds and on what it depends, to be printed beside it."""
        return self._words

    def draws(self, num_steps: int) -> Iterator[NDArray[np.int64]]:
        """Yield the units of the next steps, in rising order; there may be none, and the step is still taken.

        Each call goes on where the last one ended. A draw is counted before it is made. It is open until
        `add_noise_` has added its noise, also when it is empty.

        Args:
            num_steps: number of draws.

        Raises:
            ValueError: the draw before, of this call or of another, has no noise yet, or ``num_steps`` is no number
                of draws; no draw is counted then. Or a unit was drawn again too early for correlated noise.
        """
        if not _is_count(num_steps):
            raise ValueError(f"draws got {num_steps!r}; a number of draws, 1 or more, is needed")
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
            drawn = next(self._drawn)
            self._apart.check(drawn)
            self._apart.take(drawn)
            self._num_drawn = len(drawn)
            yield drawn

    def add_noise_(self, sums: Clipped | Mapping[str, Parameter]) -> None:
        """Add the noise of the step to the clipped sums in ``.grad``, in place; a missing one counts as zero.

        Args:
            sums: the `dpllm.GhostClipper` that made the sums, whose clipping is compared with the mechanism's. Or name
                to parameter, all that are trained; nothing compares sums that were clipped differently.

        Raises:
            ValueError: no draw was made, or its noise was added already; a clipper does not bound contributions as the
                mechanism does; no parameter is given, others than before, not all that a GhostClipper clips together,
                or more than the noise has an accounting for; a sum is neither float32 nor float64, or not contiguous;
                the clipping has changed; or, where a GhostClipper made the sums, they hold something else as well, or
                more units than were drawn; or the numbers of a generator of one's own are not standard normal. No sum
                is changed then.
        """
        if not self._open:
            raise ValueError(
                "there is no draw without noise: each draw gets its noise once. Take a draw from draws() first"
            )
        parameters = self._parameters_of(sums)
        if not parameters or (self._names and self._names != set(parameters)):
            raise ValueError(
                f"add_noise_ got {len(parameters)} parameters, and {len(self._names) or 'at least one'} are needed, "
                "the same in every step: one that is left out would be released without noise. Give the GhostClipper, "
                "or all that are trained"
            )
        self._compare(clippers_of(parameters.values()), parameters)
        self._mechanism.require_entries(sum(parameter.numel() for parameter in parameters.values()))
        stddev, totals = self._mechanism.noise_stddev, {name: _sum_in(name, p) for name, p in parameters.items()}
        if not self._names:
            require_standard_normal(self._generator, next(iter(totals.values())))
        for name, total in totals.items():
            self._stream.add_share_(name, total, stddev, rank=0, size=1)
        self._names, self._open = set(parameters), False  # only now: a call that failed half-way leaves the draw open

    def _parameters_of(self, sums: Clipped | Mapping[str, Parameter]) -> Mapping[str, Parameter]:
        if isinstance(sums, Mapping) and all(hasattr(one, "grad") for one in sums.values()):
            return sums
        if isinstance(sums, Mapping) or not isinstance(sums, Clipped):
            raise ValueError(
                f"add_noise_ got {type(sums).__name__}; pass the GhostClipper, or a mapping from names to parameters, "
                "such as dict(model.named_parameters())"
            )
        self._compare([sums], sums.parameters)
        return sums.parameters

    def _compare(self, clippers: Iterable[Clipped], given: Mapping[str, Parameter]) -> None:
        """Check that contributions are bounded as the noise is scaled, and that no parameter is left out."""
        known = {id(parameter) for parameter in given.values()}
        for clipper in clippers:
            if not self._mechanism.allows(clipper.clipping):
                raise ValueError(
                    f"the clipper bounds contributions by {clipper.clipping}, and the noise is scaled to "
                    f"{self._mechanism.clipping}: the ε of history would not hold. Make it with "
                    "GhostClipper(model, clipping=mechanism.clipping)"
                )
            self._require_own_sums(clipper)
            missing = [name for name, p in clipper.parameters.items() if p.requires_grad and id(p) not in known]
            if missing:
                raise ValueError(
                    f"add_noise_ got {len(given)} parameters, and {missing[0]} is not among them ({len(missing)} are "
                    "missing), which the same GhostClipper clips: it would be released without noise. Give the "
                    "GhostClipper"
                )

    def _require_own_sums(self, clipper: Clipped) -> None:
        if (name := clipper.foreign_gradient) is not None:
            raise ValueError(
                f"the .grad of {name} has numbers that this clipper did not add in this step: they would be released "
                "without a bound. Call optimizer.zero_grad() before the first backward of a step, and add nothing else"
            )
        if clipper.num_summed > self._num_drawn:
            raise ValueError(
                f"{clipper.num_summed} units were clipped in this step, and {self._num_drawn} were drawn: a unit was "
                "computed twice, or one that was not drawn. Compute each drawn unit once. Give rows of one unit "
                "together, with unit_index, or with hold() before backward()"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def _sum_in(name: str, parameter: Parameter) -> Tensor:
    """Return the sum in ``.grad``, made as zeros where nobody was drawn.

    Raises:
        ValueError: noise cannot be added to it.
    """
    if parameter.grad is None:
        like = parameter.detach()[..., :0]
        zeros = (like if like.dtype.itemsize >= 4 else like.float()).new_zeros(parameter.shape)
        parameter.grad_dtype, parameter.grad = zeros.dtype, zeros
    total = parameter.grad
    if not (total.dtype.is_floating_point and total.dtype.itemsize >= 4 and total.is_contiguous()):
        order = "" if total.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"the sum of {name} is {total.dtype}{order}; noise is added to contiguous sums in float32 or float64. "
            "GhostClipper makes such sums; keep them until the noise is added"
        )
    return total
