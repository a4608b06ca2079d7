"""Where Triton cannot compile, PyTorch functions are used, and one warning says why."""

import os
import types
import warnings

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from dpllm.ghost import NormMethod, triton_launch

needs_interpreter = pytest.mark.skipif(not triton_launch.INTERPRETED, reason="no interpreter")
GPU = torch.device("cuda", 0)
TENSOR = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=GPU)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of the present generation, on which nothing was tried yet."""
    triton_launch.is_usable.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_launch, "available", lambda: True)
    yield monkeypatch
    triton_launch.is_usable.cache_clear()


def test_kernels_are_used_where_one_ran(gpu):
    """It is compiled and run once, not for each layer."""
    runs = []
    gpu.setattr(triton_launch, "_run", lambda device: runs.append(device) or 3.0)
    assert all(NormMethod().fuses(TENSOR, TENSOR) for _ in range(3)) and runs == [GPU]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Failed to find C compiler.\nMore."), r"RuntimeError: Failed to find C compiler\.\)\. It needs"),
        (OSError("read-only"), r"OSError: read-only\)"),
        (ValueError(), r"ValueError: ValueError\)"),
    ],
)
def test_a_compiler_that_fails_is_named_once(gpu, error, words):
    """Later layers use the PyTorch functions without a word."""

    def fail(device):
        raise error

    gpu.setattr(triton_launch, "_run", fail)
    with pytest.warns(UserWarning, match=rf"cannot run on cuda:0: Triton could not compile a program \({words}"):
        assert not NormMethod().fuses(TENSOR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not NormMethod().fuses(TENSOR)
        assert NormMethod(fused=True).fuses(TENSOR), "asked for: the error of the compiler is then raised"


def test_an_old_gpu_is_not_compiled_for(gpu):
    """Turing takes up to 43 seconds a program, which then spills kilobytes."""
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    gpu.setattr(triton_launch, "_run", lambda device: pytest.fail("compiled"))
    with pytest.warns(UserWarning, match="capability"):
        assert not NormMethod().fuses(TENSOR)


def test_a_wrong_result_is_a_failure(gpu):
    """A program that runs and returns something else is not trusted."""
    gpu.setattr(triton_launch, "_run", lambda device: float("nan"))
    with pytest.warns(UserWarning, match="program returned"):
        assert not NormMethod().fuses(TENSOR)


def test_a_lack_of_memory_is_no_verdict(gpu):
    """The caller frees memory and tries again, as for any other operation."""

    def fail(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu.setattr(triton_launch, "_run", fail)
    with pytest.raises(torch.OutOfMemoryError):
        NormMethod().fuses(TENSOR)
    gpu.setattr(triton_launch, "_run", lambda device: 3.0)
    assert NormMethod().fuses(TENSOR)


@needs_interpreter
def test_the_program_adds_up():
    """The result that is expected is the right one."""
    assert triton_launch._run(torch.device("cpu")) == 3.0
