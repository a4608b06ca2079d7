"""Step 1: enough of the correctness checks to know whether the speed figures that follow are of sound code."""

from __future__ import annotations

import kernel_times
import torch

from dpllm.ghost import triton_launch
from dpllm.mechanism.chacha20 import require_known_words
from gpu.kernel_checks import EXACT, case_makers, errors_of
from gpu.record import Figures, Skipped, brief
from gpu.setting import Setting, free_memory
from tests.reference.oracle import compare, released_over_clip_norm
from tests.reference.zoo import Case

# Norm, sum and worst parameter, as in tests/reference/test_clipped_sum.py.
TOLERANCES = {"float32": (1e-5, 2e-5, 1e-4), "bfloat16": (3e-2, 6e-2, 0.3), "autocast": (3e-2, 6e-2, 0.3)}
MODES = ("full", "lora-all-linear")


def programs(figures: Figures, setting: Setting) -> None:
    """Compare each Triton program with float64, on one shape in bfloat16 and an odd one in float32.

    A program that does not compile or run is WRONG, and the next one runs.
    """
    if not triton_launch.available():
        raise Skipped("Triton is not installed") if setting.toy else RuntimeError("Triton cannot run here")
    expected = "in the interpreter" if setting.toy else "compiled"
    figures["triton"] = triton_launch.triton.__version__
    figures.require(setting.toy == triton_launch.INTERPRETED, f"the programs do not run {expected}")
    for kernel in kernel_times.KERNELS:
        for dtype, whole in ((torch.bfloat16, not setting.toy), (torch.float32, False)):
            name = f"{kernel}, {str(dtype).removeprefix('torch.')}, relative error"
            try:
                case = case_makers(kernel, dtype, setting.device, whole)[0]()
                figures.check(name, errors_of(case)["error"], at_most=EXACT[dtype])
            except Exception as error:  # the next program
                figures.require(False, f"{name}: {brief(error)}")
    free_memory()


def models(figures: Figures, setting: Setting) -> None:
    """Compare a whole Llama, full and LoRA, with the float64 loop over single rows; one unit contributes at most C."""
    for dtype in ("float32", "bfloat16"):
        for mode in MODES:
            try:
                model_against_the_loop(figures, setting, Case("llama", mode, dtype=dtype))
            except Exception as error:  # the next model
                figures.require(False, f"llama {mode} {dtype}: {brief(error)}")


def model_against_the_loop(figures: Figures, setting: Setting, case: Case) -> None:
    """Check norms, clipped sum and the contribution of one unit."""
    norm, total, part = TOLERANCES[case.dtype]
    found = compare(case, device=setting.device.type)
    name = f"{case.family} {case.mode} {case.dtype}"
    figures.check(f"{name}, norms", found.norm_error, at_most=norm)
    figures.check(f"{name}, sum", found.sum_error, at_most=total)
    figures.check(f"{name}, worst parameter", found.worst_parameter[0], at_most=part)
    smallest, largest = released_over_clip_norm(case, device=setting.device.type)
    figures.check(f"{name}, one unit over C", largest, at_least=0.99, at_most=1)
    figures.require(smallest >= 0.99, f"{name}: a unit contributes {smallest:.4f} C, less than it may")


def noise_words(figures: Figures, setting: Setting) -> None:
    """The device's ChaCha20 gives the words of RFC 8439."""
    require_known_words(setting.device)
    figures.say("ChaCha20 words: ok")
