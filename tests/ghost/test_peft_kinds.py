"""Every kind of adapter that PEFT builds on a small Llama: exact against the loop, or refused with a reason."""

import contextlib
import copy
import warnings

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from dpllm import GhostClipper, GhostError, packed_sequence_loss
from dpllm.data.rows import PackedCollator
from dpllm.ghost import NormMethod
from dpllm.models.losses import per_sequence_loss
from dpllm.models.packing import attention_by_row
from tests.conftest import tiny_llama_config
from tests.ghost.loop import assert_is_the_loop, perturbed

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
    "constrained OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0, "coft": True}, "something else in each call"),
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
