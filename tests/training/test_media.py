"""Private runs of models that write text about images or sound, from rows as transformers' processors make them."""

import json

import pytest
import torch
from datasets import Dataset

from dpllm import DPTrainer, PrivacyConfig
from dpllm.config import ConfigError
from tests.ghost.media import SIDE, TOKEN, freeze_tower, llava, whisper
from tests.mutations import kills
from tests.training.test_trainer import arguments


def image_rows(count=40):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(count):
        text = torch.randint(3, 60, (4 + number % 3,), generator=generator).tolist()
        pixels = torch.randn(3, SIDE, SIDE, generator=generator).tolist()
        rows.append({"input_ids": [1, *[TOKEN] * 4, *text], "labels": [-100] * 5 + text, "pixel_values": pixels})
    return Dataset.from_list(rows)


def sound_rows(count=40):
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 60, (4 + n % 3,), generator=generator).tolist() for n in range(count)]
    sounds = [torch.randn(8, 40, generator=generator).tolist() for _ in range(count)]
    return Dataset.from_dict({"input_features": sounds, "labels": texts})


def padded(rows, name, value):
    longest = max(len(row[name]) for row in rows)
    return torch.tensor([[*row[name], *[value] * (longest - len(row[name]))] for row in rows])


def collate(rows):
    media = {n: torch.tensor([row[n] for row in rows]) for n in ("pixel_values", "input_features") if n in rows[0]}
    batch = {"labels": padded(rows, "labels", -100), **media}
    if "input_ids" in rows[0]:
        ids = padded(rows, "input_ids", 0)
        batch |= {"input_ids": ids, "attention_mask": (ids > 0).long()}
    return batch


def trainer_of(folder, model, rows, collator=collate, **privacy):
    args = arguments(folder, max_steps=3, learning_rate=1e-3, remove_unused_columns=False)
    settings = PrivacyConfig(noise_multiplier=1.0, delta=1e-3, clip_norm=0.5, expected_batch_size=10, **privacy)
    return DPTrainer(model=model, args=args, train_dataset=rows, data_collator=collator, privacy=settings)


@pytest.mark.parametrize("gradients", ["ghost", "per_unit", "auto"])
@pytest.mark.parametrize("kind", ["images", "sound"])
def test_a_run_counts_its_rows_and_keeps_its_tower(kind, gradients, tmp_path):
    """Made-up rows have the tokens that stand for an image, so that auto and freeze can try them."""
    torch.manual_seed(0)
    model, rows = (freeze_tower(llava()), image_rows()) if kind == "images" else (whisper(), sound_rows())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = trainer_of(tmp_path, model, rows, gradients=gradients, unused_parameters="freeze")
    trainer.train()
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["accounting"]["steps"]["charged"] == 3
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and not any("vision" in name for name in moved)


@kills(
    "a collator may make several rows of one, or none",
    "dpllm/data/single_rows.py",
    "        self._check(inputs)\n",
    "",
)
def test_a_row_that_would_take_the_image_of_another_is_refused(tmp_path):
    """The collator lists all images one after the other: beside a row with two, a row without gets one of them."""
    rows = [dict(row) for row in image_rows()]
    for number, row in enumerate(rows):
        row["pixel_values"] = [row["pixel_values"]] * (number % 2 * 2)

    def listed(batch):
        flat = [pixels for row in batch for pixels in row["pixel_values"]]
        without = collate([{name: row[name] for name in ("input_ids", "labels")} for row in batch])
        return {**without, "pixel_values": torch.tensor(flat).reshape(-1, 3, SIDE, SIDE)}

    trainer = trainer_of(tmp_path, freeze_tower(llava()), rows, listed)
    with pytest.raises(ValueError, match="pixel_values"):
        trainer.train()


@pytest.mark.parametrize("first", [4, 0])
def test_what_is_frozen_does_not_depend_on_the_images_of_a_row(first, tmp_path):
    """If the first row had no image, the part that reads images would be frozen."""
    rows = [dict(row) for row in image_rows()]
    changed = rows[0 if first == 0 else 7]
    changed["input_ids"] = [5 if token == TOKEN else token for token in changed["input_ids"]]
    trainer = trainer_of(tmp_path, freeze_tower(llava()), rows, unused_parameters="freeze")
    with pytest.raises(ConfigError, match="number of image tokens"):
        trainer.train()
