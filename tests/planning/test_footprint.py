"""Footprint: counts against instantiated models, bytes against live tensors, formulas, and the README's table.

`python -m tests.planning.test_footprint` prints the table of docs/tutorials/several_processes.md.
"""

import contextlib
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dpllm import GhostClipper
from dpllm.config import ConfigError, ModelConfig, load_recipe
from dpllm.ghost.refusals import scales_of
from dpllm.ghost.sums import Sum
from dpllm.mechanism.strategies import Workload
from dpllm.models.load import DTYPES, prepare_model
from dpllm.models.quantization import config_for, make_ready
from dpllm.models.tasks import default_row_loss
from dpllm.planning.footprint import (
    ENGINES,
    Run,
    comparison_rows,
    engines_for,
    footprint,
    footprint_of_recipe,
    footprint_rows,
    format_bytes,
    in_chunks,
    setting_of,
)
from dpllm.planning.model_shape import shape_of_model
from dpllm.privacy.plan import make_plan
from dpllm.training.arguments import training_arguments
from dpllm.training.row_losses import HeadLosses, RowLosses

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}
NEOX = {
    **{key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "model_type": "gpt_neox",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
BERT = {**{key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}, "model_type": "bert"}
LORA = {"r": 4, "target_modules": "all-linear"}

# Llama 3: Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783, table 3.
LLAMA3 = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


def llama3(size, **changes):
    config = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
    return ModelConfig(config={**config, **LLAMA3[size]}, dtype="bfloat16", **changes)


def instantiated(model):
    settings = dict(model.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if model.tie_word_embeddings is not None:
        config.tie_word_embeddings = model.tie_word_embeddings
    return prepare_model(AutoModelForCausalLM.from_config(config, dtype=DTYPES[model.dtype]), model)


def run_of(engine="single", num_gpus=1, **changes):
    settings = {"rows": 2, "tokens": 96, "num_microbatches": 3, "checkpointing": False, "bf16": False}
    return Run(engine=engine, num_gpus=num_gpus, **{**settings, **changes})


# ------------------------------------------------------------------ the shape


@pytest.mark.parametrize("config", [LLAMA, GPT2, NEOX], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("kind", ["full", "lora", "freeze"])
@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_the_model(config, kind, tied):
    """P, P_t and the largest trainable parameter equal the sums over an instantiated model, tied or not."""
    transposed = {"fan_in_fan_out": True} if config is GPT2 else {}
    frozen = ["*attention*"] if config is NEOX else ["*attn*"]
    changes = {"full": {}, "lora": {"adapter": {**LORA, **transposed}}, "freeze": {"freeze": frozen}}[kind]
    model = ModelConfig(config=config, tie_word_embeddings=tied, **changes)
    shape, real = shape_of_model(model), list(instantiated(model).parameters())
    trainable = [p.numel() for p in real if p.requires_grad]
    assert shape.total == sum(p.numel() for p in real)
    assert shape.trainable == sum(trainable)
    assert shape.frozen == shape.total - shape.trainable
    assert shape.largest_trainable == max(trainable)
    assert (shape.num_layers, shape.hidden, shape.head.vocabulary, shape.head.tied) == (3, 64, 500, tied)
    assert shape.block.has_adapters == ("adapter" in changes)


@pytest.mark.parametrize(("size", "total"), [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)])
def test_llama3(size, total):
    """Known sizes of Llama 3, without a weight in memory."""
    shape = shape_of_model(llama3(size))
    assert shape.total == shape.trainable == total
    outside = shape.embedding + shape.head.entries + shape.hidden
    assert shape.num_layers * shape.block.entries + outside == total


def test_roles():
    """The matrices of a block are distinguished, also fused ones and those with adapters."""
    roles = {"qkv": 3, "attention_out": 1, "mlp_in": 2, "mlp_out": 1}
    for changes in ({}, {"adapter": LORA}):
        linears = shape_of_model(ModelConfig(config=LLAMA, **changes)).block.linears
        assert {role: sum(x.role == role for x in linears) for role in roles} == roles
        assert {x.rank for x in linears} == ({4} if changes else {0})
        assert {x.trainable for x in linears} == ({False} if changes else {True})
    gpt2 = shape_of_model(ModelConfig(config=GPT2))
    assert [(x.role, x.inputs, x.outputs) for x in gpt2.block.linears] == [
        ("qkv", 64, 192),
        ("attention_out", 64, 64),
        ("mlp_in", 64, 256),
        ("mlp_out", 256, 64),
    ]
    assert not gpt2.block.gated and gpt2.trainable_tables == 2  # tokens and positions
    classifier = ModelConfig(config=BERT, task="sequence_classification", num_labels=3)
    head = shape_of_model(classifier).head
    assert (head.entries, head.vocabulary) == (0, 3)


def test_vocabulary_of_a_trained_tokenizer():
    """A configuration without vocab_size takes that of the tokenizer to be trained."""
    config = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    assert shape_of_model(ModelConfig(config=config, tokenizer_vocab_size=4096)).head.vocabulary == 4096


def test_local_folder(tmp_path):
    """A model by name needs nothing but config.json; dtype auto is the one in it."""
    settings = dict(LLAMA)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    named = shape_of_model(ModelConfig(name=str(tmp_path), dtype="auto"))
    assert named == shape_of_model(ModelConfig(config=LLAMA, dtype="bfloat16"))
    assert named.dtype_bytes == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "nobody/no-such-model"}, "local folder with its config.json"),
        ({"config": {"model_type": "llamma"}}, "model_type 'llamma'"),
        ({"config": {**LLAMA, "hidden_sizes": 3}}, "'hidden_sizes'; did you mean 'hidden_size'"),
        ({"config": {**LLAMA, "hidden_size": "wide"}}, r"model\.config: .*'hidden_size'.*expected int.*'wide'"),
        ({"config": {"model_type": "t5", "vocab_size": 100}, "task": "seq2seq_lm"}, "not for encoder-decoders"),
        (
            {"config": {"model_type": "mamba", "vocab_size": 99, "hidden_size": 32}},
            "MambaBlock is not a block of attention",
        ),
    ],
)
def test_shape_refuses(model, message):
    """A file that cannot be read or an unknown form is named, with the remedy."""
    with pytest.raises(ConfigError, match=message):
        shape_of_model(ModelConfig(**model))


# ----------------------------------------------------- against live tensors


def live_bytes():
    """The counter of live tensors that the benchmarks use."""
    spec = importlib.util.spec_from_file_location("throughput", ROOT / "benchmarks" / "throughput.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["throughput"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.LiveBytes()


def storages(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measured(model, run):
    """Bytes of one microbatch: saved for backward, in the book, and at the peak beside weights and sums."""
    net = instantiated(model)
    if run.checkpointing:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    net.train()
    weights = {p.untyped_storage()._cdata for p in net.parameters()}
    clipper = GhostClipper(net, 1.0)
    sums = {p: torch.zeros(p.shape) for p in clipper.parameters.values()}
    ids = torch.randint(0, 500, (run.rows, run.tokens))
    autocast = torch.autocast("cpu", torch.bfloat16) if run.bf16 else contextlib.nullcontext()
    head = HeadLosses(run.head)
    head.clipper = clipper
    row_losses = RowLosses(default_row_loss(net), False, head)

    def step(saved=None):
        keep = saved.append if saved is not None else lambda _: None
        with autocast, torch.autograd.graph.saved_tensors_hooks(lambda t: (keep(t.detach()), t)[1], lambda t: t):
            losses = row_losses(net, {"input_ids": ids, "labels": ids})
            model_saved = None if saved is None else [t for t in saved if t.untyped_storage()._cdata not in weights]
        clipper.clip(losses)
        return model_saved

    def form_sums():
        for parameter, total in sums.items():
            clipper.add_clipped_sum_(parameter, Sum.onto(total))

    for _ in range(4):  # the checks of the first batch, and those of parameters without a gradient in losses 2 and 4
        step()
        form_sums()
    saved = step([])
    held = [*clipper._pass.contributions.values(), clipper._pass.joint.values()]
    book = storages(t for uses in held for use in uses for t in vars(use).values() if isinstance(t, torch.Tensor))
    activations = storages(saved)
    form_sums()
    del saved, held
    live = live_bytes()
    for tensor in (ids, *net.parameters(), *net.buffers(), *sums.values()):
        live.watch(tensor)
    before = live.current
    with live:
        step()
        form_sums()
    return activations, book, live.peak - before


@pytest.mark.parametrize(
    ("config", "dtype", "bf16", "peft", "checkpointing"),
    [
        (LLAMA, "float32", False, None, False),
        (LLAMA, "bfloat16", False, None, True),
        (LLAMA, "float32", False, LORA, True),
        (LLAMA, "float32", True, None, True),
        (LLAMA, "bfloat16", True, None, False),
        (LLAMA, "bfloat16", True, LORA, False),
        (GPT2, "float32", False, None, False),
        (NEOX, "float32", True, LORA, False),
    ],
)
def test_bytes_against_a_real_microbatch(config, dtype, bf16, peft, checkpointing):
    """Activations, book and peak of one process are within 25 % of the tensors that are alive in a real microbatch."""
    model = ModelConfig(config=config, dtype=dtype, adapter=peft, tie_word_embeddings=False)
    run = run_of(bf16=bf16, checkpointing=checkpointing)
    result = footprint(shape_of_model(model), run)
    try:
        activations, book, peak = measured(model, run)
    except RuntimeError as error:
        if "pack_vnni2" not in str(error):
            raise
        pytest.skip(f"PyTorch's fused attention in bfloat16 cannot run under this ATEN_CPU_CAPABILITY: {error}")
    if not checkpointing:  # with it, saved tensors are those of the recomputation as well
        assert result.passing.activations == pytest.approx(activations, rel=0.25)
    assert result.passing.book == pytest.approx(book, rel=0.25)
    assert result.total - result.kept.total == pytest.approx(peak, rel=0.25)


def test_weights_of_one_process():
    """Weights are the parameters' own bytes: float32 adapters on a bfloat16 model."""
    model = ModelConfig(config=LLAMA, dtype="bfloat16", adapter=LORA)
    result = footprint(shape_of_model(model), run_of(bf16=True))
    assert result.kept.weights == sum(p.nbytes for p in instantiated(model).parameters())


@pytest.mark.parametrize(
    ("config", "quantization"),
    [(LLAMA, "nf4"), (GPT2, "nf4"), (LLAMA, {"kind": "fp4", "double": False}), (LLAMA, "int8")],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning")
def test_quantised_weights_are_their_stored_values_and_scales(tmp_path, config, quantization):
    """Those of the loaded model: tables of codes, a few hundred bytes for each matrix, are left out."""
    pytest.importorskip("bitsandbytes", reason="pip install 'dpllm[quantization]'")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path)
    model = ModelConfig(name=str(tmp_path), quantization=quantization, adapter=LORA)
    options = {"quantization_config": config_for(quantization, torch.float32)}
    loaded = prepare_model(AutoModelForCausalLM.from_pretrained(tmp_path, **options), model)
    make_ready(loaded)
    scales = {id(s): s for m in loaded.modules() for name, s in scales_of(m).items() if not name.endswith("code")}
    held = sum(p.nbytes for p in loaded.parameters()) + sum(s.nbytes for s in scales.values())
    offsets = sum(1 for s in scales.values() if s.ndim == 0)
    result = footprint(shape_of_model(model), run_of())
    assert result.kept.weights == held - 4 * offsets
    assert result.passing.gathered == 4 * max(p.numel() for n, p in instantiated_matrices(config))


def instantiated_matrices(config):
    blocks = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).base_model
    return [
        (name, p) for name, p in blocks.named_parameters() if p.ndim == 2 and "emb" not in name and "wt" not in name
    ]


@pytest.mark.parametrize(("optim", "each"), [("adamw_torch", 8), ("paged_adamw_8bit", 2), ("paged_adamw_32bit", 8)])
def test_moments_of_8_bits_have_two_bytes_and_their_scales(optim, each):
    """A scale for 256 entries; paged ones are counted as if they stayed on the GPU."""
    recipe, arguments = recipe_of("model.adapter={r: 4, target_modules: all-linear}", f"train.optim={optim}")
    result = footprint_of_recipe(recipe, arguments, 100, "single", 1)
    scales = 8 * -(-result.shape.trainable // 256) if optim.endswith("8bit") else 0
    assert result.kept.optimizer == each * result.shape.trainable + scales
    with pytest.raises(ConfigError, match="zero2"):
        run_of("zero2", 2, moment_bits=8)


def test_quantised_weights_have_no_estimate_where_they_are_sharded():
    """Such a run is refused, so the table has the engines that are left."""
    recipe, arguments = recipe_of("model.adapter={r: 4, target_modules: all-linear}", "model.quantization=nf4")
    assert engines_for(1, quantized=True) == ("single",) and engines_for(8, quantized=True) == ("ddp",)
    whole, _ = recipe_of("model.adapter={r: 4, target_modules: all-linear}")
    less, more = (footprint_of_recipe(one, arguments, 100, "ddp", 2).kept.weights for one in (recipe, whole))
    assert less < more
    for engine in ("fsdp2", "zero2"):
        with pytest.raises(ConfigError, match=f"quantization='nf4' is not available under {engine}.*use single or ddp"):
            footprint_of_recipe(recipe, arguments, 100, engine, 2)


# ---------------------------------------------------------------- the formulas


@pytest.fixture(scope="module")
def shape():
    return shape_of_model(ModelConfig(config={**LLAMA, "tie_word_embeddings": False}))


def test_persistent_bytes(shape):
    """Weights, sum and optimizer state of every engine in float32 and under train.bf16, from only P and N."""
    total, gpus = shape.total, 4
    expected = {  # bytes per parameter on the GPU: weights, clipped sum, optimizer
        "ddp": ((4, 4, 8), (4, 4, 8)),
        "fsdp2": ((4 / 4, 4 / 4, 8 / 4), (4 / 4, 4 / 4, 8 / 4)),
        "zero1": ((4, 4, 12 / 4), (2, 8, 12 / 4)),
        "zero2": ((4, 4 / 4, 12 / 4), (2, 4 / 4, 12 / 4)),
        "zero3": ((4 / 4, 4 / 4, 12 / 4), (2 / 4, 4 / 4, 12 / 4)),
    }
    for engine, both in expected.items():
        for bf16, factors in zip((False, True), both, strict=True):
            result = footprint(shape, run_of(engine, gpus, bf16=bf16))
            parts = (result.kept.weights, result.kept.clipped_sum, result.kept.optimizer)
            assert parts == pytest.approx([factor * total for factor in factors], abs=16), (engine, bf16)


def test_communication(shape):
    """Volumes of every engine from P, N and M: rings send (n - 1)/n of a tensor per collective."""
    total, gpus, microbatches = shape.total, 4, 3
    ring = (gpus - 1) / gpus
    expected = {  # weights, sums; in bytes per parameter, before the ring's factor
        "ddp": (0, 2 * 4),
        "fsdp2": (microbatches * 2 * 2, microbatches * 4),
        "zero1": (2, 2 * 4),
        "zero2": (2, microbatches * 4),
        "zero3": (microbatches * 2 * 2, microbatches * 4),
    }
    for engine, (weights, sums) in expected.items():
        result = footprint(shape, run_of(engine, gpus, bf16=True))
        assert result.sent.weights == pytest.approx(ring * weights * total, rel=1e-6), engine
        assert result.sent.sums == pytest.approx(ring * sums * total, rel=1e-6), engine
        assert result.seconds(1e9) == result.sent.total / 1e9
    assert footprint(shape, run_of()).sent.total == 0


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "single"])
def test_frozen_parameters_are_neither_summed_nor_optimized(engine):
    """With LoRA, sums and optimizer state scale with the adapters, weights with the model."""
    adapted = shape_of_model(ModelConfig(config=LLAMA, adapter=LORA))
    result = footprint(adapted, run_of(engine, 8))
    assert result.kept.clipped_sum <= 4.5 * adapted.trainable and result.kept.optimizer <= 12 * adapted.trainable
    assert result.sent.sums <= 3 * 8 * adapted.trainable
    assert result.kept.weights >= 4 * adapted.total // 8


@pytest.mark.parametrize("engine", ["fsdp2", "zero2", "zero3"])
def test_small_sums_are_kept_whole_and_reduced_once_per_step(engine):
    """Sums of adapters are sent once per step, those of all weights once per microbatch; one microbatch keeps none."""
    adapted, full = (shape_of_model(ModelConfig(config=LLAMA, adapter=peft)) for peft in (LORA, None))
    for shape, small in ((adapted, True), (full, False)):
        runs = (dataclasses.replace(run_of(engine, 2), num_microbatches=count) for count in (1, 4))
        once, often = (footprint(shape, run) for run in runs)
        assert often.sent.sums == (1 if small else 4) * once.sent.sums
        assert (often.kept.clipped_sum > once.kept.clipped_sum) == small
        added = often.with_whole_sums
        assert once.with_whole_sums is None and (added is None) == small
        if added is not None:  # memory is left
            assert added.sent.sums == once.sent.sums and added.sent.weights == often.sent.weights
            assert added.total == often.total + 4 * shape.trainable


def test_more_rows_cost_memory_and_save_communication(shape):
    """The parts that depend on the microbatch scale with its rows; the gathered weights with the number of them."""
    one, two = (footprint(shape, run_of("fsdp2", 4, rows=rows, num_microbatches=4 // rows)) for rows in (1, 2))
    for part in ("activations", "logits", "book"):
        assert getattr(two.passing, part) == 2 * getattr(one.passing, part), part
    assert two.sent.weights == one.sent.weights // 2


def test_checkpointing_trades_activations(shape):
    """With checkpointing blocks keep only their input, and one block is recomputed; the book does not change."""
    without, kept = (footprint(shape, run_of(checkpointing=on, head="whole")) for on in (False, True))
    assert (
        kept.passing.activations < without.passing.activations
        and without.passing.recomputed == 0 < kept.passing.recomputed
    )
    assert kept.passing.book == without.passing.book


def test_logits_of_a_head_in_chunks(shape):
    """A frozen head has no tensor of all logits; a trained one has none under checkpointing, unless it is sharded."""
    run = run_of(rows=8, tokens=2048)
    lora = shape_of_model(llama3("8B", adapter=LORA))
    chunked, whole = (footprint(lora, dataclasses.replace(run, head=head)).passing.logits for head in ("auto", "whole"))
    assert 10 * chunked < whole
    big = shape_of_model(llama3("8B"))
    kept = dataclasses.replace(run, checkpointing=True)
    by_default, alone, never = (
        footprint(big, one).passing for one in (run, kept, dataclasses.replace(kept, head="whole"))
    )
    assert by_default.logits == never.logits > 5 * alone.logits and alone.book < never.book
    for engine in ("fsdp2", "zero3"):
        assert not in_chunks(big, dataclasses.replace(kept, engine=engine, num_gpus=8))
    assert in_chunks(big, dataclasses.replace(run, head="chunks"))
    assert not in_chunks(big, dataclasses.replace(run, head="chunks", per_unit=True, rows=1))


def test_correlated_noise_keeps_a_slice_of_each_gpu_on_every_engine(shape):
    """(b - 1)·4·n/N bytes: 225 GB in all for 8 thousand million parameters and 8 bands."""
    for engine in ENGINES:
        gpus = 1 if engine == "single" else 8
        without, stored = (footprint(shape, run_of(engine, gpus, noise_tensors=count)) for count in (0, 7))
        assert without.kept.noise == 0
        assert stored.kept.noise == 7 * -(-4 * shape.trainable // gpus) == stored.total - without.total
        assert "noise of earlier steps, if it is stored" not in dict(footprint_rows(without))
        assert "noise of earlier steps, if it is stored" in dict(footprint_rows(stored))


@pytest.mark.parametrize(
    ("memory", "noise", "count"),
    [
        ("auto", "independent", 0),
        ("auto", {"kind": "banded", "bands": 8}, 8),
        ("auto", {"kind": "banded", "bands": 8, "strategy": "free"}, 7),
        ("stored", {"kind": "banded", "bands": 8, "strategy": "geometric", "ratio": 0.98}, 8),
        ("regenerated", {"kind": "banded", "bands": 8}, 0),
        ("stored", {"kind": "banded", "bands": "auto"}, 16),
    ],
)
def test_a_recipe_s_noise_is_counted_where_it_is_stored(memory, noise, count):
    """From the recipe before the bands are chosen, and from the plan afterwards."""
    overrides = [f"noise_memory={memory}", f"privacy.noise={json.dumps(noise)}"]
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", overrides)
    arguments = training_arguments({**recipe.train, "use_cpu": True, "bf16": False, "tf32": None})
    assert footprint_of_recipe(recipe, arguments, 1024, "ddp", 2).run.noise_tensors == count
    if noise == {"kind": "banded", "bands": "auto"}:
        return
    privacy = dataclasses.replace(recipe.privacy, noise_multiplier=1.0, epsilon=None)
    plan = make_plan(privacy, num_units=250_000, num_steps=40, workload=Workload.released([1.0] * 40))
    planned = footprint_of_recipe(recipe, arguments, plan, "ddp", 2).run.noise_tensors
    assert planned == count


def test_total_holds_every_moment(shape):
    """The total is the persistent part and the largest moment, so no moment exceeds it."""
    for engine in ENGINES:
        result = footprint(shape, run_of(engine, 1 if engine == "single" else 8, checkpointing=True))
        for moment in (
            result.passing.activations + result.passing.logits,
            result.passing.book + result.passing.forming,
            result.passing.update,
        ):
            assert result.kept.total + moment <= result.total


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "fsdp"}, "engine must be one of .* did you mean 'fsdp2'"),
        ({"engine": "single", "num_gpus": 2}, "single uses 1 GPU"),
        ({"engine": "ddp", "num_gpus": 0}, "num_gpus must be at least 1"),
        ({"engine": "ddp", "tokens": 0}, "tokens must be at least 1"),
        ({"engine": "fsdp2", "per_unit": True}, "per_unit needs whole parameters"),
    ],
)
def test_run_refuses(changes, message):
    """Numbers that do not fit the engine are named."""
    with pytest.raises(ConfigError, match=message):
        run_of(**changes)


# ------------------------------------------------------------------- a recipe


def recipe_of(*overrides):
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", overrides)
    return recipe, training_arguments({**recipe.train, "report_to": "none"})


def test_recipe():
    """The quickstart: rows, tokens and microbatches are the recipe's; nothing is loaded."""
    recipe, arguments = recipe_of()
    result = footprint_of_recipe(recipe, arguments, recipe.privacy.expected_batch_size, "ddp", 2)
    assert (result.run.rows, result.run.tokens, result.run.num_microbatches) == (32, 48, 16)
    assert (result.run.bf16, result.run.checkpointing, result.shape.head.vocabulary) == (False, False, 4096)
    rows = dict(footprint_rows(result))
    assert rows["total, at most"] == format_bytes(result.total)
    assert rows["nature of these numbers"] == "computed by dpllm.planning.footprint, not measured"
    numbers = result.to_dict()
    assert numbers["total"] == result.total and numbers["engine"] == "ddp"
    keys = "engine num_gpus num_microbatches weights clipped_sum optimizer noise average gathered activations"
    rest = "recomputed logits book forming update weights_sent sums_sent persistent total sent"
    assert list(numbers) == f"{keys} {rest}".split()
    assert numbers["persistent"] + result.passing.peak == numbers["total"]


def test_one_unit_at_a_time_holds_its_gradient_in_place_of_the_book():
    """A microbatch has one unit; a user's rows in several calls are summed in float32."""
    recipe, arguments = recipe_of("privacy.gradients=per_unit")
    result = footprint_of_recipe(recipe, arguments, 2048, "ddp", 2)
    assert (result.run.rows, result.run.num_microbatches) == (1, 1024)
    assert result.passing.book == 4 * result.shape.trainable
    together = footprint_of_recipe(*recipe_of(), 2048, "ddp", 2)
    assert result.passing.activations < together.passing.activations and result.kept == together.kept
    assert "gradient of one unit" in dict(footprint_rows(result)) and "the book" not in dict(footprint_rows(result))
    several = footprint(result.shape, dataclasses.replace(result.run, unit_rows=3))
    assert several.passing.book == 8 * result.shape.trainable
    assert engines_for(8, per_unit=True) == ("ddp", "zero1", "zero2")
    assert engines_for(1, per_unit=True) == ("single",)


def test_engines_side_by_side():
    """Every engine that makes sense has a column, in one unit, with the numbers that it has by itself."""
    recipe, arguments = recipe_of()
    assert engines_for(1) == ("single",)
    assert set(engines_for(16)) == set(ENGINES) - {"single"} == {*engines_for(8)}
    results = [footprint_of_recipe(recipe, arguments, 2048, engine, 16) for engine in engines_for(16)]
    unit, (head, *rows) = comparison_rows(results)
    assert unit == "MB" and head == ("", *engines_for(16))
    numbers = {name: values for name, *values in rows}
    assert numbers["total, at most"] == [f"{result.total / 1e6:,.1f}" for result in results]
    assert setting_of(results[0]) == setting_of(results[1])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_recipe_of_a_model_by_name(tmp_path):
    """Llama 3 8B with LoRA from a folder with only config.json: precision and checkpointing are the recipe's."""
    settings = dict(llama3("8B").config)
    AutoConfig.for_model(settings.pop("model_type"), **settings).save_pretrained(tmp_path)
    recipe = load_recipe(ROOT / "recipes/llama3_8b_chat_lora.yaml", [f"model.name={tmp_path}"])
    arguments = training_arguments({**recipe.train, "report_to": "none", "use_cpu": True})
    result = footprint_of_recipe(recipe, arguments, recipe.privacy.expected_batch_size, "fsdp2", 8)
    assert (result.run.rows, result.run.tokens, result.run.num_microbatches) == (8, 1024, 16)
    assert result.run.bf16 and result.run.checkpointing
    assert result.shape.frozen == 8_030_261_248 and result.shape.dtype_bytes == 2
    assert result.kept.weights == -(-(2 * result.shape.frozen + 4 * result.shape.trainable) // 8)


def test_recipe_with_microbatches_by_tokens():
    """B is the number of longest rows within the budget; if it is found on the GPU, the rows replace it."""
    for budget, expected in (("40", 1), ("4096", 4096 // 48), ("auto", 32)):
        recipe, arguments = recipe_of(f"microbatch.tokens={budget}")
        assert footprint_of_recipe(recipe, arguments, 100, "single", 1).run.rows == expected


def test_recipe_of_users():
    """A user's rows go through the model in several passes; at most one gradient is held in between."""
    user = ("data.columns.unit=author", "privacy.max_rows_per_unit=50")
    recipe, arguments = recipe_of(*user)
    result = footprint_of_recipe(recipe, arguments, 100, "fsdp2", 8)
    rows = arguments.per_device_train_batch_size
    assert (result.run.rows, result.run.unit_rows) == (rows, 50)
    assert result.run.num_microbatches == -(-100 * 50 // (8 * rows))
    alone = dataclasses.replace(result.run, unit_rows=1)
    held = result.passing.book - footprint(result.shape, alone).passing.book
    assert 0 < held <= 4 * result.shape.trainable
    singly, _ = recipe_of(*user, "privacy.sampling=example")
    assert footprint_of_recipe(singly, arguments, 100, "fsdp2", 8).run.unit_rows == 1


def test_recipe_refuses_an_unknown_optimizer():
    """Memory of an optimizer that is not AdamW would be a guess."""
    recipe, arguments = recipe_of("train.optim=adafactor")
    with pytest.raises(ConfigError, match=r"train\.optim=adafactor"):
        footprint_of_recipe(recipe, arguments, 100, "ddp", 8)
    with pytest.raises(ConfigError, match="num_gpus"):
        footprint_of_recipe(*recipe_of(), 100, "ddp", 0)


# ------------------------------------------------------------ docs/tutorials/several_processes.md

SCALE = [
    ("8B", "full", 8, ("fsdp2", "zero3")),
    ("70B", "LoRA", 8, ("fsdp2", "zero3")),
    ("70B", "full", 64, ("fsdp2", "zero3")),
    ("405B", "LoRA", 64, ("fsdp2", "zero3")),
]
BATCH, TOKENS, USABLE = 1024, 2048, 0.9


def scale_table():
    """Return the table of docs/tutorials/several_processes.md, in Markdown."""
    names = ["model", "GPUs", "engine", "weights", "sum", "optimizer", "book", "**total**", "80 GiB", "141 GB"]
    names += ["sent per step", "with whole sums"]
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for size, mode, gpus, engines in SCALE:
        shape = shape_of_model(
            llama3(size, adapter={"r": 16, "target_modules": "all-linear"} if mode == "LoRA" else None)
        )
        for engine in engines:
            run = Run(
                engine=engine,
                num_gpus=gpus,
                rows=1,
                tokens=TOKENS,
                num_microbatches=BATCH // gpus,
                checkpointing=True,
                bf16=True,
            )
            result = footprint(shape, run)
            cells, numbers = [f"{size} {mode}", str(gpus), engine], result.to_dict()
            parts = ("weights", "clipped_sum", "optimizer", "book")
            cells += [f"{numbers[part] / 1e9:.1f}" for part in parts]
            cells += [f"**{result.total / 1e9:.1f}**"]
            cells += ["yes" if result.total <= USABLE * room else "no" for room in (80 * 2**30, 141e9)]
            cells += [
                f"{result.sent.total / 1e12:.2f} TB",
                f"{(result.with_whole_sums or result).sent.total / 1e12:.2f} TB",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_table_of_the_readme():
    """The table in docs/tutorials/several_processes.md matches the formulas."""
    assert scale_table() in (ROOT / "docs/tutorials/several_processes.md").read_text(encoding="utf-8"), (
        "run python -m tests.planning.test_footprint and put its output into docs/tutorials/several_processes.md"
    )


if __name__ == "__main__":
    print(scale_table())


@pytest.mark.parametrize("engine", ENGINES)
def test_an_average_costs_four_bytes_per_trained_parameter_sharded_as_the_optimizer_is(engine):
    """While it is shown, the weights that it replaces are kept: a phase of its own, which may be the peak."""
    shape = shape_of_model(ModelConfig(config=LLAMA))
    gpus = 1 if engine == "single" else 16
    settings = {"engine": engine, "num_gpus": gpus, "rows": 1, "tokens": 1, "num_microbatches": 1}
    plain, averaged = (
        footprint(shape, Run(**settings, checkpointing=True, bf16=False, averaged=kept)) for kept in (False, True)
    )
    parts = {"single": 1, "ddp": 1}.get(engine, gpus)
    assert averaged.kept.average == -(-4 * shape.trainable // parts) and plain.kept.average == 0
    assert averaged.total >= plain.total + averaged.kept.average
    if not averaged.run.is_deepspeed:
        assert averaged.total >= averaged.kept.total + -(-4 * shape.trainable // parts)


def test_a_recipe_with_an_average_is_counted_with_it(recipe_path=ROOT / "recipes/quickstart.yaml"):
    """By its ``train`` section; the comparison has a row for it only then."""
    rows_of = {}
    for override in (["train.average=null"], []):
        recipe = load_recipe(recipe_path, override)
        arguments = training_arguments({**recipe.train, "use_cpu": True, "bf16": False})
        found = footprint_of_recipe(recipe, arguments, 64, "ddp", 2)
        rows_of[not override] = found.kept.average, [row[0] for row in comparison_rows([found])[1]]
    assert rows_of[False][0] == 0 and "average of the weights" not in rows_of[False][1]
    assert rows_of[True][0] == 4 * found.shape.trainable and "average of the weights" in rows_of[True][1]


@pytest.mark.parametrize("engine", ["single", "fsdp2", "zero2"])
def test_moments_of_a_corrected_adamw_are_float32_for_weights_in_16_bits_too(engine):
    """DeepSpeed's, and FSDP2's of weights in bfloat16 computation, are anyway."""
    shape = shape_of_model(ModelConfig(config=LLAMA, dtype="bfloat16"))
    gpus = 1 if engine == "single" else 4
    plain, corrected = (footprint(shape, run_of(engine, gpus, bf16=True, corrected=one)) for one in (False, True))
    more = 4 * shape.trainable if engine == "single" else 0
    assert corrected.kept.optimizer - plain.kept.optimizer == more
