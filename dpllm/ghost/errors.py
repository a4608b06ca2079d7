"""The exceptions of the ghost package."""

import torch

SHORTAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")
"""Messages of plain RuntimeErrors for memory shortages outside PyTorch's allocator: CUDA and Triton launches, cuBLAS,
cuDNN, and the CPU's allocator."""


class GhostError(ValueError):
    """A model, a module, a loss or a call for which exact per-unit clipping cannot be guaranteed.

    The message names the module or parameter by its path, the reason, and the remedy.
    """


class NoRuleError(GhostError):
    """A structure that cannot be clipped in one backward pass over all units, but can be clipped one unit at a time.

    `dpllm.ghost.PerUnitClipper` is exact for it, and the message says so.
    """

    REMEDY = (
        "Or clip one unit at a time, which is slower but exact for any structure: privacy.gradients=per_unit, or "
        "PerUnitClipper in a loop without a run"
    )

    def __init__(self, message: str) -> None:
        """Add the remedy that applies to every such structure."""
        super().__init__(f"{message.rstrip('.')}. {self.REMEDY}")


class CoupledError(NoRuleError):
    """The loss of a row depends on other rows of its call.

    Run one unit at a time it does not, but then a loss over the rows of a batch has a different meaning, and only the
    user can choose that.
    """


class MissedUseError(NoRuleError):
    """A trained parameter received a gradient outside its taps."""

    def __init__(self, name: str) -> None:
        """Name the parameter."""
        super().__init__(
            f"{name} received a gradient that is not clipped, and it was dropped. Either backward() was called on a "
            "loss directly (pass the row losses to GhostClipper.backward()), or the parameter is used outside the "
            "model's call or in a way that the model's first call did not use it. Move the computation into the "
            "model's forward pass, create GhostClipper after the last change to the model, or freeze the parameter."
        )
        self.name = name


class UnreachedError(GhostError):
    """A trainable parameter has no gradient in any loss."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory.

    >>> is_shortage(torch.OutOfMemoryError("Tried to allocate 2.00 GiB."))
    True
    >>> is_shortage(RuntimeError("Triton Error [CUDA]: out of memory")), is_shortage(RuntimeError("shape mismatch"))
    (True, False)
    """
    is_plain = isinstance(error, RuntimeError) and any(words in str(error) for words in SHORTAGES)
    return is_plain or isinstance(error, torch.OutOfMemoryError)
