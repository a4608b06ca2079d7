"""The part of the watch over trainable tensors outside the model, such as a head within the loss.

Place in the flow: under `dpllm.training.checks.watch`. Their gradients are neither clipped nor given noise, so they do
not change while losses depend on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch import Tensor

from dpllm.ghost.graph import leaves_of
from dpllm.training.checks.stamps import Stamp, WatchError, stamp_of


class OutsideTensors:
    """The trainable tensors outside the model that losses were seen to depend on.

    Args:
        trained: the ids of the clipped parameters.
    """

    def __init__(self, trained: Collection[int]) -> None:
        """Begin without tensors."""
        self._trained = frozenset(trained)
        self._seen: dict[int, tuple[weakref.ref[Tensor], Stamp]] = {}

    def look(self, loss_B: Tensor) -> Tensor:
        """Return the losses, and watch the trainable tensors outside the model that they depend on."""
        self._seen = {key: one for key, one in self._seen.items() if one[0]() is not None}
        for leaf in leaves_of(loss_B) if isinstance(loss_B, Tensor) else ():
            if id(leaf) not in self._trained:
                self._seen.setdefault(id(leaf), (weakref.ref(leaf), stamp_of(leaf)))
        return loss_B

    def check(self) -> None:
        """Check that none was written.

        Raises:
            WatchError: one was, between two private steps.
        """
        for reference, stamp in self._seen.values():
            leaf = reference()
            if leaf is not None and stamp_of(leaf) != stamp:
                raise WatchError(
                    f"A trainable tensor of shape {tuple(leaf.shape)}, which the losses depend on and the model does "
                    "not hold, was written between two private steps (perhaps by its own optimizer). Its gradients are "
                    "not clipped and get no noise, so private rows would reach all later losses through it. Make it a "
                    "part of the model, train it on public data only, or, if it follows the private weights, remove it "
                    "from the graph (requires_grad_(False))"
                )
