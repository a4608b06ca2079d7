"""Whether the Triton kernels run on a GPU, found out once by compiling and running the smallest of them.

Triton needs a C compiler and Python's header files when it first launches a program, and tensor cores that multiply
bfloat16. Where they are missing, the PyTorch functions compute the same.
"""

from __future__ import annotations

import functools
import warnings

import torch

from dpllm.ghost import triton_programs as programs
from dpllm.ghost.memory import is_shortage

OLDEST = (8, 0)
"""The least compute capability, of Ampere. On older GPUs programs spill kilobytes of registers."""


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Return whether kernels run on a CUDA device; if not, warn once and say why.

    Args:
        device: a CUDA device, on a machine on which Triton is installed.
    """
    problem = _problem(device)
    if problem is not None:
        warnings.warn(
            f"The Triton kernels cannot run on {device}: {problem}. dpllm uses its PyTorch functions there, which "
            "compute the same but take more time and memory. NormMethod(fused=False) does so without this warning.",
            stacklevel=2,
        )
    return problem is None


def _problem(device: torch.device) -> str | None:
    """Return what keeps the kernels from running, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return f"its compute capability is {'.'.join(map(str, capability))}, and they need at least 8.0 (Ampere)"
    try:
        found = _run(device)
    except Exception as error:  # of a compiler, an assembler, a linker, a driver or a folder for the cache
        if is_shortage(error):
            raise  # says nothing about Triton
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"Triton could not compile a program ({type(error).__name__}: {first_line}). It needs a C compiler, the "
            "header files of Python (python3-dev) and a folder that it can write to (TRITON_CACHE_DIR)"
        )
    return None if found == 3.0 else f"a program returned {found} instead of 3.0"


def _run(device: torch.device) -> float:
    """Add up three ones with the smallest program."""
    partial, total = torch.ones(3, device=device), torch.zeros(1, device=device)
    bounds = torch.tensor([0, 3], device=device)
    with torch.cuda.device_of(partial):
        programs.segment_program[(1,)](partial, bounds, total, 1, BLOCK=1024, num_warps=4, enable_fp_fusion=True)
    return float(total)
