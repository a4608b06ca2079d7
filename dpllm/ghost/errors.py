"""The exceptions of the ghost package."""

import torch

SHORTAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")
"""In plain RuntimeErrors where memory ran out outside PyTorch's own allocator: CUDA's and Triton's launches, cuBLAS,
cuDNN, and the CPU's allocator."""


class GhostError(ValueError):
    """A model, a module, a loss or a call for which exact per-unit clipping cannot be guaranteed.

    The message names the module or parameter by its path, the reason, and the remedy.
    """


class NoRuleError(GhostError):
    """A structure that cannot be clipped in one backward pass for all units; one unit at a time it can.

    `dpllm.ghost.PerUnitClipper` is exact for it, and the message says so.
    """

    REMEDY = (
        "Or clip one unit at a time, which is slower and exact for any structure: privacy.gradients=per_unit, or "
        "PerUnitClipper in a loop without a run"
    )

    def __init__(self, message: str) -> None:
        """Add the remedy that every such structure has."""
        super().__init__(f"{message.rstrip('.')}. {self.REMEDY}")


class CoupledError(NoRuleError):
    """The loss of a row depends on other rows of its call.

    One unit at a time it cannot, but a loss over the rows of a batch then means something else: only a person can
    choose that.
    """


class MissedUseError(NoRuleError):
    """A trained parameter received a gradient that no tap saw."""

    def __init__(self, name: str) -> None:
        """Name the parameter."""
        super().__init__(
            f"{name} received a gradient that is not clipped, and it was dropped. Either backward() was called on a "
            "loss directly (pass the losses of the rows to GhostClipper.backward()), or the loss uses the parameter "
            "outside the model's call, or a module does so in a way that the first call of the model did not. Move the "
            "computation into the forward pass of the model, make GhostClipper after the last change of the model, or "
            "freeze the parameter."
        )
        self.name = name


class UnreachedError(GhostError):
    """No loss has a gradient in a trainable parameter."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that the device, or the host, has no memory left.

    >>> is_shortage(torch.OutOfMemoryError("Tried to allocate 2.00 GiB."))
    True
    >>> is_shortage(RuntimeError("Triton Error [CUDA]: out of memory")), is_shortage(RuntimeError("shape mismatch"))
    (True, False)
    """
    is_plain = isinstance(error, RuntimeError) and any(words in str(error) for words in SHORTAGES)
    return is_plain or isinstance(error, torch.OutOfMemoryError)
