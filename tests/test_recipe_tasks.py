"""A recipe of each task with a head runs from its records to a saved model and its report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from dpllm.config import TASKS, load_recipe
from dpllm.data.rows import train_tokenizer
from dpllm.training import finetune
from tests.tiers import deep_case

TEXT = "the quick brown fox jumps over the lazy dog"
BERT = {
    **{"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 16, "max_position_embeddings": 64},
}
LORA = {"r": 2, "target_modules": "all-linear"}
RECORDS = {
    "multi_label_classification": {"text": TEXT, "label": [0, 2]},
    "regression": {"text": TEXT, "label": 0.5},
    "token_classification": {"words": TEXT.split(), "tags": [0, 1, 2] * 3},
    "question_answering": {
        "question": "what jumps?",
        "context": TEXT,
        "answers": {"text": ["fox"], "answer_start": [TEXT.index("fox")]},
    },
}
CLASSES, NAMED = ["red", "green", "blue"], ("multi_label_classification", "token_classification")
METRIC = dict.fromkeys(RECORDS, "accuracy") | {"regression": "mean squared error"}


def recipe_of(folder: Path, task: str, record: dict, more: dict) -> Path:
    """Write the records, a tokenizer and a recipe."""
    train_tokenizer([TEXT] * 3, vocab_size=300, max_length=64).save_pretrained(folder / "tokenizer")
    (folder / "data.jsonl").write_text("\n".join([json.dumps(record)] * 24), encoding="utf-8")
    size = {"num_labels": 1} if task == "regression" else {}
    names = {"class_names": CLASSES} if task in NAMED else {}
    recipe = {
        "model": {"config": BERT, "task": task, "tokenizer": str(folder / "tokenizer"), **size, **more},
        "data": {
            **{"path": str(folder / "data.jsonl"), "format": TASKS[task].formats[0], "max_length": 40},
            **{"eval": 0.25, **names},
        },
        "privacy": {"clip_norm": 1.0, "expected_batch_size": 6, "noise_multiplier": 1.0, "delta": 1e-3},
        "train": {
            **{"output_dir": str(folder / "out"), "max_steps": 2, "use_cpu": True, "disable_tqdm": True},
            **{"learning_rate": 1e-3, "per_device_train_batch_size": 4},
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return folder / "recipe.yaml"


@pytest.mark.parametrize(
    ("task", "peft"),
    [
        ("token_classification", LORA),
        *(
            deep_case(task, peft)
            for task in RECORDS
            for peft in (None, LORA)
            if (task, peft) != ("token_classification", LORA)
        ),
    ],
    ids=str,
)
def test_a_recipe_with_a_head_runs_to_its_report(tmp_path, capsys, task, peft):
    """Held-out records are measured by the metric of the task, and the saved model has the head."""
    path = recipe_of(tmp_path, task, RECORDS[task], {"adapter": peft})
    finetune.run(load_recipe(path))
    output, printed = tmp_path / "out", capsys.readouterr().out
    assert re.search(rf"held-out {METRIC[task]} +[\d.e+-]+ → [\d.e+-]+\n", printed) and "ε = " in printed
    report = json.loads((output / "privacy_report.json").read_text(encoding="utf-8"))
    assert list(report["utility"]) == ["hardware"] and "evaluation on private rows" in json.dumps(report)
    kept = json.loads((output / "not_for_release" / "utility.json").read_text(encoding="utf-8"))
    assert list(kept) == report["utility_elsewhere"] and f"held-out {METRIC[task]} after" in kept
    assert not [point for point in report["open_points"] if "written out" in point]
    card = (output / "README.md").read_text(encoding="utf-8")
    assert f"pipeline_tag: {TASKS[task].pipeline_tag}" in card and TASKS[task].auto_class in card
    if peft is None:
        model = getattr(transformers, TASKS[task].auto_class).from_pretrained(output)
        assert model.config.problem_type == TASKS[task].problem_type
    else:
        assert (output / "adapter_model.safetensors").stat().st_size > 0
    if task in NAMED and peft is None:  # the released model answers with the names that the recipe gives
        config = json.loads((output / "config.json").read_text("utf-8"))
        assert list(config["id2label"].values()) == CLASSES and config["label2id"] == {"red": 0, "green": 1, "blue": 2}


@pytest.mark.deep
def test_a_format_without_the_labels_of_the_task_is_refused(tmp_path):
    """A text has no class for each word."""
    path = recipe_of(tmp_path, "token_classification", RECORDS["token_classification"], {})
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps({"text": TEXT})] * 24), encoding="utf-8")
    with pytest.raises(ValueError, match=r"model\.task='token_classification"):
        finetune.run(load_recipe(path, ["data.format=text"]))
