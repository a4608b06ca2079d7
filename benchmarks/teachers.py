"""Write the material of the comparison of PATE with DP-SGD: a public encoder, SST-2 sentences, and two recipes.

    python benchmarks/teachers.py --sst2 sst2 --output pate      # sst2/train.tsv and sst2/dev.tsv, as of GLUE
    cd pate
    dpllm train dpsgd.yaml
    dpllm methods pate pate.yaml

Both trainings then have the same records, the same start and the same trained weights: a classifier of 770 numbers.
Results are in docs/methods/answers.md.

The encoder is the first layer of all-MiniLM-L6-v2 and a second one whose attention is uniform, so that the vector of
the first token, which a classifier reads, has the average of the tokens' vectors, as sentence-transformers takes it.
The average over public texts is subtracted. Without the second layer the first token's vector hardly depends on the
text: its length is 8.2, and its distance to its mean 0.02.

private.jsonl  the first sentences of the train split that are not in public.jsonl
public.jsonl   1 000 sentences of the train split that occur in it once, without their labels
dev.jsonl      the dev split
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

PUBLIC, CENTRED, SEED = 1000, 500, 18
SPREAD = 82.0
"""The length of an average text's vector after centring, ten times that of a first token's vector."""
COMMON = """\
model: {name: encoder, task: sequence_classification, num_labels: 2, dtype: float32, freeze: ["bert.*"]}
data: {path: private.jsonl, format: classification, max_length: 64, eval: {path: dev.jsonl, public: true}}
"""
DPSGD = """\
privacy:
  {epsilon: 8, delta: 1.0e-6, dataset: SST-2, clip_norm: 1.0, expected_batch_size: 256}
train:
  output_dir: runs/dpsgd
  max_steps: 60
  per_device_train_batch_size: 128
  learning_rate: 2.0e-2
  lr_scheduler_type: constant_with_warmup
  warmup_steps: 0.1
  average: {kind: ema, decay: 0.9}
  logging_steps: 10
  save_strategy: "no"
"""
PATE = """\
privacy: {epsilon: 8, delta: 1.0e-6, dataset: SST-2}
pate:
  teachers: 50
  public_prompts: public.jsonl
  max_prompts: 300
  train: {num_train_epochs: 3, per_device_train_batch_size: 20, learning_rate: 2.0e-2}
  student_train: {num_train_epochs: 8, per_device_train_batch_size: 20, learning_rate: 1.0e-2}
output_dir: runs/pate
"""


def sentences(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in list(file)[1:]]
    return [{"text": text.strip(), "label": int(label)} for text, label in rows]


def write_records(sst2: Path, folder: Path, units: int) -> list[str]:
    train = sentences(sst2 / "train.tsv")
    keys = [" ".join(row["text"].lower().split()) for row in train]
    count = Counter(keys)
    once = [number for number, key in enumerate(keys) if count[key] == 1]
    chosen = random.Random(SEED).sample(once, min(PUBLIC, len(once)))
    public = [{"text": train[number]["text"]} for number in chosen]
    taken = set(chosen)
    private = [row for number, row in enumerate(train) if number not in taken][:units]
    for name, rows in (("private", private), ("public", public), ("dev", sentences(sst2 / "dev.tsv"))):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return [row["text"] for row in public]


@torch.no_grad()
def write_encoder(name: str, texts: list[str], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModel.from_pretrained(name, num_hidden_layers=2, dtype=torch.float32).eval()
    averages_ND = torch.cat([averages(model, tokenizer, texts[n : n + 100]) for n in range(0, len(texts), 100)])
    mean_D = averages_ND.mean(dim=0)
    scale = SPREAD / float((averages_ND - mean_D).norm(dim=1).mean())
    layer, same = model.encoder.layer[1], torch.eye(len(mean_D))
    for parameter in layer.parameters():
        parameter.zero_()  # queries and keys of zero: each token looks at all tokens equally
    layer.attention.self.value.weight.copy_(same)
    layer.attention.output.dense.weight.copy_(scale * same)
    layer.attention.output.dense.bias.copy_(-scale * mean_D)
    for norm in (layer.attention.output.LayerNorm, layer.output.LayerNorm):
        norm.weight.fill_(1.0)
    model.pooler.dense.weight.copy_(0.5 * same)
    model.pooler.dense.bias.zero_()
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def averages(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64)
    hidden_NTD = model(**inputs, output_hidden_states=True).hidden_states[1]
    mask_NT1 = inputs["attention_mask"][..., None].float()
    return (hidden_NTD * mask_NT1).sum(dim=1) / mask_NT1.sum(dim=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sst2", type=Path, required=True, help="folder with train.tsv and dev.tsv of GLUE")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="folder or Hub name")
    parser.add_argument("--units", type=int, default=10_000, help="private sentences")
    parser.add_argument("--output", type=Path, default=Path("pate"))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    texts = write_records(options.sst2, options.output, options.units)
    write_encoder(options.model, texts[:CENTRED], options.output / "encoder")
    (options.output / "dpsgd.yaml").write_text(COMMON + DPSGD, encoding="utf-8")
    (options.output / "pate.yaml").write_text(COMMON + PATE, encoding="utf-8")
    print(f"{options.output} has the encoder, the sentences and the recipes dpsgd.yaml and pate.yaml")


if __name__ == "__main__":
    main()
