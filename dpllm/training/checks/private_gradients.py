"""The part of the watch over the private gradients, from the private step to the optimizer's ``step``.

Place in the flow: under `dpllm.training.checks.watch`. The optimizer receives exactly these gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dpllm.training.checks.stamps import Stamp, WatchError, stamp_of


class PrivateGradients:
    """The gradients that a private step left in ``.grad``.

    Attributes:
        are_left: whether a step has left gradients.

    Args:
        trainable: the clipped parameters, by name.
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter]) -> None:
        """Begin without gradients."""
        self._trainable = trainable
        self._left: dict[int, tuple[Tensor | None, Stamp]] = {}

    @property
    def are_left(self) -> bool:
        """Whether a step has left gradients."""
        return bool(self._left)

    def forget(self) -> None:
        """Forget the gradients, before the next step."""
        self._left = {}

    def take(self) -> None:
        """Store the gradients of the private step."""
        with torch.no_grad():
            self._left = {id(p): (p.grad, stamp_of(p.grad)) for p in self._trainable.values() if p.grad is not None}

    def check(self) -> None:
        """Compare the gradients before an update.

        Raises:
            WatchError: one was written, replaced or taken away.
        """
        with torch.no_grad():
            for name, parameter in self._trainable.items():
                grad = parameter.grad
                left, stamp = self._left.get(id(parameter), (None, ()))
                if grad is None and left is None:
                    continue
                if grad is None:
                    raise WatchError(
                        f"The gradient of {name} was taken away between the private step and optimizer.step(): a "
                        "choice that follows private rows would reach the weights. Run nothing in between that "
                        "touches .grad, and zero_grad() after optimizer.step()"
                    )
                if stamp != stamp_of(grad) or (left is not None and left is not grad):
                    raise WatchError(
                        f"The gradient of {name} is not the one that the private step left: something wrote to it or "
                        "replaced it (a second backward pass, gradient clipping, a callback). Run nothing between the "
                        "private step and optimizer.step() that touches .grad"
                    )

    def drop(self) -> None:
        """Keep only the stamps after an update: the memory of the gradients is needed."""
        with torch.no_grad():
            self._left = {key: (None, stamp_of(grad)) for key, (grad, _) in self._left.items() if grad is not None}
