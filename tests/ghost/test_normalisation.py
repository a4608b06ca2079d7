"""Norm layers are recognised by what they compute; their gradients come from the input, without running them again."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dpllm import GhostClipper
from dpllm.ghost.call import Call
from dpllm.ghost.normalisation import Normalisation, recognised
from tests.ghost.loop import assert_is_the_loop


class Centred(nn.Module):
    """LayerNorm without a bias, under names of its own."""

    def __init__(self, width, epsilon=1e-3):
        super().__init__()
        self.gain, self.tiny = nn.Parameter(torch.rand(width)), epsilon

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.gain * x / (x.square().mean(-1, keepdim=True) + self.tiny).sqrt()


class Halves(nn.Module):
    """Normalises two halves of the features apart from each other: none of the usual forms."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x):
        halves = x.unflatten(-1, (2, -1))
        return self.weight * (halves * (halves.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)


class Without(Halves):
    """Has no eps, so a padding of zeros would be no number."""

    def forward(self, x):
        return self.weight * x * x.square().mean(-1, keepdim=True).rsqrt()


class Gated(nn.Module):
    """Its scale depends on a second input too."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6, elementwise_affine=False)
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x, gate=None):
        return self.weight * self.norm(x) * (x if gate is None else gate)


def form_of(module, dtype=torch.float32, tokens=5):
    module = module.to(dtype)
    (name,) = dict(module.named_parameters())
    return recognised(Call(module, (torch.randn(2, tokens, 12).to(dtype),), {}), name, module.get_parameter(name))


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_usual_norms_are_recognised_with_their_eps(dtype, tokens):
    """Of any class, also Gemma's, whose weight is added to one, and one that holds no eps."""
    assert form_of(LlamaRMSNorm(12, 1e-5), dtype, tokens) == Normalisation("rms", 1e-5)
    assert form_of(LlamaRMSNorm(12, 1e-6), dtype, tokens) == Normalisation("rms", 1e-6)
    assert form_of(GemmaRMSNorm(12, 1e-6), dtype, tokens) == Normalisation("rms", 1e-6)
    assert form_of(nn.RMSNorm(12), dtype, tokens).kind == "rms"
    if dtype == torch.float32:
        assert form_of(nn.RMSNorm(12), dtype, tokens).eps == torch.finfo(dtype).eps
        assert form_of(Centred(12), dtype, tokens) == Normalisation("layer", 1e-3)


@pytest.mark.parametrize("kind", [Halves, Without, Gated])
def test_other_scales_are_not(kind):
    """They run again for the gradient, as before."""
    assert form_of(kind(12)) is None


def test_a_module_with_an_inner_float32_keeps_its_rounding_in_a_float64_model():
    """Its n(x) is not that of float64."""
    assert form_of(LlamaRMSNorm(12, 1e-5), torch.float64) is None
    assert form_of(Centred(12), torch.float64) == Normalisation("layer", 1e-3)


@pytest.mark.parametrize("shape", [(2, 7, 12), (2, 7, 3, 12), (3, 12)])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradients_equal_those_of_float64(kind, shape):
    """Weight and bias, for tokens, heads, and rows of one token; eps counts in a row of small inputs."""
    form, x, grad = Normalisation(kind, 1e-4), 1 + torch.randn(shape), torch.randn(shape)
    x[0] *= 1e-2
    exact = x.double()
    exact = exact - (exact.mean(-1, keepdim=True) if kind == "layer" else 0)
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-4).sqrt()
    weight_B, bias_B = form.grads(x, grad, with_bias=True)
    between = tuple(range(1, len(shape) - 1))
    expected = exact * grad.double()
    torch.testing.assert_close(weight_B.double(), expected.sum(between) if between else expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias_B, grad.sum(between) if between else grad, rtol=1e-5, atol=1e-5)
    assert form.grads(x, grad)[1] is None
    torch.testing.assert_close(form.of(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_padding_of_zeros_adds_nothing():
    """Packed rows are filled up with zeros, whose n(x) is 0 and not 0 / 0."""
    x = torch.zeros(1, 3, 4)
    for kind in ("rms", "layer"):
        assert torch.equal(Normalisation(kind, 1e-6).grads(x, x, with_bias=True)[0], torch.zeros(1, 4))


class Small(nn.Module):
    """A norm of each form, one after another."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(3, 12)
        self.norms = nn.ModuleList([LlamaRMSNorm(12), GemmaRMSNorm(12), Centred(12), nn.LayerNorm(12), Halves(12)])

    def forward(self, x):
        x = self.inside(x)
        for norm in self.norms:
            x = x + norm(x)
        return x


def test_the_sum_is_that_of_a_loop():
    """Every form, recognised or not, in one model."""
    torch.manual_seed(0)
    model = Small().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    assert_is_the_loop(model, lambda m, batch: m(batch["x"]).square().sum((1, 2)).sqrt(), {"x": x})


@pytest.mark.parametrize(("kind", "runs"), [(LlamaRMSNorm, 1), (Halves, 2)])
def test_a_recognised_module_runs_only_in_the_forward_pass(kind, runs):
    """A module that is not recognised runs again for its gradient."""

    class Counted(kind):
        runs = 0

        def forward(self, x):
            self.runs += 1
            return super().forward(x)

    norm = Counted(12)
    clipper = GhostClipper(model := nn.Sequential(nn.Linear(3, 12), norm), 1.0)
    for _ in range(2):  # in the first call the module is tried
        norm.runs = 0
        clipper.backward(model(torch.randn(2, 5, 3)).square().sum((1, 2)))
    assert norm.runs == runs
    clipper.remove()
