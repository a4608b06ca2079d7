"""A sum is begun without zeros, and becomes the gradient in one pass, noise and scale included."""

import os

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from dpllm import GhostClipper, GhostError
from dpllm.engines import SingleProcess
from dpllm.ghost import NormMethod, triton_launch
from dpllm.ghost.sums import Sum
from dpllm.mechanism.generators import NoiseSource
from tests.mutations import kills


class Operations(TorchDispatchMode):
    """The names of the operations that are neither views nor allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if not func.is_view and not name.startswith("empty"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def begun():
    return Sum(torch.Size((4, 6)), torch.float32, torch.device("cpu"))


def test_the_first_tensor_is_taken_and_the_gradient_is_made_in_one_pass(begun):
    """No zeros, no copy, no multiplication apart from the rounding."""
    value = torch.randn(4, 6)
    with Operations() as operations:
        begun.take_(value)
        begun.finish_in(torch.bfloat16, 0.3)
        gradient = begun.finished()
    assert operations.names == ["mul"]
    assert torch.equal(gradient, (value * 0.3).bfloat16())


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("value", [torch.randn(6, 4).mT, torch.randn(4, 6).double(), torch.randn(4, 6)])
def test_tensors_of_any_layout_are_added(begun, value, alpha):
    """A tensor that is not laid out as the sum is copied: noise is added to contiguous entries only."""
    kept = value.clone()
    begun.add_(value, alpha)
    begun.add_(value, alpha)
    torch.testing.assert_close(begun.total, 2 * alpha * kept.float())
    assert begun.total.is_contiguous() and torch.equal(value, kept)


@pytest.mark.parametrize("value", [torch.randn(6, 4).mT, torch.randn(4, 6).double(), torch.randn(4, 6)])
def test_a_tensor_of_any_layout_is_taken(begun, value):
    """Without a copy only where it is laid out as the sum."""
    kept = value.clone()
    begun.take_(value)
    assert (begun.total is value) == (value.is_contiguous() and value.dtype == torch.float32)
    begun.take_(kept.clone())
    torch.testing.assert_close(begun.total, 2 * kept.float())
    assert begun.total.is_contiguous()


def test_a_sum_to_which_nothing_was_added_is_zero(begun):
    """Not what the memory held."""
    begun.total.fill_(torch.nan)
    begun.finish_in(torch.float32, 2.0)
    assert torch.equal(begun.finished(), torch.zeros(4, 6))


def test_a_gradient_of_the_dtype_of_the_sum_takes_its_memory(begun):
    """A float32 parameter needs no second tensor."""
    begun.add_(torch.ones(4, 6))
    place = begun.total.data_ptr()
    begun.finish_in(torch.float32, 0.5)
    gradient = begun.finished()
    assert gradient.data_ptr() == place and bool((gradient == 0.5).all())


@kills(
    "the first of two uses of a parameter finishes its sum",
    "dpllm/ghost/sums.py",
    "finish, self._finish = self._finish, None",
    "finish = self._finish",
)
@pytest.mark.skipif(not triton_launch.INTERPRETED, reason="the kernels need Triton's interpreter")
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_kernel_makes_the_gradient_that_separate_passes_make(microbatches, uses):
    """With the last use of the last microbatch, from sum and noise; a checked first step has passes of its own."""

    def gradient_of(is_first_step):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(40, 40, bias=False).bfloat16()] * uses)
        clipper = GhostClipper(model, 0.1, NormMethod("gram", fused=True))
        engine = SingleProcess(torch.optim.SGD(model.parameters(), lr=0.1))
        engine.guard.done = not is_first_step
        noise, made = NoiseSource(seed=1), []

        def add_to(parameter, total):
            if last:
                noise.add_(total.filled(), 0.5)
            clipper.add_clipped_sum_(parameter, total)
            made.append(total.gradient is not None)

        for number in range(microbatches):
            last = number == microbatches - 1
            x = torch.randn(3, 9, 40).bfloat16()
            clipper.clip(model(x).float().square().sum((1, 2)))
            engine.collect(clipper.parameters, add_to, last=last, scale=0.1)
        clipper.remove()
        assert made == [False] * (microbatches - 1) + [not is_first_step]
        return model[0].weight.grad

    first, later = gradient_of(True), gradient_of(False)
    assert first.dtype == later.dtype == torch.bfloat16
    # The interpreter cuts bfloat16 off, PyTorch rounds to nearest.
    torch.testing.assert_close(later.float(), first.float(), rtol=2**-7, atol=1e-6)


@kills("a sum takes the shape of what is added", "dpllm/ghost/sums.py", "if value.shape != self._like[0]:", "if False:")
@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("add", ["add_", "take_"])
def test_a_gradient_of_another_shape_is_refused(add, empty):
    """Transposed, or of one row: an empty sum was resized for it."""
    for shape in ((3, 2), (3,)):
        total = Sum(torch.Size((2, 3)), torch.float32, torch.device("cpu"))
        if not empty:
            total.add_(torch.ones(2, 3))
        with pytest.raises(GhostError, match="shape"):
            getattr(total, add)(torch.ones(shape))
