"""Gradients that are finished within the backward pass of a step's only microbatch.

Place in the flow: a part of the engine of one process. Some clipped sums are complete before the backward pass ends: of
groups that are clipped separately, and of a second pass. Kept until its end, they would take 4 bytes an entry. As soon
as one is complete it gets its noise here, and becomes a gradient in the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from dpllm.engines.errors import EngineError
from dpllm.engines.guard import UpdateGuard
from dpllm.ghost.sums import Sum

MakeGradient = Callable[[nn.Parameter, Callable[[nn.Parameter, Sum], None], float], Tensor]
"""Makes the gradient of a parameter from the function that adds to its sum, and a public scale."""


class EarlyGradients:
    """Keeps finished gradients until the pass has succeeded.

    Guarantee: nothing reaches ``.grad`` before the engine collects the microbatch. If its pass fails, sums and their
    noise are dropped together; they were never seen, so the noise of the next attempt is drawn independently.

    Args:
        make: forms a sum with its noise, and makes the gradient.
        guard: is told of gradients that are dropped.
    """

    def __init__(self, make: MakeGradient, guard: UpdateGuard) -> None:
        """Begin without a gradient."""
        self._make, self._guard = make, guard
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._begun = False  # a gradient, which may have handed in its sum and failed after that

    def finish(self, parameter: nn.Parameter, add_to: Callable[[nn.Parameter, Sum], None], scale: float) -> None:
        """Make the gradient of one parameter.

        Args:
            parameter: the parameter.
            add_to: adds noise and clipped sum, as in `Engine.collect` with the last microbatch.
            scale: a public constant.

        Raises:
            EngineError: there is one already; a second one would be a second release.
        """
        if parameter in self._gradients:
            raise EngineError(
                f"A gradient of shape {tuple(parameter.shape)} was finished twice in a step. Start again from a "
                "checkpoint, and report this error"
            )
        self._begun = True
        self._gradients[parameter] = self._make(parameter, add_to, scale)

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter, once; None if it was not finished."""
        self._begun = False
        return self._gradients.pop(parameter, None)

    def forget(self) -> None:
        """Drop all gradients: the pass that made them failed."""
        if self._begun:
            self._begun = False
            self._gradients.clear()
            self._guard.withdraw()

    def refuse(self) -> None:
        """Make sure that no gradient is kept while a microbatch is collected that is not the only one.

        Raises:
            EngineError: one is; it would be released beside sums of the same units.
        """
        if self._gradients:
            raise EngineError(
                "Gradients of a microbatch were finished, and another microbatch of the same step is collected. Start "
                "again from a checkpoint, and report this error"
            )
