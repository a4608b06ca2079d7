"""Two backward passes, one for the norms and one for the sum, give the result of one pass and hold less memory."""

from itertools import product

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, per_sequence_loss
from dpllm.ghost import GhostError, NormMethod, parameters
from dpllm.ghost.model_calls import tokens_of_call
from tests.conftest import tiny_llama_config
from tests.ghost.alive import Watch
from tests.mutations import kills
from tests.reference.oracle import clipped_sum, relative_error
from tests.reference.zoo import Case, build_model, enable_checkpointing, make_batch

CASES = [
    Case("gpt2-without-dropout", tied=True),
    Case("llama"),
    Case("llama", mode="lora-all-linear"),
    Case("albert"),
    Case("t5", tied=True),
]
UNITS = [None, torch.tensor([1, 0, -1, 2, 0])]


@kills(
    "a parameter with two uses counts as used once",
    "dpllm/ghost/attach.py",
    "self._host.uses[self.target_of(parameter).name] == 1",
    "self._host.uses[self.target_of(parameter).name] >= 1",
)
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "nonreentrant"])
@pytest.mark.parametrize("unit_index", UNITS, ids=["a row is a unit", "several rows"])
@pytest.mark.parametrize(
    "case", [case.but(dtype=dtype) for case, dtype in product(CASES, ("float64", "bfloat16"))], ids=str
)
def test_two_passes_give_what_one_gives(case, unit_index, checkpointing):
    """Norms and sum, tied weights and shared blocks (ALBERT) included, over several microbatches."""
    if case.family == "albert" and checkpointing != "none":
        pytest.skip("transformers has no activation checkpointing for ALBERT")
    model, batch = build_model(case), make_batch(case.spec, num_rows=5)
    enable_checkpointing(model, checkpointing)
    clip_norm = float(clipped_sum(model, case, batch, 1.0, unit_index).norms.median())
    batches, indices = [batch, batch.rows([0, 1, 2, 3, 4])], [unit_index, unit_index]
    once, twice = (
        clipped_sum(model, case, batches, clip_norm, indices, forms=NormMethod(backward_passes=passes))
        for passes in (1, 2)
    )
    tolerance = 1e-9 if case.dtype == "float64" else 1e-5
    torch.testing.assert_close(twice.norms, once.norms, rtol=tolerance, atol=0)
    assert relative_error(twice.total, once.total) <= tolerance


def stack(layers=6, width=32):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


@kills(
    "uses are counted over several steps",
    "dpllm/ghost/tapped_model.py",
    "            self.uses.clear()\n",
    "            pass\n",
)
@pytest.mark.parametrize(("passes", "least", "most"), [(1, 6, 6), (2, 1, 2)])
def test_one_layers_factors_are_held_at_a_time(passes, least, most):
    """One pass holds the factors of all layers until the sum; the first of two passes drops each after its norm."""
    watch = Watch()
    net = nn.Sequential(*(part for layer in stack() for part in (layer, watch)))
    clipper = GhostClipper(net, 1.0, NormMethod("gram", backward_passes=passes))
    for _ in range(2):  # the first call compares with autograd, and keeps more
        watch.most = 0
        clipper.backward(net(torch.randn(3, 4, 32)).square().sum((1, 2)))
    assert least <= watch.most <= most
    assert watch.alive() == 0


class Growing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.scale[0] *= 1.01
        return grad * ctx.scale[0], None


@kills(
    "the second pass is not compared with the first",
    "dpllm/ghost/clipper.py",
    "        if longer is not None and bool(longer):\n",
    "        if False:\n",
)
def test_a_second_pass_with_longer_gradients_is_refused():
    """The factors come from the first pass: a result that is not repeatable could exceed the clip norm."""
    net = stack(2)
    clipper = GhostClipper(net, 1e-3, NormMethod(backward_passes=2))
    clipper._checked.rows = True
    losses = Growing.apply(net(torch.randn(3, 4, 32)), [1.0]).square().sum((1, 2))
    with pytest.raises(GhostError, match="pass gave"):
        clipper.backward(losses)


def test_a_held_unit_is_clipped_in_one_pass():
    """A unit with more rows than a microbatch has its factors held, for every setting."""
    expected, inputs = None, torch.randn(4, 5, 32)
    for passes in (1, 2):
        torch.manual_seed(1)
        net = stack(2)
        clipper = GhostClipper(net, 1e-3, NormMethod(backward_passes=passes))
        clipper.hold(net(inputs[:2]).square().sum((1, 2)))
        norm = clipper.backward(net(inputs[2:]).square().sum((1, 2)), torch.tensor([0, 0])).norms
        expected = norm if expected is None else expected
        torch.testing.assert_close(norm, expected)


def test_sharded_parameters_are_refused():
    """ZeRO-3 frees weights after their use, and no process holds a whole gradient."""
    net = stack(1)
    net[0].weight.ds_id = 0  # how DeepSpeed marks a partitioned parameter
    with pytest.raises(GhostError, match="parameters are sharded"):
        GhostClipper(net, 1.0, NormMethod(backward_passes=2))


@pytest.mark.parametrize(
    ("checkpointing", "free", "passes"), [(True, 10, 2), (True, 10**9, 1), (False, 10, 1), (True, None, 1)]
)
def test_two_passes_are_chosen_where_one_does_not_fit(monkeypatch, checkpointing, free, passes):
    """Only under activation checkpointing, and only where the free memory is known."""
    monkeypatch.setattr(parameters, "free_bytes", lambda device: free)
    net = stack(2)
    net.gradient_checkpointing = checkpointing
    clipper = GhostClipper(net, 1.0)
    losses = net(torch.randn(3, 4, 32)).square().sum((1, 2))
    assert clipper._passes(losses) == passes
    clipper._norms(losses, torch.arange(3), 3)
    assert (clipper._again is not None) == (passes == 2)


def test_what_one_pass_holds_is_the_smaller_form_of_each_layer():
    """Factors of a wide layer, the instance of a narrow one, a bias as it is, an embedding's output gradient."""
    modules = [nn.Linear(100, 50), nn.Linear(2, 300, bias=False).bfloat16(), nn.Embedding(1000, 8)]
    frozen = nn.Linear(7, 7).requires_grad_(False)
    expected = 2 * (10 * 150 * 4 + 50 * 4 + 2 * 300 * 4 + 10 * 8 * 4)
    assert parameters.held_bytes([*modules, frozen], rows=2, tokens=10) == expected
    assert parameters.free_bytes(torch.device("cpu")) is None
    assert tokens_of_call((torch.zeros(3),), {"x": torch.zeros(2, 9)}) == 9
    assert tokens_of_call((), {}) == 1


def test_unknown_numbers_of_passes_are_refused():
    """Only one and two passes exist."""
    with pytest.raises(ValueError, match="backward_passes"):
        NormMethod(backward_passes=3)


@pytest.mark.parametrize("checkpointing", ["reentrant", "nonreentrant"])
def test_what_is_held_of_lora_does_not_grow_with_the_tokens(checkpointing):
    """Each factor is held as its per-unit gradient: rows x trainable entries, for rows of any length."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(tiny_llama_config(hidden_size=32, intermediate_size=48))
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).train()
    clipper = GhostClipper(model, 1.0)
    trainable_bytes = sum(p.nbytes for p in clipper.parameters.values())
    for tokens in (24, 60):
        ids = torch.randint(3, 61, (3, tokens))
        clipper._norms(per_sequence_loss(model(input_ids=ids).logits, ids), torch.arange(3), 3)
        assert not any(clipper._pass.contributions.values())
        held = {id(one): one for one in clipper._pass.joint.values()}.values()
        assert sum(flat.value_UP.nbytes for flat in held) == 3 * trainable_bytes
