r"""Compare the texts of private prediction at equal ε: InvisibleInk, clipped logits, and the public model by itself.

    python benchmarks/predicting.py --model stories15M --data trainset.csv --held-out devset.csv \
        --judge-model stories260K --texts 60 --json predicting.json

Each method is a run of ``dpllm methods predict`` on the same records, with the same groups of records, tokens and
temperature, so its ledger, report and ε are those of the product. Nothing is trained but the judge.

ε           as the run's ledger states it, for all texts together
clip        the bound of one record's logits that this ε allows
perplexity  of the texts under the judge: a small model trained without privacy on the same data set. Less is more like
            the data; that of real held-out texts is in the last row
3-grams     share of the texts' sequences of three words that occur in the held-out texts
distinct    share of the texts that no other text equals
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
import utility

from dpllm.methods.queries.command import run_method
from dpllm.privacy.rounding import format_epsilon

PROMPT = "Here is a description of a restaurant:"
PUBLIC = "The Green Lamp is a pub near the station. It has good food."
TOP_K = 50


def recipe_of(options: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """Return the recipe of one method; its clip follows from ε."""
    return {
        "model": {"name": str(options.model)},
        "data": {"path": str(options.data), "format": "text", "columns": {"text": options.column}, "max_length": 64},
        "privacy": {
            "epsilon": options.epsilon,
            "delta": options.delta,
            "dataset": Path(options.data).stem,
        },
        "predict": {
            "kind": kind,
            "texts": options.texts,
            "max_new_tokens": options.tokens,
            "group_size": options.group_size,
            "temperature": options.temperature,
            "top_k": TOP_K,
            "context": f"{PROMPT} {{{options.column}}}\n",
            "public_context": f"{PROMPT} {PUBLIC}\n",
            "prompts": [PROMPT],
        },
        "output_dir": str(folder),
    }


def predicted(options: argparse.Namespace, kind: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Run ``dpllm methods predict``; return its texts, and ε and clip."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe_of(options, kind, folder)), encoding="utf-8")
    with contextlib.redirect_stdout(sys.stderr):
        run_method("predict", str(file), [], as_json=False)
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    statement = json.loads((folder / "privacy_report.json").read_text(encoding="utf-8"))["statement"]
    settings = json.loads((folder / "privacy_plan.json").read_text(encoding="utf-8"))["settings"]
    clip = next(value for name, value in settings.items() if name.startswith("clip c"))
    return texts, {"epsilon": statement["epsilon"], "clip": clip}


@torch.no_grad()
def public_texts(options: argparse.Namespace) -> list[str]:
    """Return texts of the public model, which reads no record."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    prompt = tokenizer(f"{PROMPT} {PUBLIC}\n{PROMPT}", return_tensors="pt")
    sampled = model.generate(
        **prompt,
        do_sample=True,
        top_k=TOP_K,
        temperature=options.temperature,
        max_new_tokens=options.tokens,
        num_return_sequences=options.texts,
        pad_token_id=tokenizer.eos_token_id,
    )
    written = tokenizer.batch_decode(sampled[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.split("\n")[0] for text in written]


def column_of(path: str, column: str) -> list[str]:
    """Return the texts of a file."""
    with open(path, encoding="utf-8", newline="") as file:
        return [row[column] for row in csv.DictReader(file)]


def grams(text: str) -> list[tuple[str, ...]]:
    """Return the sequences of three words.

    >>> grams("a b c d")
    [('a', 'b', 'c'), ('b', 'c', 'd')]
    """
    words = text.lower().split()
    return list(zip(words, words[1:], words[2:], strict=False))


@torch.no_grad()
def perplexity(texts: list[str], model: Any, tokenizer: Any) -> float:
    """Return the judge's perplexity per token."""
    loss, tokens = 0.0, 0
    for text in filter(str.strip, texts):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        if ids.shape[1] < 2:
            continue
        loss += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    return math.exp(loss / max(1, tokens))


def judge(options: argparse.Namespace, folder: str) -> tuple[Any, Any]:
    """Train the judge on the same data set, without privacy."""
    settings = utility.Settings(
        model=options.judge_model,
        data=options.data,
        held_out=options.held_out,
        units=options.judge_records,
        steps=options.judge_steps,
    )
    material = utility.prepare(settings)
    run = utility.Run(arm="non-private", mode="full", epsilon=None, rate=utility.ARMS["non-private"].rate, number=0)
    utility.train(run, settings, material, folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), material.tokenizer


def row_of(texts: list[str], model: Any, tokenizer: Any, known: set[tuple[str, ...]]) -> dict[str, Any]:
    """Return the figures of some texts."""
    found = [gram for text in texts for gram in grams(text)]
    return {
        "texts": len(texts),
        "perplexity": perplexity(texts, model, tokenizer),
        "3-grams": sum(gram in known for gram in found) / max(1, len(found)),
        "distinct": len(set(texts)) / len(texts),
        "examples": texts[:3],
    }


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Return every figure, ready for json.dump."""
    held_out = column_of(options.held_out, options.column)
    compared, known = held_out[: options.texts], {gram for text in held_out[options.texts :] for gram in grams(text)}
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = judge(options, str(Path(folder) / "judge"))
        for kind in ("invisible-ink", "logits"):
            texts, facts = predicted(options, kind, Path(folder) / kind)
            rows[kind] = row_of(texts, model, tokenizer, known) | facts
    rows["public model"] = row_of(public_texts(options), model, tokenizer, known)
    rows["real"] = row_of(compared, model, tokenizer, known)
    return {"settings": {name: str(value) for name, value in vars(options).items()}, "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, help_text in (
        ("model", "folder or Hub name of the public model that writes"),
        ("judge-model", "folder or Hub name of the model that is trained as the judge"),
        ("data", "CSV file with the private records"),
        ("held-out", "CSV file with other records, for the judge's last row and the 3-grams"),
    ):
        parser.add_argument(f"--{name}", required=True, help=help_text)
    parser.add_argument("--column", default="ref", help="column of the texts")
    for name, default in (
        ("texts", 60),
        ("tokens", 32),
        ("group-size", 24),
        ("judge-records", 5000),
        ("judge-steps", 160),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, number in (("epsilon", 8.0), ("delta", 1e-6), ("temperature", 0.5)):
        parser.add_argument(f"--{name}", type=float, default=number)
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    figures = report(options)
    print("| method | texts | ε | clip | perplexity | 3-grams found | distinct |\n|---|---|---|---|---|---|---|")
    for name, row in figures["rows"].items():
        cost = f"{format_epsilon(row['epsilon'])} | {row['clip']:g}" if "epsilon" in row else "- | -"
        figures_of = f"{row['perplexity']:.0f} | {row['3-grams']:.0%} | {row['distinct']:.0%}"
        print(f"| {name} | {row['texts']} | {cost} | {figures_of} |")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
