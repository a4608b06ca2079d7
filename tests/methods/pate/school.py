"""Records, public texts and recipes for small PATE runs."""

import json

import yaml

from tests.small_model import WORDS, save_small_model

TEACHERS = 4


def write_recipe(folder, *, records=None, prompts=None, **changes):
    """Write model, records, public texts and the recipe of a run of four teachers; return the recipe's path.

    Args:
        folder: to write in.
        records: private records; None: 12, where the class is that of the first word.
        prompts: public texts; None: six.
        changes: sections, or parts of them, that are merged into the recipe.
    """
    records = records or [{"text": f"{WORDS[n % 7]} {WORDS[n]} small man", "label": n % 2} for n in range(12)]
    prompts = prompts or [{"text": f"{word} walks over one bridge"} for word in WORDS[:6]]
    model = {"task": "sequence_classification", "num_labels": 2}
    return _write(folder, records, prompts, {"model": model, "data": {"format": "classification"}}, changes)


def write_token_recipe(folder, *, records=None, prompts=None, **changes):
    """Write model, records, public texts and the recipe of four teachers that continue texts; return its path.

    Args:
        folder: to write in.
        records: private records; None: 12.
        prompts: public texts; None: three.
        changes: as for `write_recipe`.
    """
    records = records or [{"text": f"{WORDS[n % 7]} {WORDS[n]} small man {WORDS[n // 2]}"} for n in range(12)]
    prompts = prompts or [{"text": word} for word in ("the dog", "one", "seven red clouds")]
    model, teach = {"adapter": {"r": 2, "target_modules": "all-linear"}}, {"max_new_tokens": 5, "candidates": 8}
    return _write(folder, records, prompts, {"model": model, "data": {"format": "text"}, "pate": teach}, changes)


def _write(folder, records, prompts, kind, changes):
    model = folder / "model"
    if not model.exists():
        save_small_model(model, hidden_size=16)
    for name, lines in (("private.jsonl", records), ("public.jsonl", prompts)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    recipe = {
        "model": {"name": str(model)},
        "data": {"path": str(folder / "private.jsonl"), "max_length": 32},
        "privacy": {"noise_multiplier": 2.0, "delta": 1e-3},
        "pate": {
            "teachers": TEACHERS,
            "public_prompts": str(folder / "public.jsonl"),
            "train": {"num_train_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2},
        },
        "output_dir": str(folder / "run"),
    }
    for name, section in [*kind.items(), *changes.items()]:
        recipe[name] = {**recipe.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path
