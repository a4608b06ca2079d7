"""Per-layer clipping: each of G layers is bounded by C / √G, so a unit reaches C over all of them.

The layers are written out here, and the gradients come from a float64 loop over single units.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from dpllm import GhostClipper, NormMethod, PrivacyConfig, make_plan, per_sequence_loss
from dpllm.config import load_recipe
from dpllm.ghost.refusals import GhostError
from dpllm.ghost.sums import clip_factors
from dpllm.mechanism.clipping import PerLayerClipping, layer_of
from dpllm.mechanism.events import Step
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentStream
from dpllm.privacy.ledger import Ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.report.definition import mechanism
from dpllm.training.step import private_step
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.training.test_step import Rows, engine_of, loss_of

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
METHODS = [NormMethod(), NormMethod(algorithm="instance"), NormMethod(backward_passes=2)]
LAYERS = {
    "untied": ["model.embed_tokens.", "model.layers.0.", "model.layers.1.", "model.norm.", "lm_head."],
    "tied": ["model.embed_tokens.", "model.layers.0.", "model.layers.1.", "model.norm."],
    "lora": ["base_model.model.model.layers.0.", "base_model.model.model.layers.1.", "base_model.model.lm_head."],
}
"""The beginning of the names of each layer."""


def model_of(kind):
    model = LlamaForCausalLM(tiny_llama_config(tie_word_embeddings=kind == "tied"))
    if kind == "lora":  # everything else is frozen by PEFT; its second matrices must not be 0
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return model.double()


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def named_layers(kind, names):
    layers = [[name for name in names if name.startswith(start)] for start in LAYERS[kind]]
    assert sorted(name for layer in layers for name in layer) == sorted(names) and all(layers)
    return layers


def losses(model, ids):
    return per_sequence_loss(model(input_ids=ids).logits, ids)


def loop(model, kind, ids):
    """Each unit's gradient by autograd, and the norms (G, U) of its layers."""
    rows = []
    for row in ids:
        grads = torch.autograd.grad(losses(model, row[None]).sum(), list(trainable(model).values()))
        rows.append(dict(zip(trainable(model), grads, strict=True)))
    of_unit = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    layers = named_layers(kind, of_unit)
    norms = [sum(of_unit[n].flatten(1).square().sum(1) for n in layer).sqrt() for layer in layers]
    return of_unit, layers, torch.stack(norms)


def ids_of(num_units):
    return torch.randint(3, 61, (num_units, 7), generator=torch.Generator().manual_seed(1))


@kills(
    "each layer may have the norm of all layers together",
    "dpllm/mechanism/clipping.py",
    "self.clip_norm / math.sqrt(num_groups) / norm_U",
    "self.clip_norm / norm_U",
)
@pytest.mark.parametrize("method", METHODS, ids=["default", "instance", "two passes"])
@pytest.mark.parametrize("kind", list(LAYERS))
def test_the_sum_is_that_of_a_loop_over_single_units(kind, method):
    """With tied weights, LoRA and frozen parameters; some layers of a unit are clipped, others are not."""
    model, ids = model_of(kind), ids_of(4)
    of_unit, layers, norm_GU = loop(model, kind, ids)
    bound = float(norm_GU.median()) * (1 + 1e-3)
    clip_norm = bound * len(layers) ** 0.5
    factor_GU = (bound / norm_GU).clamp_max(1)
    assert (factor_GU < 1).any() and (factor_GU == 1).any()
    clipper = GhostClipper(model, clipping=PerLayerClipping(clip_norm), norm_method=method)
    result = clipper.backward(losses(model, ids))
    torch.testing.assert_close(result.factors.double(), factor_GU, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.norms.double(), norm_GU.square().sum(0).sqrt(), rtol=1e-5, atol=0)
    for layer, factor_U in zip(layers, factor_GU, strict=True):
        for name in layer:
            expected = torch.einsum("u...,u->...", of_unit[name], factor_U)
            torch.testing.assert_close(trainable(model)[name].grad, expected, rtol=1e-5, atol=1e-9)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    clipper.remove()


@pytest.mark.parametrize("kind", list(LAYERS))
def test_one_unit_reaches_the_clip_norm_over_all_layers_and_never_exceeds_it(kind):
    """All layers are clipped: C / √G in each, and C in all. Float32, as models are trained."""
    model = model_of(kind).float()
    clip_norm = 1e-4
    clipper = GhostClipper(model, clipping=PerLayerClipping(clip_norm))
    clipper.backward(losses(model, ids_of(1)))
    grads = {name: p.grad.double() for name, p in trainable(model).items()}
    for layer in named_layers(kind, grads):
        norm = torch.cat([grads[name].flatten() for name in layer]).norm()
        assert float(norm) == pytest.approx(clip_norm / len(LAYERS[kind]) ** 0.5, rel=1e-4)
    total = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
    assert clip_norm * (1 - 1e-4) < total <= clip_norm
    clipper.remove()


@pytest.mark.parametrize("held", [False, True])
def test_all_rows_of_a_unit_are_clipped_as_one_in_each_layer(held):
    """Also where its rows do not fit in memory at once: the layers of both parts are added before they are clipped."""
    model, ids, clip_norm = model_of("tied"), ids_of(4), 1.0
    of_row, layers, _ = loop(model, "tied", ids)
    clipper = GhostClipper(model, clipping=PerLayerClipping(clip_norm))
    if held:
        clipper.hold(losses(model, ids[:3]))
        clipper.backward(losses(model, ids[3:]), torch.zeros(1, dtype=torch.long))
    else:
        clipper.backward(losses(model, ids), torch.zeros(4, dtype=torch.long))
    for layer in layers:
        whole = {name: of_row[name].sum(0) for name in layer}
        norm = float(torch.cat([grad.flatten() for grad in whole.values()]).norm())
        for name, grad in whole.items():
            expected = grad * min(1.0, clip_norm / len(layers) ** 0.5 / norm)
            torch.testing.assert_close(trainable(model)[name].grad, expected, rtol=1e-5, atol=1e-9)
    clipper.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 33, 1000])
def test_the_bound_over_all_layers_holds_after_rounding(num_layers, dtype):
    """Over thirty orders of magnitude, also where all layers are clipped, so that no room is left."""
    generator = torch.Generator().manual_seed(num_layers)
    exponents = torch.empty(num_layers, 500, dtype=dtype).uniform_(-15, 15, generator=generator)
    exponents[:, :100] = exponents[:, :100].abs() + 1
    norm_GU = 10**exponents
    factor_GU = clip_factors(PerLayerClipping(0.3), norm_GU.square())
    total_U = (factor_GU.double() * norm_GU.double()).norm(dim=0)
    assert (total_U <= 0.3).all() and (total_U[:100] >= 0.3 * (1 - 1e-5)).all()


def test_a_unit_that_is_not_finite_in_one_layer_contributes_nothing_to_it():
    """In the other layers it is clipped as any unit, whenever their sums are formed."""
    factors = clip_factors(PerLayerClipping(0.3), torch.tensor([[1.0, float("inf")], [1.0, 1.0]]))
    assert factors[0, 1] == 0 and factors[1, 1] == factors[1, 0] > 0


@dataclass(frozen=True)
class Undivided(PerLayerClipping):
    """Gives each layer the whole clip norm."""

    def factors(self, norm_GU):
        return (self.clip_norm / norm_GU).clamp_max(1)


@kills(
    "the bound over several groups is checked in each alone",
    "dpllm/ghost/sums.py",
    "square().sum(dim=0)",
    "square().amax(dim=0)",
)
def test_a_clipping_of_ones_own_that_does_not_divide_is_refused():
    """It would reach √2 C over two layers."""
    with pytest.raises(GhostError, match="per-layer"):
        clip_factors(Undivided(0.5), torch.tensor([[4.0, 1.0], [4.0, 1.0]]))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.h.11.attn.c_attn.weight", "transformer.h.11"),
        ("model.layers.0.mlp.experts.3.w1.weight", "model.layers.0"),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", "encoder.block.0"),
        ("bert.embeddings.word_embeddings.weight", "bert.embeddings"),
        ("lm_head.weight", "lm_head"),
        ("weight", ""),
        ("base_model.model.model.layers.2.self_attn.q_proj.lora_A.default.weight", "base_model.model.model.layers.2"),
        ("base_model.model.lm_head.lora_A.0.weight", "base_model.model.lm_head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A.default", "base_model.model.model.embed_tokens"),
        ("base_model.model.score.modules_to_save.default.weight", "base_model.model.score"),
    ],
)
def test_names_decide_the_layers(name, layer):
    """Up to the first number; adapters, whatever their name, belong to the layer that they adapt."""
    assert layer_of(name) == layer


def plan_of(**change):
    settings = {"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 8, "clipping": "per-layer"}
    return make_plan(PrivacyConfig(**{**settings, **change}), 40, 3)


def test_a_plan_is_saved_and_read_back_and_its_report_names_the_clipping(tmp_path):
    """Its event is that of DP-SGD; its hash is not, because another clipping is another run."""
    plan = plan_of()
    plan.save(tmp_path / PLAN_FILE)
    again = PrivacyPlan.load(tmp_path / PLAN_FILE)
    assert again == plan and again.hash == plan.hash and again.mechanism.clipping == PerLayerClipping(0.5)
    assert plan.to_dict()["clipping"] == "per-layer"
    flat = plan_of(clipping="flat")
    assert plan.event == flat.event and isinstance(plan.event, Step) and plan.hash != flat.hash
    assert "is clipped in each of the G layers of the model to norm C/√G, over all layers together to norm C = 0.5" in (
        mechanism(again)
    )


def test_a_recipe_may_name_it():
    """As a word; it has no options."""
    assert load_recipe(QUICKSTART, ["privacy.clipping=per-layer"]).privacy.clipping == "per-layer"
    with pytest.raises(ValueError, match="per-layer"):
        load_recipe(QUICKSTART, ["privacy.clipping={kind: per-layer, layers: 3}"])


@pytest.mark.parametrize(("share", "clipped"), [(1.01, 0), (0.99, 1), (0.01, 3)])
def test_a_step_counts_units_whose_whole_norm_exceeds_the_clip_norm(tmp_path, share, clipped):
    """A unit below C may be clipped in a layer; it is not counted, as `StepDiagnostics` says."""
    model, rows, units = model_of("untied").float(), Rows(), [3, 8, 21]
    largest, clip_norm = 0.0, 1.0
    clipper = GhostClipper(model, clipping=PerLayerClipping(clip_norm))
    for microbatch in rows.batches(units):
        result = clipper.clip(loss_of(model)(microbatch.inputs), microbatch.unit_index)
        largest = max(largest, float(result.norms.max()))
    clipper.remove()
    plan = plan_of(clip_norm=share * largest)
    clipper = GhostClipper(model, clipping=plan.mechanism.clipping)
    done = private_step(
        clipper,
        rows.batches(units),
        loss_of(model),
        plan,
        engine_of(model),
        Ledger.create(tmp_path / "ledger.jsonl", plan),
        IndependentStream(NoiseSource(0)),
    )
    clipper.remove()
    assert done.num_units == 3 and done.num_clipped == clipped
