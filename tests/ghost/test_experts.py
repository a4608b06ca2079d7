"""Mixtures of experts: every part trained exactly, whatever the routing, against a loop of single units in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from dpllm import GhostClipper, GhostError, per_sequence_loss
from dpllm.ghost import NormMethod, experts
from dpllm.ghost.experts import NAME, experts_forward, grouped_product
from tests.ghost.loop import assert_is_the_loop, perturbed, row_gradients
from tests.mutations import kills
from tests.reference.oracle import compare
from tests.reference.test_clipped_sum import check_float64
from tests.reference.zoo import FAMILIES, Case, _gpt_oss, enable_checkpointing
from tests.tiers import deep_case

ALGORITHMS = ("gram", "instance", "tiled")
UNITS = torch.tensor([0, 1, 0, 2, 1])


def batch(rows=5, tokens=9):
    """Rows of different lengths, with padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    mask[-2, 4:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}


def losses(model, batch):
    """One loss per row."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return per_sequence_loss(logits, batch["labels"])


def only(model, *words):
    """The model with only those parameters trained whose names have one of the words."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in words))
    return model


def mixtral(**settings):
    """A small Mixtral in float64."""
    torch.manual_seed(0)
    model = FAMILIES["mixtral"].make(False)
    return perturbed(model)


def lora_on_experts(model, **settings):
    """LoRA on both stacks of experts."""
    settings = {
        "r": 3,
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        **settings,
    }
    return perturbed(get_peft_model(model, LoraConfig(**settings)))


def gpt_oss(top_k=2):
    """A small gpt-oss in float64: transposed stacks, biases, interleaved gates; its sinks are frozen."""
    torch.manual_seed(0)
    model = perturbed(_gpt_oss(tied=False))
    for layer in model.model.layers:
        layer.mlp.router.top_k = top_k
    return only(model, "experts", "router", "_proj", "norm", "embed", "head")


@pytest.mark.parametrize("units", [None, UNITS], ids=["rows", "units of several rows"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_norms_and_the_sum_of_experts(algorithm, units):
    """Layouts (outputs, inputs) and (inputs, outputs), with and without biases, by Gram matrices and by instances."""
    assert_is_the_loop(only(mixtral(), "experts", "gate"), losses, batch(), NormMethod(algorithm), units)
    assert_is_the_loop(only(gpt_oss(), "experts", "router"), losses, batch(), NormMethod(algorithm), units)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_lora_on_experts_is_exact(make, algorithm):
    """Factors of stacks of both layouts: the gradient of the factors, not of a whole matrix."""
    assert_is_the_loop(lora_on_experts(make()), losses, batch(), NormMethod(algorithm), UNITS)


@kills(
    "the gradient of LoRA factors of experts is not scaled",
    "dpllm/ghost/experts.py",
    "down.times(down_EKD.mT, self.scaling)",
    "down.times(down_EKD.mT, 1.0)",
)
@pytest.mark.parametrize("case", ["rslora", "one stack", "with attention", "two passes"])
def test_variants_of_lora_on_experts_are_exact(case):
    """Another scaling, one stack only, beside adapters of linear layers, and two backward passes."""
    settings = {
        "rslora": {"use_rslora": True, "lora_alpha": 5},
        "one stack": {"target_parameters": ["experts.down_proj"]},
        "with attention": {"target_modules": ["q_proj", "v_proj"]},
        "two passes": {},
    }[case]
    method = NormMethod("gram", backward_passes=2) if case == "two passes" else None
    model = lora_on_experts(mixtral(), **settings)
    assert_is_the_loop(model, losses, batch(), method)
    clipper = GhostClipper(model, 1.0, method)
    clipper.backward(losses(model, batch()))
    assert clipper.row_by_row == {}, "exact in any case, but with as many launches as rows"
    clipper.remove()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_tokens_in_one_expert_and_experts_without_tokens_are_exact(algorithm):
    """One expert gets every token of every unit; the others have a gradient of exactly zero, and no error is raised."""
    model = gpt_oss(top_k=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias.copy_(torch.tensor([0.0, 1000.0, 0.0, 0.0]))
    only(model, "experts", "q_proj")
    assert_is_the_loop(model, losses, batch(), NormMethod(algorithm), UNITS)
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            assert parameter.grad is not None
            assert not bool(parameter.grad[[0, 2, 3]].any())
            assert bool(parameter.grad[1].any())


def test_experts_that_two_layers_share_are_one_parameter():
    """The cross terms of the two uses are part of the norm."""
    for algorithm in ALGORITHMS:
        model = mixtral()
        model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
        assert_is_the_loop(only(model, "experts"), losses, batch(), NormMethod(algorithm), UNITS)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_loss_of_two_calls_is_exact(passes):
    """Both calls use the same experts for other tokens."""

    def contrast(model, batch):
        other = {**batch, "input_ids": batch["input_ids"] * 3 % 97}
        return losses(model, batch) + 0.5 * losses(model, other)

    assert_is_the_loop(mixtral(), contrast, batch(), NormMethod("gram", backward_passes=passes))


def test_rows_that_are_held_are_part_of_their_unit():
    """A unit with more rows than fit at once has one norm over all of them."""
    model, whole = only(mixtral(), "experts", "gate"), batch()
    rows = row_gradients(model, losses, whole)
    clipper = GhostClipper(model, float(rows.sum(0).norm()) / 2, NormMethod("gram"))
    for part in (slice(0, 2), slice(2, 3)):
        clipper.hold(losses(model, {name: value[part] for name, value in whole.items()}))
    last = losses(model, {name: value[3:] for name, value in whole.items()})
    result = clipper.backward(last, torch.zeros(2, dtype=torch.int64))
    clipper.remove()
    torch.testing.assert_close(result.norms.double(), rows.sum(0).norm()[None], rtol=1e-6, atol=0)


def test_one_token_in_each_row_is_exact():
    """Rows and tokens are then as many, and are not confused."""
    model = only(mixtral(), "experts", "gate")

    def one_token(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits[:, 0]
        return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 0], reduction="none")

    tokens = {"input_ids": torch.arange(3, 8)[:, None], "labels": torch.arange(10, 15)[:, None]}
    assert_is_the_loop(model, one_token, tokens, NormMethod("gram"))


class _Experts(nn.Module):
    """Experts without a forward pass of their own: only the functions of the interface compute them."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 4
        inner, width = 6, 5
        self.act_fn = torch.tanh
        shapes = {"gate_up_proj": (2 * inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        for name, (outputs, inputs) in shapes.items():
            order = (inputs, outputs) if config.transposed else (outputs, inputs)
            setattr(self, name, nn.Parameter(torch.randn(4, *order, dtype=torch.float64)))
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(4, outputs, dtype=torch.float64)))
        self.post_expert_norm = nn.LayerNorm(width, dtype=torch.float64)
        self.weight_of_norm = None

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


@pytest.mark.parametrize("has_post_expert_norm", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_our_function_computes_what_transformers_computes(transposed, has_bias, has_gate, has_post_expert_norm):
    """With every option of the interface, beside the function for batched products; the derivatives too."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

    torch.manual_seed(0)
    options = {"is_transposed": transposed, "has_bias": has_bias, "has_gate": has_gate}
    if "has_post_expert_norm" in inspect.signature(use_experts_implementation).parameters:
        options["has_post_expert_norm"] = has_post_expert_norm
    elif has_post_expert_norm:
        pytest.skip("this release of transformers has no norm behind experts")
    kind = use_experts_implementation(type("Experts", (_Experts,), {}), **options)
    config = type("Config", (), {"transposed": transposed, "_experts_implementation": "batched_mm"})()
    module = kind(config)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(7)])  # the last expert has no token
    weights = torch.rand(7, 2, dtype=torch.float64, requires_grad=True)
    inputs = [x, weights, *module.parameters()]
    outputs = [
        function(module, x, index, weights) for function in (ALL_EXPERTS_FUNCTIONS["batched_mm"], experts_forward)
    ]
    torch.testing.assert_close(outputs[1], outputs[0])
    ours, theirs = (
        torch.autograd.grad(output.square().sum(), inputs, materialize_grads=True, allow_unused=True)
        for output in outputs
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@kills(
    "the backward pass reads the stack of experts as it was before ZeRO-3 released it",
    "dpllm/ghost/experts.py",
    "ctx.save_for_backward(stack)",
    "ctx.save_for_backward(stack.detach())",
)
@pytest.mark.parametrize("outputs_first", [False, True])
def test_a_stack_that_is_released_after_the_forward_pass_is_read_again(outputs_first):
    """ZeRO-3 gives the parameter other data until it is needed: a view of the first data would keep its memory."""
    stack = nn.Parameter(torch.randn(2, 3, 3, dtype=torch.float64), requires_grad=False)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    whole = stack.detach().clone()
    output = grouped_product(x, stack, torch.tensor([2, 3]), outputs_first)
    stack.data = torch.empty(0, dtype=torch.float64)
    stack.data = 2 * whole
    matrices = (2 * whole).mT if outputs_first else 2 * whole
    expected = torch.cat([torch.ones(2, 3).double() @ matrices[0].mT, torch.ones(3, 3).double() @ matrices[1].mT])
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], expected)


@kills(
    "the kernel for grouped products gives a stack in the graph no gradient",
    "dpllm/ghost/experts.py",
    "    if stack.requires_grad:",
    "    if stack.requires_grad and not isinstance(parts, Tensor):",
)
@pytest.mark.parametrize("outputs_first", [False, True])
def test_the_kernel_for_grouped_products_gives_the_gradients_of_the_loop(outputs_first, monkeypatch):
    """Those of the tokens and of the stack, where an expert has no token; it runs on the CPU too."""
    torch.manual_seed(0)
    x, counts = torch.randn(9, 16, dtype=torch.bfloat16), torch.tensor([4, 0, 5])
    stack = torch.randn(3, 16, 16, dtype=torch.bfloat16)
    found = []
    for has_kernel in (False, True):
        monkeypatch.setattr(experts, "_has_kernel", lambda *_, has=has_kernel: has)
        inputs = [tensor.clone().requires_grad_() for tensor in (x, stack)]
        output = grouped_product(*inputs, counts, outputs_first)
        found.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for kernel, loop in zip(*found, strict=True):
        torch.testing.assert_close(kernel, loop, rtol=2e-2, atol=2e-2)


def test_the_model_is_computed_as_before_once_the_clipper_is_removed():
    """The implementation that the user chose is set again, and ours is never written into a saved config."""
    model = mixtral()
    assert model.config._experts_implementation == "eager"
    before = model(batch()["input_ids"]).logits
    clipper = GhostClipper(model, 1.0)
    clipper.backward(losses(model, batch()))
    assert model.config._experts_implementation == NAME
    assert NAME not in str(model.config.to_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(batch()["input_ids"]).logits, before)
    clipper.remove()
    assert model.config._experts_implementation == "eager"
    frozen = GhostClipper(only(model, "q_proj"), 1.0)
    frozen.backward(losses(model, batch()))
    assert model.config._experts_implementation == "eager"
    frozen.remove()


@pytest.mark.parametrize("mode", ["lora-attention", "shared"])
def test_frozen_experts_pass(mode):
    """Routing couples no rows; every frozen expert is computed as before."""
    if mode == "lora-attention":
        check_float64(compare(Case("mixtral", "lora-attention")))
    else:
        torch.manual_seed(0)
        model = only(perturbed(FAMILIES["deepseek_v3"].make(False)), "shared_experts", "q_b_proj")
        assert_is_the_loop(model, losses, batch())


def refused(model, match):
    """Attaching is refused."""
    with pytest.raises(GhostError, match=match):
        GhostClipper(model, 1.0)


@kills(
    "frozen experts that ZeRO-3 partitioned call as many modules as experts have tokens",
    "dpllm/ghost/attach.py",
    "        self._experts += attach_partitioned(self._model, self._host)\n",
    "",
)
def test_frozen_experts_that_are_partitioned_call_the_same_modules_for_any_tokens():
    """The eager function calls a module for each expert with tokens; DeepSpeed compares the calls of processes."""
    model = only(mixtral(), "q_proj")
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.ds_id = 0  # how DeepSpeed marks a partitioned parameter
    stacks = [module for name, module in model.named_modules() if name.endswith(".experts")]
    calls = []
    for stack in stacks:
        stack.act_fn.register_forward_hook(lambda *_: calls.append(1))
    clipper = GhostClipper(model, 1.0)
    losses(model, batch())
    for ids in (torch.full((2, 3), 5), torch.arange(3, 43).view(2, 20)):
        calls.clear()
        with torch.no_grad():
            model(input_ids=ids)
        assert len(calls) == len(stacks) == model.config.num_hidden_layers
    clipper.remove()
    assert model.config._experts_implementation == "eager"


def test_a_parameter_of_experts_that_is_no_stack_is_refused():
    """Nothing is silently not trained, and the implementation that the user chose is set again."""
    model = mixtral()
    model.model.layers[0].mlp.experts.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match=r"experts\.scale"):
        clipper.backward(losses(model, batch()))
    clipper.remove()
    assert model.config._experts_implementation == "eager"


def test_experts_spread_over_processes_are_refused():
    """A unit's norm would be spread too."""
    model = mixtral()
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    refused(model, r"layers\.1.*expert parallelism")


@kills(
    "adapters of experts that are switched off get a gradient",
    "dpllm/ghost/experts.py",
    '        if name not in getattr(module, "parametrizations", {}) or',
    "        if",
)
def test_adapters_that_are_switched_off_are_refused():
    """They have no part in the loss, and a gradient for them would be wrong."""
    model = lora_on_experts(mixtral())
    clipper = GhostClipper(model, 1.0)
    with model.disable_adapter(), pytest.raises(GhostError, match="trainable but not used"):
        losses(model, batch())
    clipper.remove()


def test_lora_on_the_weight_of_a_router_is_the_loop():
    """It is no stack of experts, and PEFT's wrapper does not call it as a layer."""
    model = perturbed(lora_on_experts(mixtral(), target_parameters=["gate.weight"]))
    assert_is_the_loop(model, losses, batch(), unit_index=UNITS)


@pytest.mark.parametrize("at_the_start", [False, True])
def test_another_order_of_lora_factors_is_refused(at_the_start, monkeypatch):
    """If PEFT changes the layout. At its start one factor is zero, and so is the product in any order."""
    from peft.tuners.lora.layer import ParamWrapper

    model = lora_on_experts(mixtral())
    ups = [p for name, p in model.named_parameters() if "lora_B" in name and p.requires_grad]
    before = [p.detach().clone() for p in ups]
    right = ParamWrapper.get_delta_weight
    monkeypatch.setattr(ParamWrapper, "get_delta_weight", lambda self, name: right(self, name).flip(0))
    clipper = GhostClipper(model, 1.0)
    with torch.no_grad():
        [p.mul_(not at_the_start) for p in ups]
    if at_the_start:
        clipper.backward(losses(model, batch()))
    with torch.no_grad():
        [p.copy_(value) for p, value in zip(ups, before, strict=True)]
    with pytest.raises(GhostError, match="in a different order"):
        losses(model, batch())
    clipper.remove()


def test_choices_that_do_not_fit_the_experts_are_refused():
    """An index beyond the experts would be left out silently."""
    model = mixtral()
    clipper = GhostClipper(model, 1.0)
    losses(model, batch())
    module = model.model.layers[0].mlp.experts
    x, weights = torch.randn(3, 32, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    with torch.no_grad():
        for index, match in ((torch.full((3, 2), 4), "up to 4"), (torch.zeros(3, 1).long(), r"\(3, 1\)")):
            with pytest.raises(GhostError, match=match):
                module(x, index, weights)
    clipper.remove()


@pytest.mark.parametrize("case", ["lora-experts", deep_case("full")])
@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_under_activation_checkpointing(family, checkpointing, case):
    """Recomputed experts are tapped again, with the same choices."""
    check_float64(compare(Case(family, case, checkpointing=checkpointing)))


def test_checkpointed_gpt_oss_is_exact():
    """Biases and interleaved gates, recomputed."""
    model = gpt_oss()
    enable_checkpointing(model, "non-reentrant")
    assert_is_the_loop(model, losses, batch(), NormMethod("gram"), UNITS)
