"""Every kind of adapter that PEFT builds on a small Llama: exact against the loop, or refused with a reason."""

import contextlib
import copy
import types
import warnings

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from dpllm import GhostClipper, GhostError, packed_sequence_loss
from dpllm.data.rows import PackedCollator
from dpllm.ghost import NormMethod
from dpllm.models.inputs import attention_by_row
from dpllm.models.losses import per_sequence_loss
from tests.conftest import tiny_llama_config
from tests.ghost.loop import assert_is_the_loop, perturbed, row_gradients
from tests.mutations import kills

pytestmark = [
    # A name that transformers 5.24 renamed, in PEFT; PyTorch's own, about FRoD's sparse matrices.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]
QV = ["q_proj", "v_proj"]
IDS = torch.randint(3, 61, (4, 7), generator=torch.Generator().manual_seed(2))
TOKENS = [4, 11, 27, 54]  # all of them occur
PROMPT = {"target_modules": None, "num_virtual_tokens": 4}
ENCODER = {**PROMPT, "encoder_hidden_size": 8}
CPT = {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]}
BD_LORA = peft.BdLoraConfig(nblocks=2, target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"])

LORA = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "biases": {"bias": "lora_only"},
    "biases of factors": {"lora_bias": True},
    "saved modules": {"modules_to_save": ["lm_head"]},
    "all linear layers": {"target_modules": "all-linear"},
    "an embedding": {"target_modules": [*QV, "embed_tokens"]},
    "tokens": {"trainable_token_indices": TOKENS},
    "layers used twice": {"layer_replication": [[0, 2], [1, 2]]},
    **{way: {"init_lora_weights": way} for way in ("gaussian", "pissa", "olora", "orthogonal")},
    "EVA": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
    "DoRA": {"use_dora": True},
    "DoRA with dropout": {"use_dora": True, "lora_dropout": 0.1},  # of rate 0 in the comparison
    "DoRA of an embedding": {"use_dora": True, "target_modules": [*QV, "embed_tokens"]},
    "QA-LoRA": {"use_qalora": True, "qalora_group_size": 4},
    "BD-LoRA": {"use_bdlora": BD_LORA},
    "KaSA": {"kasa_config": peft.KasaConfig()},
    "MonteCLoRA": {"monteclora_config": peft.MontecloraConfig()},
    "VeLoRA": {"velora_config": peft.VeloraConfig()},
}
OTHERS = {
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10, "init_r": 3, "target_r": 2}),
    "AdaMSS": ("AdamssConfig", {"r": 4, "num_subspaces": 2, "subspace_rank": 1}),
    "adaption prompt": ("AdaptionPromptConfig", {"target_modules": None, "adapter_len": 3, "adapter_layers": 2}),
    "BEFT": ("BeftConfig", {}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "C3A": ("C3AConfig", {"block_size": 4}),
    "cartridge": ("CartridgeConfig", PROMPT),
    "DEFT": ("DeftConfig", {"r": 2}),
    "DeLoRA": ("DeloraConfig", {"r": 2}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 8}),
    "FRoD": ("FrodConfig", {}),
    "GLoRA": ("GloraConfig", {"r": 2}),
    "GraLoRA": ("GraloraConfig", {"r": 4, "gralora_k": 2}),
    "HiRA": ("HiraConfig", {"r": 2}),
    "HRA": ("HRAConfig", {"r": 2}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "layer norms": ("LNTuningConfig", {"target_modules": None}),
    "LoHa": ("LoHaConfig", {"r": 2}),
    "LoKr": ("LoKrConfig", {"r": 2}),
    "MiSS": ("MissConfig", {"r": 2}),
    "MiSS, bat": ("MissConfig", {"r": 4, "init_weights": "bat"}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0}),
    "PEANuT": ("PeanutConfig", {"r": 2}),
    "Poly": ("PolyConfig", {"r": 2, "n_tasks": 2, "n_skills": 2}),
    "prefix": ("PrefixTuningConfig", PROMPT),
    "prefix with an encoder": ("PrefixTuningConfig", {**ENCODER, "prefix_projection": True}),
    "prompt": ("PromptTuningConfig", PROMPT),
    "p-tuning": ("PromptEncoderConfig", ENCODER),
    "prompts of several tasks": ("MultitaskPromptTuningConfig", {**PROMPT, "num_tasks": 2, "num_ranks": 2}),
    "PSOFT": ("PsoftConfig", {"r": 4}),
    "PVeRA": ("PveraConfig", {"r": 4}),
    "RandLoRA": ("RandLoraConfig", {"r": 4}),
    "RoAd": ("RoadConfig", {"group_size": 4}),
    "shadow": ("ShadowConfig", {"target_modules": None, "r": 2, "shadow_num_hidden_layers": 1}),
    "SHiRA": ("ShiraConfig", {"r": 2}),
    "Supertuning": ("SupertuningConfig", {}),
    "TinyLoRA": ("TinyLoraConfig", {"u": 4}),
    "tokens alone": ("TrainableTokensConfig", {"target_modules": ["embed_tokens"], "token_indices": TOKENS}),
    "Uni-LoRA": ("UniLoraConfig", {"r": 2, "theta_d_length": 32}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 6, "vector_length": 4, "topk": 2}),
    "VeRA": ("VeraConfig", {"r": 4}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 8}),
}
REFUSED = {
    "CPT": ("CPTConfig", {"target_modules": None, **CPT}, "has a hook on its gradient"),
    "OSF": ("OSFConfig", {"effective_rank": 4}, "has a hook on its gradient"),
    # The mean of its router's choices runs over the tokens of all rows.
    "Lily": ("LilyConfig", {"r": 2}, "rows depend on each other"),
    # It projects its weight in place in each forward pass.
    "constrained OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0, "coft": True}, "something different in each call"),
}
DRAWN = {"MonteCLoRA", "Poly", "PVeRA"}  # random numbers in training: compared in evaluation, where they are off


def adapted(config, name="", **changes):
    """A model with adapters in float64, no parameter at a special initial value."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(tiny_llama_config(use_cache=False, **changes))
    # AdaMSS takes the dtype of the model, and others decompose its weights in float32.
    model = model.double() if name == "AdaMSS" else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cannot be merged later, compilers that are missing
        model = perturbed(get_peft_model(model, config))
    model = model.eval() if name in DRAWN else model
    freeze_unused(model)
    return model


def freeze_unused(model):
    """Freeze parameters that have no part in the loss, as `privacy.unused_parameters: freeze` does."""
    trial = copy.deepcopy(model)
    losses(trial, batch()).sum().backward()
    for (_, own), (_, tried) in zip(model.named_parameters(), trial.named_parameters(), strict=True):
        if own.requires_grad and tried.grad is None:
            own.requires_grad_(False)


def of(kind, settings):
    named = {"target_modules": QV, "task_type": "CAUSAL_LM", **settings}
    return getattr(peft, kind)(**{name: value for name, value in named.items() if value is not None})


def lora(**settings):
    return LoraConfig(**{"r": 2, "target_modules": QV, "task_type": "CAUSAL_LM", **settings})


def losses(model, batch):
    ids, kind = batch["ids"], model.active_peft_config.peft_type
    tasks = {"task_ids": batch["tasks"]} if kind in ("MULTITASK_PROMPT_TUNING", "POLY") else {}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **tasks).logits
    return per_sequence_loss(logits[:, -ids.shape[1] :], ids)


def batch():
    return {"ids": IDS, "tasks": torch.arange(4) % 2}


@pytest.mark.parametrize("name", LORA)
def test_lora_matches_the_loop(name):
    """Its variants, places and ways to begin."""
    assert_is_the_loop(adapted(lora(**LORA[name]), name), losses, batch())


@pytest.mark.parametrize("name", OTHERS)
def test_other_adapters_match_the_loop(name):
    """Whatever has no tap runs row by row."""
    assert_is_the_loop(adapted(of(*OTHERS[name]), name), losses, batch())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_adapters_have_a_reason(name):
    """Before a step is charged, and the model is as before."""
    kind, settings, reason = REFUSED[name]
    model = adapted(of(kind, settings))
    classes = [type(module) for module in model.modules()]
    with pytest.raises(GhostError, match=reason):
        GhostClipper(model, 1.0).backward(losses(model, batch()))
    assert [type(module) for module in model.modules()] == classes


UNITS = {
    "DoRA": lambda: lora(use_dora=True),
    "DoRA with dropout": lambda: lora(use_dora=True, lora_dropout=0.1),
    "IA3": lambda: of(*OTHERS["IA3"]),
    "VeRA": lambda: of(*OTHERS["VeRA"]),
    "tokens": lambda: lora(trainable_token_indices=TOKENS),
}


@pytest.mark.parametrize("checkpoints", [None, False, True], ids=["", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", UNITS)
def test_units_of_several_rows_under_checkpointing(name, passes, checkpoints):
    """Cross terms between rows, one or two passes, activations computed again."""
    model = adapted(UNITS[name]())
    if checkpoints is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    units = torch.tensor([0, 1, 0, 2])
    assert_is_the_loop(model, losses, batch(), NormMethod(backward_passes=passes), units, microbatches=2)


def test_dora_on_layers_with_a_bias():
    """PEFT takes the bias off before it scales."""
    assert_is_the_loop(adapted(lora(use_dora=True), attention_bias=True), losses, batch())


def test_a_magnitude_of_zero():
    """Where the layer's output does not show the gradient of its magnitude."""
    model = adapted(lora(use_dora=True))
    with torch.no_grad():
        for module in model.modules():
            for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
                magnitude.weight[1] = 0
    assert_is_the_loop(model, losses, batch())


def test_tokens_of_a_tied_head():
    """The head computes with the trained tokens as well."""
    assert_is_the_loop(adapted(lora(trainable_token_indices=TOKENS), tie_word_embeddings=True), losses, batch())


def several_adapters(model):
    """Two adapters at once, as PEFT's tuner allows."""
    model.add_adapter("second", lora(r=3))
    model.base_model.set_adapter(["default", "second"])


def frozen_a(model):
    """Train the factors B alone (FFA-LoRA)."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)


def hooked(model):
    """A factor's output is changed by a hook."""
    q_proj(model).lora_A["default"].register_forward_hook(lambda module, args, output: 2 * output)


def own_forward(model):
    """A factor has another forward than its class."""
    factor = q_proj(model).lora_B["default"]
    factor.forward = types.MethodType(lambda self, x: torch.tanh(torch.nn.Linear.forward(self, x)), factor)


def q_proj(model, layer=0):
    return model.base_model.model.model.layers[layer].self_attn.q_proj


def hooked_dropout(model):
    """The dropout is none, and a hook on it doubles its input."""
    q_proj(model).lora_dropout["default"].register_forward_hook(lambda module, args, output: 2 * output)


def gated(model):
    """A hook makes the scale a function of the row."""

    def scale(module, args):
        module.scaling["default"] = 1 + args[0].mean((1, 2), keepdim=True)

    q_proj(model, 1).register_forward_pre_hook(scale)  # its input has a gradient


def in_place(model):
    """A dropout writes to its input, which other layers read."""

    class Halved(torch.nn.Module):
        def forward(self, x):
            return x.mul(1.0).mul_(0.5)

    q_proj(model).lora_dropout["default"] = Halved()


def normed(model):
    """The weight of a factor is computed from others."""
    torch.nn.utils.parametrizations.weight_norm(q_proj(model).lora_B["default"])


def scaled(model):
    """Another scale."""
    q_proj(model).set_scale("default", 3.0)


CHANGED = (several_adapters, frozen_a, hooked, own_forward, hooked_dropout, gated, in_place, normed, scaled)


@pytest.mark.parametrize("change", CHANGED, ids=[change.__name__ for change in CHANGED])
def test_lora_layers_that_compute_something_else(change):
    """One tap for both factors serves the usual layer only."""
    model = adapted(lora())
    change(model)
    assert_is_the_loop(perturbed(model), losses, batch())


LATER = (hooked, hooked_dropout, gated, in_place, scaled)


@kills("a hook on a factor is passed by", "dpllm/ghost/peft_taps.py", " or is_hooked(layer)", "", case="hooked")
@kills(
    "a hook on a dropout is passed by",
    "dpllm/ghost/peft_taps.py",
    " and not is_hooked(dropout)",
    "",
    case="hooked_dropout",
)
@kills(
    "a scale with a gradient loses it",
    "dpllm/ghost/peft_taps.py",
    " or type(scaling := self.scaling[name]) not in (float, int)",
    " or not (scaling := self.scaling[name]) is not None",
    case="gated",
)
@pytest.mark.parametrize("change", LATER, ids=[change.__name__ for change in LATER])
def test_lora_layers_that_change_after_the_first_step(change):
    """The taps were compared with the model before the change."""
    model = adapted(lora())
    clipper = GhostClipper(model, 1e6)
    clipper.backward(losses(model, batch()))
    change(model)
    rows = row_gradients(model, losses, batch())
    model.zero_grad()
    norms = clipper.backward(losses(model, batch())).norms
    clipper.remove()
    torch.testing.assert_close(norms.double(), rows.norm(dim=1), rtol=1e-6, atol=0)


def test_a_hook_on_all_modules_sees_the_factors():
    """It may come after the first step."""
    model = adapted(lora())
    clipper = GhostClipper(model, 1e6)
    clipper.backward(losses(model, batch()))
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(id(module)))
    try:
        clipper.backward(losses(model, batch()))
    finally:
        handle.remove()
        clipper.remove()
    assert id(q_proj(model).lora_A["default"]) in seen


def test_a_model_without_adapters_may_be_called_by_itself():
    """As the reference of a preference loss, with gradients on; and another clipper may train above frozen adapters."""
    model = adapted(lora())
    clipper = GhostClipper(model, 1e6)
    clipper.backward(losses(model, batch()))
    with model.disable_adapter():
        model.get_base_model()(input_ids=IDS)
    clipper.remove()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    clipper = GhostClipper(model, 1e6)
    clipper.backward(losses(model, batch()))
    q_proj(model)(torch.zeros(1, 2, model.config.hidden_size, dtype=torch.float64))
    clipper.remove()


def test_float64_stays_float64_under_autocast():
    """As a product of PyTorch does."""
    model = adapted(lora())

    def under_autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model, batch)

    assert_is_the_loop(model, under_autocast, batch())


def test_a_dropout_in_place_changes_no_other_layer():
    """The layers read one input, of which each has its own copy in the dtype of its adapter."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(tiny_llama_config(use_cache=False)).bfloat16()
    model = get_peft_model(model, lora(lora_dropout=0.5)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.inplace = True

    def loss():
        torch.manual_seed(5)
        return losses(model, {"ids": IDS[:1]})

    clipper = GhostClipper(model, 1e6)
    clipper.backward(loss())
    private = loss()
    clipper.forget()
    clipper.remove()
    assert torch.equal(private, loss())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["adapters in float32", "all in bfloat16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_lora_in_16_bits_is_plain_autograd(dtype, autocast, dropout):
    """Of one row, with the same mask of dropout: the gradients of ordinary training, and its loss to the last bit."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(tiny_llama_config(use_cache=False)).bfloat16()
    model = get_peft_model(model, lora(lora_dropout=dropout), autocast_adapter_dtype=dtype == torch.float32).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn_like(parameter) if "lora_B" in name else 0

    def loss():
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=IDS[:1]).logits
        return per_sequence_loss(logits.float(), IDS[:1])

    trained = [p for p in model.parameters() if p.requires_grad]
    plain = loss()
    plain.sum().backward()
    gradients = [p.grad.float() for p in trained]
    model.zero_grad()
    clipper = GhostClipper(model, 1e6)
    clipper.backward(loss())  # it also compares the taps with the model
    model.zero_grad()
    private = loss()
    clipper.backward(private)
    assert not clipper.row_by_row
    clipper.remove()
    assert torch.equal(private, plain)
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad.float(), gradient, rtol=0.02, atol=0.01 * float(gradient.norm()))


def mixtral():
    """LoRA on every linear layer, expert and router."""
    torch.manual_seed(1)
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    model = MixtralForCausalLM._from_config(MixtralConfig(**tiny_llama_config().to_dict() | settings))
    return perturbed(get_peft_model(model, lora(target_modules="all-linear")))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # PEFT's own
@pytest.mark.parametrize("name", [*UNITS, "routers"])
def test_packed_rows_match_padded_ones(name):
    """Which needs taps: packed rows cannot run one by one."""
    model = mixtral() if name == "routers" else adapted(UNITS[name]())
    rows = [{"input_ids": ids, "labels": ids} for ids in (IDS[0].tolist(), IDS[1, :5].tolist(), IDS[2, :6].tolist())]
    sums = []
    for packed in (False, True):
        model.zero_grad()
        clipper = GhostClipper(model, 0.05)
        with attention_by_row(model) if packed else contextlib.nullcontext():
            for part in [rows] if packed else [[row] for row in rows]:
                inputs = dict(PackedCollator()(part))
                labels = inputs.pop("labels")
                if packed:
                    of_rows = packed_sequence_loss(model(**inputs).logits, labels, inputs["cu_seq_lens_q"])
                else:
                    of_rows = per_sequence_loss(model(input_ids=inputs["input_ids"]).logits, labels)
                clipper.backward(of_rows)
        clipper.remove()
        sums.append(torch.cat([p.grad.flatten() for p in clipper.parameters.values()]))
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=1e-9)
