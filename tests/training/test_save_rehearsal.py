"""What only a save, a load or a generated token finds out is found before a run is charged (real weights)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    TrainingArguments,
)
from typer.testing import CliRunner

from dpllm import DPTrainer, PrivacyConfig
from dpllm.cli.program import app
from dpllm.config import ConfigError
from dpllm.models.generation import load_generator
from dpllm.models.load import changes_of_base, load_adapter
from dpllm.models.losses import END, START
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.report.verify import verify
from dpllm.training import finetune, save_rehearsal
from tests.mutations import kills
from tests.tiers import SHARED, needs_shared_data

pytestmark = [
    needs_shared_data,
    pytest.mark.usefixtures("rows_not_compared"),
    # Of transformers and PEFT, about embeddings with added tokens
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
NAMES = {0: "no", 1: 'yes, "surely"', 2: "not  said"}
TEXTS = [f"Once upon a time there were {number} little dogs." for number in range(24)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of a small Llama, whose configuration names no padding."""
    return copy_of(tmp_path / "base")


def copy_of(folder: Path, **files: dict[str, Any]) -> Path:
    """Copy the model, with changed configuration files."""
    folder.mkdir(parents=True)
    for path in (SHARED / "stories260K").iterdir():
        shutil.copyfile(path, folder / path.name)
    for name, values in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def trainer(
    model: Any, output: Path, tokenizer: Any = None, labels: Callable[[int, list[int]], Any] | None = None, **more: Any
) -> DPTrainer:
    """A trainer of two steps on public sentences."""
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(SHARED / "stories260K")
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    for number, row in enumerate(rows):
        if labels is not None:
            row |= labels(number, row["input_ids"])
    gradients = more.pop("gradients", "ghost")
    options = {"learning_rate": 1e-2, "max_steps": 2, "save_strategy": "no", **more.pop("args", {})}
    return DPTrainer(
        model,
        TrainingArguments(output_dir=str(output), use_cpu=True, report_to="none", disable_tqdm=True, **options),
        PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=4, delta=1e-3, gradients=gradients),
        rows,
        processing_class=tokenizer,
        **more,
    )


def refused(made: DPTrainer, *words: str) -> None:
    """Training is refused with these words; nothing was charged, and nothing of the rehearsal is left."""
    with pytest.raises(ConfigError) as error:
        made.train()
    assert all(word in str(error.value) for word in words), error.value
    left = list(Path(str(made.args.output_dir)).rglob("*"))
    assert made.ledger is None and not [path for path in left if path.name == LEDGER_FILE or path.is_dir()], left


def trained(made: DPTrainer) -> Path:
    """The folder of a run that was trained and saved, and whose files verify."""
    made.train()
    made.save_model()
    folder = Path(str(made.args.output_dir))
    assert [check for check in verify(folder).checks if check.ok is False] == []
    assert not list(folder.glob(".rehearsal-*"))
    return folder


# ------------------------------------------------------- generation configurations


@pytest.mark.parametrize(
    ("published", "written"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
        ({"top_k": 10}, {"do_sample": True, "top_k": 10}),
        ({"do_sample": False, "temperature": 0.7}, {"do_sample": False}),
        ({"num_beams": 4, "temperature": 0.7, "length_penalty": 0.5}, {"num_beams": 4, "length_penalty": 0.5}),
        ({"early_stopping": True, "pad_token_id": -1, "output_scores": True}, {}),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}),
    ],
)
@kills(
    "a temperature without do_sample is not completed",
    "dpllm/models/writing.py",
    "config.do_sample = True\n",
    "pass\n",
    case="published0-written0",
)
def test_a_generation_configuration_as_published_can_be_saved(tmp_path, published, written):
    """Llama 2 and Vicuna name a temperature and no do_sample. What has an effect stays, also after the merge."""
    folder = copy_of(tmp_path / "base", generation_config=published)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    made = trainer(model, tmp_path / "run", merge_adapter=True)
    saved = json.loads((trained(made) / "merged" / "generation_config.json").read_text())
    about = {"do_sample", *published, *written} - {"pad_token_id"}
    assert {name: saved[name] for name in about if saved.get(name) not in (None, False)} == {
        name: value for name, value in written.items() if value
    }
    assert saved["pad_token_id"] == 2


def test_the_whole_model_is_saved_with_the_sampling_of_its_base(tmp_path):
    """The case of the field: full training, no padding token, temperature and top_p without do_sample."""
    folder = copy_of(tmp_path / "base", generation_config={"temperature": 0.9, "top_p": 0.6})
    made = trainer(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "run")
    saved = json.loads((trained(made) / "generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"], saved["top_p"]) == (True, 0.9, 0.6)
    assert "one token generated" in str(made.rehearsal)


# -------------------------------------------------------------- refused before a step


def with_config(name: str, value: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        setattr(model.config, name, value)
        return model

    return change


def with_generation(name: str, value: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        setattr(model.generation_config, name, value)
        return model

    return change


def shared_layers(model: Any) -> Any:
    """Two layers share their weights, and the class does not say so."""
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return model


def half_frozen(model: Any) -> Any:
    """A norm is trained beside the adapter, and PEFT saves the adapter alone."""
    model = get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM"))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_config("temperature", 0.5), ["model.config", "temperature"]),
        (with_config("note", {1, 2}), ["model.config", "set"]),
        (with_config("architecture_code", nn.Linear), ["model.config"]),
        (with_generation("max_new_tokens", -3), ["model.generation_config", "max_new_tokens"]),
        (with_generation("num_return_sequences", 3), ["model.generation_config", "num_return_sequences"]),
        (with_generation("suppress_tokens", object()), ["model.generation_config"]),
        (with_generation("cache_implementation", "no such cache"), ["model.generation_config", "cache"]),
        (shared_layers, ["share", "model.layers.0.mlp"]),
        (half_frozen, ["model.norm.weight", "modules_to_save"]),
    ],
)
@kills(
    "a model that cannot be saved is trained",
    "dpllm/training/trainer.py",
    "        self._rehearse_way_out(folder, restart.continues)\n",
    "",
    case="change-words0",
)
def test_what_a_save_would_find_is_found_before_a_charge(base, tmp_path, change, words):
    """By name, with the remedy."""
    refused(trainer(change(AutoModelForCausalLM.from_pretrained(base)), tmp_path / "run"), *words, "othing was charged")


def test_a_tokenizer_that_cannot_be_saved_or_loaded_is_refused(base, tmp_path):
    """A setting that JSON does not know; and files that make other tokens."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.init_kwargs["note"] = object()
    refused(trainer(AutoModelForCausalLM.from_pretrained(base), tmp_path / "a", tokenizer), "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(base)

    def save_pretrained(folder: str, **unused: Any) -> None:
        (Path(folder) / "tokenizer_config.json").write_text("{}")

    tokenizer.save_pretrained = save_pretrained
    refused(trainer(AutoModelForCausalLM.from_pretrained(base), tmp_path / "b", tokenizer), "tokenizer")


def test_padding_that_the_model_cannot_read_is_refused_by_its_name(base, tmp_path):
    """A token that was added to the tokenizer only; a classifier of several rows without one."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(ConfigError, match=r"padding token 512 is outside .*resize_token_embeddings"):
        trainer(AutoModelForCausalLM.from_pretrained(base), tmp_path / "a", tokenizer)

    def classifier(output: Path, **more: Any) -> DPTrainer:
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
        plain = AutoTokenizer.from_pretrained(base)
        plain.pad_token = None
        return trainer(model, output, plain, lambda number, ids: {"labels": number % 2}, args=more)

    refused(classifier(tmp_path / "b"), "model.config.pad_token_id is None")
    classifier(tmp_path / "c", per_device_train_batch_size=1).train()


def test_a_second_train_is_named_as_such(base, tmp_path):
    """Nothing else has changed the weights."""
    made = trainer(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    made.train()
    with pytest.raises(ConfigError, match=r"earlier train.* Make another trainer"):
        made.train()


def test_training_arguments_that_cannot_be_saved_are_refused(base, tmp_path):
    """They are saved beside the model."""
    made = trainer(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    made.args.note = lambda: None
    refused(made, "training arguments")


def test_a_module_of_ones_own_is_rehearsed_too(tmp_path):
    """Its weights are saved as they are: a head that shares the embedding cannot be."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(512, 8), nn.Linear(8, 512, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, input_ids: torch.Tensor, labels: Any = None, attention_mask: Any = None) -> Any:
            logits = self.head(self.embedding(input_ids))
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), input_ids, reduction="none")
            return {"loss": losses.mean(1), "logits": logits}

    def losses(outputs: Any, labels: Any) -> Any:
        return outputs["loss"]

    labelled = lambda number, ids: {"labels": ids}  # noqa: E731
    refused(trainer(Own(), tmp_path / "run", labels=labelled, compute_loss_func=losses), "share")


@pytest.mark.parametrize("place", ["a file", "no room"])
def test_a_folder_that_cannot_take_the_model_is_refused(base, tmp_path, monkeypatch, place):
    """Checkpoints count, as many as are kept."""
    made = trainer(
        AutoModelForCausalLM.from_pretrained(base),
        tmp_path / "run",
        args={"save_strategy": "steps", "save_steps": 1, "max_steps": 50, "save_total_limit": 20},
    )
    if place == "a file":
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("")
    else:
        real = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=40 * 1024**2))
    with pytest.raises(ConfigError, match="is a file" if place == "a file" else "checkpoints"):
        made.train()
    assert made.ledger is None


def test_a_name_that_the_hub_refuses(base, tmp_path):
    """Before anything is read; offline the rest is said not to be checked."""
    with pytest.raises(ConfigError, match="hub_model_id"):
        trainer(
            AutoModelForCausalLM.from_pretrained(base),
            tmp_path / "run",
            args={"push_to_hub": True, "hub_strategy": "end", "hub_model_id": "my clinic/notes"},
        )


# ------------------------------------------------------------------- no trace


@pytest.mark.parametrize("size", ["whole", "a part"])
def test_the_rehearsal_leaves_no_trace(base, tmp_path, monkeypatch, size):
    """Weights, buffers, modes and random states are as before, and no file is left; also if only a part is saved."""
    if size == "a part":
        monkeypatch.setattr(save_rehearsal, "WHOLE_UP_TO", 300_000)
    model = AutoModelForCausalLM.from_pretrained(base).train()
    model.model.layers[2].eval()
    before = {
        name: (value.clone(), value._version) for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    (tmp_path / "run").mkdir()
    tokenizer = AutoTokenizer.from_pretrained(base)
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    written = []

    def save(folder: str, state_dict: Any) -> None:
        model.save_pretrained(folder, state_dict=state_dict)
        tokenizer.save_pretrained(folder)
        written.append(sum(path.stat().st_size for path in Path(folder).iterdir()))

    words = save_rehearsal.rehearse(model, save, arguments, tokenizer)
    assert "saved, loaded, one token generated" in words
    after = {name: (value, value._version) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert all(
        torch.equal(value, after[name][0]) and after[name][1] == version for name, (value, version) in before.items()
    )
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert list((tmp_path / "run").iterdir()) == []
    assert (written[0] > 1_000_000) == (size == "whole")


# ------------------------------------------------------------- the card's own code

SNIPPETS = """
import json, re, sys, os, warnings
import torch
for folder in sys.argv[1:]:
    os.chdir(folder)
    [code] = re.findall(r"```python\\n(.*?)```", open("README.md").read(), flags=re.DOTALL)
    found = {}
    exec(code, found)
    model = found["model"].eval()
    ids = torch.tensor([[1, 5, 9, 12]])
    with torch.no_grad():
        output = model(input_ids=ids)
    first = output.logits if "logits" in output else output.start_logits
    config = model.config
    print("RESULT", json.dumps({
        "output": first.flatten().tolist(),
        "names": getattr(config, "id2label", None),
        "problem": getattr(config, "problem_type", None),
        "tokens": len(found["tokenizer"]),
    }))
"""


def of_task(auto: Any, task_type: str, base: Path, **more: Any) -> Any:
    names = more.pop("id2label", None)
    named = {"id2label": names, "label2id": {name: number for number, name in names.items()}} if names else {}
    return get_peft_model(auto.from_pretrained(base, **more, **named), LoraConfig(**LORA, task_type=task_type))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_load_by_the_code_of_their_own_card(base, tmp_path):
    """In a fresh process: head, classes, padding and added tokens are those that were trained."""
    sequences, answering = AutoModelForSequenceClassification, tmp_path / "answering"
    # Its weights have other names than those of a language model, so a folder of the latter would not do.
    LlamaForQuestionAnswering(AutoConfig.from_pretrained(base)).save_pretrained(answering)
    added = AutoTokenizer.from_pretrained(base)
    added.add_tokens(["<note>", "<end of note>"])
    longer = AutoModelForCausalLM.from_pretrained(base)
    longer.resize_token_embeddings(len(added))
    whole = {**LORA, "modules_to_save": ["embed_tokens"]}
    other_name = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(**LORA, task_type="CAUSAL_LM"), adapter_name="clinic"
    )
    models = {
        "classes": (
            of_task(sequences, "SEQ_CLS", base, num_labels=3, id2label=NAMES),
            lambda n, ids: {"labels": n % 3},
        ),
        "scores": (
            of_task(sequences, "SEQ_CLS", base, num_labels=1, problem_type="regression"),
            lambda n, ids: {"labels": n / 10},
        ),
        "several": (
            of_task(sequences, "SEQ_CLS", base, num_labels=2, problem_type="multi_label_classification"),
            lambda n, ids: {"labels": [1.0, 0.0]},
        ),
        "words": (
            of_task(AutoModelForTokenClassification, "TOKEN_CLS", base, num_labels=2),
            lambda n, ids: {"labels": [token % 2 for token in ids]},
        ),
        "answers": (
            of_task(AutoModelForQuestionAnswering, "QUESTION_ANS", answering),
            lambda n, ids: {"labels": [START, END, *[0] * (len(ids) - 2)]},
        ),
        "text": (of_task(AutoModelForCausalLM, "CAUSAL_LM", base), None),
        "added tokens": (get_peft_model(longer, LoraConfig(**whole, task_type="CAUSAL_LM")), None),
        "another name": (other_name, None),
    }
    expected, folders = [], []
    for name, (model, labels) in models.items():
        made = trainer(model, tmp_path / name, added if name == "added tokens" else None, labels)
        folder = trained(made)
        assert "saved, loaded, one" in str(made.rehearsal), (name, made.rehearsal)
        with torch.no_grad():
            output = model.eval()(input_ids=torch.tensor([[1, 5, 9, 12]]))
        expected.append((output.logits if "logits" in output else output.start_logits).flatten())
        folders.append(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", SNIPPETS, *folders],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(models), done.stderr[-3000:]
    for name, result, right in zip(models, found, expected, strict=True):
        assert torch.allclose(torch.tensor(result["output"]), right, rtol=1e-4, atol=1e-5), name
        assert result["tokens"] == (514 if name == "added tokens" else 512)
    assert {int(number): name for number, name in found[0]["names"].items()} == NAMES
    assert [found[number]["problem"] for number in (1, 2)] == ["regression", "multi_label_classification"]

    # dpllm generate: an adapter that writes text does, with its added tokens; the others are refused.
    for folder in folders[5:7]:
        assert load_generator(folder, "cpu").model is not None
    for folder in folders[:5]:
        result = CliRunner().invoke(app, ["generate", folder])
        assert result.exit_code == 2 and "cannot generate text" in result.output + result.stderr, (
            folder,
            result.output,
        )


@pytest.mark.parametrize(
    "more", [{"target_modules": "all-linear"}, {"target_modules": ["q_proj", "score"]}, {"target_modules": ["q_proj"]}]
)
def test_a_new_head_that_no_adapter_holds_is_refused(base, tmp_path, more):
    """Each load of the adapter would make another one: its predictions would be chance."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    model.save_pretrained(tmp_path / "classifier")
    adapted = get_peft_model(model, LoraConfig(r=2, **more))
    made = trainer(adapted, tmp_path / "run", labels=lambda n, ids: {"labels": n % 2})
    refused(made, "score.weight is new", "modules_to_save")
    known = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")  # its files have the head
    saved = get_peft_model(known, LoraConfig(r=2, **more))
    trained(trainer(saved, tmp_path / "saved", labels=lambda n, ids: {"labels": n % 2}))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_added_tokens_that_are_trained_alone_come_back(base, tmp_path):
    """With `trainable_token_indices` PEFT wraps the embedding, and its files name it differently."""
    longer = AutoModelForCausalLM.from_pretrained(base)
    longer.resize_token_embeddings(514)
    config = LoraConfig(**LORA, task_type="CAUSAL_LM", trainable_token_indices=[512, 513])
    model = get_peft_model(longer, config)
    assert changes_of_base(model) == ({}, 514)
    made = trainer(model, tmp_path / "run", gradients="per_unit")
    folder = trained(made)
    assert made.rehearsal == "rehearsal: saved, one token generated"
    assert "resize_token_embeddings(514" in (folder / "README.md").read_text(encoding="utf-8")
    again = load_adapter(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    ids = torch.tensor([[1, 5, 512, 513, 9]])
    with torch.no_grad():
        assert torch.allclose(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-5)


# ---------------------------------------------------------------------- no room


class Full:
    """A disk that is full until it is told otherwise: every file of weights fails, as safetensors reports it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, times: int) -> None:
        self.left, self.tried = times, 0
        real = LlamaForCausalLM.save_pretrained

        def save(model: Any, place: Any, **options: Any) -> None:
            if Path(place) == folder and self.left:
                self.left, self.tried = self.left - 1, self.tried + 1
                Path(place, "model.safetensors").write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device", str(place))
            real(model, place, **options)

        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save)


@kills(
    "a full disk at the last save ends the run",
    "dpllm/training/save_rehearsal.py",
    "if not is_full(error):",
    "if True:",
)
def test_a_full_disk_at_the_last_save_loses_nothing(base, tmp_path, monkeypatch, caplog):
    """No checkpoint, all steps charged: the run says what there is, waits for room, and then saves."""
    monkeypatch.setattr(save_rehearsal, "_PAUSE", 0.0)
    made = trainer(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    made.train()
    disk = Full(monkeypatch, tmp_path / "run", times=3)
    made.save_model()
    assert disk.tried == 3
    (told,) = [record.getMessage() for record in caplog.records if "is full" in record.getMessage()]
    assert str(tmp_path / "run") in told and "trained weights" in told
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert all(map(torch.equal, loaded.state_dict().values(), made.model.state_dict().values()))
    assert [check for check in verify(tmp_path / "run").checks if check.ok is False] == []


def test_another_failure_of_the_last_save_is_an_error(base, tmp_path, monkeypatch):
    """Waiting would not help."""
    made = trainer(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    made.train()

    def save(*unused: Any, **unused_too: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save)
    with pytest.raises(OSError, match="Input/output"):
        made.save_model()


def test_a_copy_on_another_disk_is_kept_until_there_is_room(tmp_path):
    """It is named, and removed when the files are where they belong. In memory it would not outlive the machine."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second disk")
    folder = memory / f"dpllm-test-{os.getpid()}"
    folder.mkdir()
    room, copies = threading.Event(), []
    way_out_pause = save_rehearsal._PAUSE
    try:
        save_rehearsal._PAUSE = 0.0

        def write() -> None:
            if not room.is_set():
                room.set()
                raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

        def spare(place: Path) -> None:
            (place / "weights").write_text("all of them")
            copies.append(place)

        save_rehearsal.until_there_is_room(write, folder, 1000, spare)
    finally:
        save_rehearsal._PAUSE = way_out_pause
        shutil.rmtree(folder)
    assert len(copies) == 1 and not copies[0].exists()


# --------------------------------------------------------------------- in a recipe


def test_a_recipe_says_that_it_rehearsed(base, tmp_path, capsys):
    """One line."""
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "model": {"name": str(base)},
                "data": {"path": str(records), "max_length": 32},
                "privacy": {"noise_multiplier": 1, "clip_norm": 1, "expected_batch_size": 4, "delta": 1e-3},
                "train": {"output_dir": str(tmp_path / "run"), "max_steps": 1, "use_cpu": True},
            }
        )
    )
    finetune.carry_out(recipe, [])
    assert "rehearsal: saved, loaded, one token generated" in capsys.readouterr().out
