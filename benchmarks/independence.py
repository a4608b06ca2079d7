"""Measure how closely single rows agree with rows in a batch, and the cost of this check.

    python benchmarks/independence.py                      # every model family and PEFT variant that can be built
    python benchmarks/independence.py --only families --json independence.json

Each model is built at toy size with random weights and goes through the first check of a `PrivateRun`
(`dpllm.training.checks.independence`). The columns are the largest relative differences of a row's loss and of its
gradient norm between the row alone and in company. A family that `GhostClipper` refuses, or that cannot be built at toy
size, is listed and not counted.

sound     architectures for causal language modelling, sequence-to-sequence and classification, and PEFT variants
coupled   models, losses and padding through which rows depend on each other; the smallest difference is printed
cost      a run of 100 steps, which has eight checks: rows and tokens that go through the model for them beside those of
          the steps, and the processor's time, for the models in `SETTINGS`; from one first check, three later ones and
          some steps
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification
from transformers.models.auto import modeling_auto as auto

from dpllm import PrivacyPlan, PrivateRun, TrainingRows, per_sequence_loss
from dpllm.data.rows import RowCollator
from dpllm.data.units import UnitIndex
from dpllm.ghost import GhostError
from dpllm.models.losses import classification_loss, seq2seq_loss
from dpllm.training.checks.independence import IndependenceError
from tests.memory_ledger import MemoryLedger

VOCABULARY, LARGEST = 96, 3_000_000
TINY = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "dim", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "hidden_dim", "linear_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": VOCABULARY,
    "num_labels": 2,
    "is_decoder": None,
}
TASKS = {
    "causal_lm": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM),
    "seq2seq_lm": (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, AutoModelForSeq2SeqLM),
    "sequence_classification": (
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        AutoModelForSequenceClassification,
    ),
}
COUPLED_FAMILIES = ("xlnet", "fnet", "funnel", "yoso", "canine", "convbert", "nystromformer")
"""Classifiers that read padding: refused rightly."""


@dataclass(frozen=True)
class Measured:
    """The result for one model.

    Attributes:
        name: of the family or variant.
        task: its task.
        loss: largest relative difference.
        norm: likewise.
        outcome: "sound", "refused", or why it does not count.
    """

    name: str
    task: str
    loss: float = 0.0
    norm: float = 0.0
    outcome: str = "sound"


def plan_of(rows: int, batch: int) -> PrivacyPlan:
    return PrivacyPlan.untruncated(rows, batch, num_steps=10_000, noise_multiplier=1.0, clip_norm=1.0, delta=1e-6)


def rows_of(
    task: str, count: int = 24, longest: int = 20, max_rows: int = 8, shortest: int = 3, padding_side: str = "right"
) -> TrainingRows:
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(count):
        ids = rng.integers(4, VOCABULARY, int(rng.integers(shortest, longest + 1))).tolist()
        labels: Any = int(rng.integers(0, 2)) if task == "sequence_classification" else ids
        examples.append({"input_ids": ids, "labels": labels})
    return TrainingRows(
        units=UnitIndex.one_row_per_unit(count),
        lengths=np.array([len(example["input_ids"]) for example in examples]),
        fetch=lambda numbers: [examples[int(number)] for number in numbers],
        collate=RowCollator(pad_token_id=0, task=task),
        max_rows=max_rows,
        padding_side=padding_side,
    )


def loss_of(task: str) -> Callable:
    rule = {"causal_lm": per_sequence_loss, "seq2seq_lm": seq2seq_loss, "sequence_classification": classification_loss}

    def loss(model: Any, inputs: Any) -> Tensor:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        if task == "seq2seq_lm":
            inputs["decoder_input_ids"] = nn.functional.pad(labels.clamp_min(0)[:, :-1], (1, 0))
        return rule[task](model(**inputs).logits, labels)

    return loss


def measure(
    name: str, task: str, model: nn.Module, rows: TrainingRows | None = None, loss: Callable | None = None
) -> Measured:
    """Run the first check of a model."""
    model.train()
    used = rows or rows_of(task)
    try:
        (loss or loss_of(task))(model, used.collate(used.fetch(np.arange(4)))).sum().backward()
    except Exception as error:  # the code of each family, of which some cannot be called so, or at this size
        return Measured(name, task, outcome=f"did not run: {type(error).__name__}: {error}"[:160])
    model.zero_grad()
    run = PrivateRun(plan_of(used.units.num_units, 8), used, MemoryLedger())
    try:
        run.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))
    except ValueError as error:
        return Measured(name, task, outcome=f"not clipped: {error}"[:160])
    loss = loss or loss_of(task)
    outcome = "sound"
    try:
        run._check_rows(run._attached, loss, None)
    except IndependenceError as error:
        outcome = f"refused: {error}"[:160]
    except GhostError as error:
        outcome = f"not clipped: {error}"[:160]
    except Exception as error:  # the first row may be too short for the family by itself
        if type(error).__module__.startswith("dpllm"):
            raise
        outcome = f"did not run: {type(error).__name__}: {error}"[:160]
    finally:
        seen = run.row_differences
        run.detach()
    if seen is None:
        return Measured(name, task, outcome=outcome)
    return Measured(name, task, seen.loss, seen.norm, outcome)


def tiny_config(kind: str) -> Any:
    """A configuration of this type at toy size; keys that it does not know are left out."""
    plain = AutoConfig.for_model(kind)
    known = {*plain.to_dict(), *plain.attribute_map}
    changes = {key: value for key, value in TINY.items() if key in known and value is not None}
    for key in ("layer_types", "block_types", "attention_types", "mlp_layer_types"):
        if isinstance(getattr(plain, key, None), list):
            changes[key] = list(getattr(plain, key))[:2]
    if kind == "gpt_neo":
        changes["attention_types"] = [[["global", "local"], 1]]
    if "num_labels" in changes:
        changes.pop("num_labels")
    return AutoConfig.for_model(kind, **changes)


def families(task: str) -> Iterator[Measured]:
    """Every family of a task that can be built."""
    names, factory = TASKS[task]
    for kind in sorted(names):
        try:
            config = tiny_config(kind)
            if task == "causal_lm" and getattr(config, "is_decoder", None) is False:
                config.is_decoder = True
            with torch.device("meta"):
                size = sum(p.numel() for p in factory.from_config(config).parameters())
            if size > LARGEST:
                yield Measured(kind, task, outcome=f"not built: {size} parameters at toy size")
                continue
            torch.manual_seed(0)
            model = factory.from_config(config)
        except Exception as error:  # each family's own code, with sizes that some do not allow
            yield Measured(kind, task, outcome=f"not built: {type(error).__name__}: {error}"[:160])
            continue
        yield measure(kind, task, model)


def variants() -> Iterator[Measured]:
    """PEFT variants on a small Llama."""
    target, common = ["q_proj", "v_proj"], {"task_type": "CAUSAL_LM"}
    lora = {"r": 4, "target_modules": target, **common}
    made: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: peft.LoraConfig(**lora),
        "LoRA with dropout": lambda: peft.LoraConfig(**lora, lora_dropout=0.3),
        "LoRA, all linear": lambda: peft.LoraConfig(r=4, target_modules="all-linear", **common),
        "LoRA, embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], **common),
        "LoRA, biases": lambda: peft.LoraConfig(**lora, bias="lora_only"),
        "LoRA, gaussian": lambda: peft.LoraConfig(**lora, init_lora_weights="gaussian"),
        "LoRA, PiSSA": lambda: peft.LoraConfig(**lora, init_lora_weights="pissa"),
        "LoRA, OLoRA": lambda: peft.LoraConfig(**lora, init_lora_weights="olora"),
        "LoRA, modules to save": lambda: peft.LoraConfig(**lora, modules_to_save=["lm_head"]),
        "LoRA, rank pattern": lambda: peft.LoraConfig(**lora, rank_pattern={"q_proj": 2}),
        "LoRA, layer replication": lambda: peft.LoraConfig(**lora, layer_replication=[(0, 2), (1, 2)]),
        "DoRA": lambda: peft.LoraConfig(**lora, use_dora=True),
        "rsLoRA": lambda: peft.LoraConfig(**lora, use_rslora=True),
        "rsLoRA with DoRA": lambda: peft.LoraConfig(**lora, use_rslora=True, use_dora=True),
        "IA3": lambda: peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **common
        ),
        "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], **common),
        "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=100, target_modules=target, **common),
        "OFT": lambda: peft.OFTConfig(oft_block_size=4, target_modules=target, use_cayley_neumann=False, **common),
        "OFT, Cayley-Neumann": lambda: peft.OFTConfig(oft_block_size=4, target_modules=target, **common),
        "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=target, **common),
        "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=target, **common),
        "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=target, **common),
        "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=target, **common),
        "HRA": lambda: peft.HRAConfig(r=4, target_modules=target, **common),
        "VB-LoRA": lambda: peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=8, target_modules=target, **common),
        "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], **common),
        "Bone": lambda: peft.BoneConfig(r=4, target_modules=target, **common),
        "MiSS": lambda: peft.MissConfig(r=4, target_modules=target, **common),
        "C3A": lambda: peft.C3AConfig(block_size=8, target_modules=target, **common),
        "RandLoRA": lambda: peft.RandLoraConfig(r=4, target_modules=target, **common),
        "SHiRA": lambda: peft.ShiraConfig(r=4, target_modules=target, **common),
        "RoAd": lambda: peft.RoadConfig(variant="road_1", group_size=8, target_modules=target, **common),
        "DeLoRA": lambda: peft.DeloraConfig(r=4, target_modules=target, **common),
        "WaveFT": lambda: peft.WaveFTConfig(n_frequency=20, target_modules=target, **common),
        "GraLoRA": lambda: peft.GraloraConfig(r=4, gralora_k=2, target_modules=target, **common),
        "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[4, 5, 6], **common),
        "poly": lambda: peft.PolyConfig(r=4, target_modules=target, **common),
        "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **common),
        "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **common),
        "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **common),
    }
    for name, make in made.items():
        try:
            torch.manual_seed(0)
            base = AutoModelForCausalLM.from_config(tiny_config("llama"))
            model = peft.get_peft_model(base, make())
            for parameter in model.parameters():  # away from starts at which the adapter does nothing
                if parameter.requires_grad:
                    parameter.data += 0.02 * torch.randn_like(parameter)
        except Exception as error:  # each variant's own code: some need other modules or packages
            yield Measured(name, "peft", outcome=f"not built: {type(error).__name__}: {error}"[:160])
            continue
        yield measure(name, "peft", model, rows_of("causal_lm"), loss_of("causal_lm"))


def couplings() -> Iterator[Measured]:
    """Models, losses and padding through which rows depend on each other."""
    causal = loss_of("causal_lm")

    def model(kind: str = "llama", **changes: Any) -> nn.Module:
        torch.manual_seed(0)
        config = tiny_config(kind)
        config.update(changes)
        factory = AutoModelForSequenceClassification if changes else AutoModelForCausalLM
        return factory.from_config(config)

    def targets(net: Any, inputs: Any) -> Tensor:
        count_B = (inputs["labels"] != -100).sum(1)
        return causal(net, inputs) * count_B / count_B.sum()

    def detached(net: Any, inputs: Any) -> Tensor:
        loss_B = causal(net, inputs)
        return loss_B * (loss_B / loss_B.mean()).detach()

    classify, rows = loss_of("sequence_classification"), rows_of("sequence_classification")
    yield measure("llama, another pad id", "coupled", model(pad_token_id=3), rows, classify)
    yield measure("loss over the batch's targets", "coupled", model(), rows_of("causal_lm"), targets)
    yield measure("weights of detached statistics", "coupled", model(), rows_of("causal_lm"), detached)
    left = rows_of("causal_lm", padding_side="left")
    yield measure("left padding (gpt2)", "coupled", model("gpt2"), left, causal)


@dataclass(frozen=True)
class Setting:
    """The setting of a cost measurement.

    Attributes:
        model: makes it.
        batch: expected rows of a step.
        lengths: tokens of the shortest and the longest row.
        rows: of a microbatch.
        steps: without a check that are measured.
    """

    model: Callable[[], nn.Module]
    batch: int
    lengths: tuple[int, int]
    rows: int = 16
    steps: int = 1


def toy() -> nn.Module:
    """Two layers of 32 features."""
    return AutoModelForCausalLM.from_config(tiny_config("llama"))


def stories() -> nn.Module:
    """The shape of stories15M, with random weights."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 6}
    sizes = {"vocab_size": 32_000, "hidden_size": 288, "intermediate_size": 768, "max_position_embeddings": 256}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=True))


def stories_lora() -> nn.Module:
    """The same with LoRA of rank 8 on its attention."""
    target = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return peft.get_peft_model(stories(), peft.LoraConfig(r=8, target_modules=target, task_type="CAUSAL_LM"))


SETTINGS = {
    "toy, b = 64": Setting(toy, 64, (3, 48), steps=25),
    "toy, b = 256": Setting(toy, 256, (3, 48), steps=25),
    "stories15M, b = 256": Setting(stories, 256, (64, 128)),
    "stories15M with LoRA, b = 256": Setting(stories_lora, 256, (64, 128)),
}


@dataclass(frozen=True)
class Cost:
    """Return the cost of the checks of a run of 100 steps, as shares of the cost of its steps.

    Attributes:
        name: of the setting.
        rows: row passes.
        tokens: likewise, with padding.
        time: of the processor.
        first: seconds of the first check.
        later: seconds of a later one.
        step: seconds of a step.
    """

    name: str
    rows: float
    tokens: float
    time: float
    first: float
    later: float
    step: float


def cost(name: str) -> Cost:
    """Measure the checks and the steps of a run."""
    setting = SETTINGS[name]
    torch.manual_seed(0)
    model = setting.model().train()
    shortest, longest = setting.lengths
    rows = rows_of("causal_lm", 8 * setting.batch, longest=longest, max_rows=setting.rows, shortest=shortest)
    run = PrivateRun(plan_of(8 * setting.batch, setting.batch), rows, MemoryLedger())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run.attach(model, optimizer)
    loss, passed = loss_of("causal_lm"), np.zeros(2)  # rows and tokens

    def counted(net: Any, inputs: Any) -> Tensor:
        passed[:] += inputs["input_ids"].shape[0], inputs["input_ids"].numel()
        return loss(net, inputs)

    def measured(act: Callable[[], Any], already: int) -> np.ndarray:
        """Return the cost of the check after this many steps."""
        assert run._attached.independence is not None
        run._attached.independence._steps = already
        before, start = passed.copy(), time.process_time()
        act()
        seconds = time.process_time() - start
        return np.array([*(passed - before), seconds])

    def step() -> None:
        run.step(next(run.draws(1)), counted)
        optimizer.step()
        optimizer.zero_grad()

    first = measured(lambda: run._check_rows(run._attached, counted, None), 0)
    later = np.mean(
        [measured(lambda: run._check_rows(run._attached, counted, None), 1) for _ in range(3)],
        axis=0,
    )
    plain = np.median([measured(step, 4) for _ in range(setting.steps)], axis=0)
    run.detach()
    shares = (first + 7 * later) / (100 * plain)
    return Cost(name, *map(float, shares), float(first[2]), float(later[2]), float(plain[2]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("families", "peft", "coupled", "cost"), nargs="*")
    parser.add_argument("--setting", choices=SETTINGS, nargs="*", default=list(SETTINGS), help="for the cost")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    wanted = options.only or ["families", "peft", "coupled", "cost"]
    warnings.simplefilter("ignore")
    found: list[Measured] = []
    sources: dict[str, list[Iterator[Measured]]] = {
        "families": [families(task) for task in TASKS],
        "peft": [variants()],
        "coupled": [couplings()],
    }
    for name, sets in sources.items():
        for one in (one for results in sets if name in wanted for one in results):
            found.append(one)
            print(f"{one.task:24} {one.name:34} {one.loss:9.1e} {one.norm:9.1e}  {one.outcome}", flush=True)
    if found:
        summarise(found)
    costs = []
    for name in options.setting if "cost" in wanted else []:
        one = cost(name)
        costs.append(one)
        print(
            f"{name}: {one.rows:.2%} of rows, {one.tokens:.2%} of tokens, {one.time:.2%} of the time "
            f"(first check {one.first:.2f} s, later {one.later:.2f} s, step {one.step:.2f} s)",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"models": list(map(asdict, found)), "cost": list(map(asdict, costs))}))


def summarise(found: list[Measured]) -> None:
    """Print how many are sound, and the largest and smallest differences.

    A classifier that is known to read padding counts as coupled also where its random weights are too small to show it.
    """
    coupled = [one for one in found if one.task == "sequence_classification" and one.name in COUPLED_FAMILIES]
    sound = [one for one in found if one.outcome == "sound" and one.task != "coupled" and one not in coupled]
    names = sorted({one.name for one in sound if one.task != "peft"})
    adapters = [one.name for one in sound if one.task == "peft"]
    print(f"\n{len(sound)} sound: {len(names)} model families, {len(adapters)} PEFT variants")
    print("families:", ", ".join(names))
    print("PEFT:", ", ".join(adapters))
    if sound:
        print(f"largest difference: loss {max(o.loss for o in sound):.1e}, norm {max(o.norm for o in sound):.1e}")
    print("coupled, and not seen at this size:", ", ".join(o.name for o in coupled if o.outcome == "sound") or "none")
    refused = [one for one in found if one.outcome.startswith("refused")]
    print("refused:", ", ".join(f"{one.name} ({one.task})" for one in refused))
    measured = [max(one.loss, one.norm) for one in refused if max(one.loss, one.norm) > 0]
    if measured:
        print(f"smallest difference of a refused one: {min(measured):.1e}")


if __name__ == "__main__":
    main()
