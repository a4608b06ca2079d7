"""Step of the second visit: pretrained weights trained privately on real text, and speed against the stock Trainer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import real_text
from real_records import quiet, records_of, section_of

from dpllm import DPTrainer, PrivacyConfig
from dpllm.data.rows import RowCollator, tokenize_records
from dpllm.privacy.rounding import format_epsilon
from dpllm.training.evaluation import measure
from gpu.record import Figures, Skipped
from gpu.setting import Setting, free_memory
from gpu.toy import make_material

COLUMNS = ("mr", "ref")
DELTA, CLIP_NORM, LEARNING_RATE = 2e-6, 0.1, 2e-3  # as in recipes/gpt2_e2e_full.yaml
EPSILON, STEPS, WARMUP = 8, 55, 5


def place_of(setting: Setting) -> Path:
    """The folder with weights and text; a toy makes its own."""
    if setting.toy:
        return make_material(setting.folder / "toy")
    if setting.material is None:
        raise Skipped("no folder with stories15M and e2e; give --material")
    return setting.material


def settings_of(setting: Setting, steps: int, warmup: int, **changes: Any) -> real_text.Settings:
    """A run on the training part of E2E."""
    place = place_of(setting)
    values = {"batch": 1024, "max_tokens": 36_000, "max_length": 256, "steps": steps, "warmup": warmup}
    if setting.toy:
        values = {"batch": 12, "max_tokens": 160, "max_length": 40, "steps": 2, "warmup": 1}
    return real_text.Settings(
        model=str(place / "stories15M"),
        data=str(place / "e2e" / "trainset.csv"),
        columns=COLUMNS,
        device="cpu" if setting.toy else "auto",
        **values | changes,
    )


def private_run(figures: Figures, setting: Setting) -> None:
    """All of DP fine-tuning: calibration, draws, microbatches, noise, ledger, AdamW, evaluation, report."""
    quiet()
    free_memory()
    settings = settings_of(setting, steps=STEPS, warmup=WARMUP)
    steps = settings.warmup + settings.steps
    material = real_text.prepare(settings)
    privacy = PrivacyConfig(
        epsilon=EPSILON,
        delta=None if setting.toy else DELTA,
        clip_norm=CLIP_NORM,
        expected_batch_size=settings.batch,
    )
    begin = time.perf_counter()
    trainer, counter = real_text.make_trainer(
        real_text.PRIVATE,
        settings,
        material,
        str(setting.folder / f"run-{time.strftime('%H%M%S')}"),
        privacy=privacy,
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        bf16=not setting.toy,
    )
    assert isinstance(trainer, DPTrainer) and trainer.model is not None
    held_out = _held_out(settings, material)
    collator = RowCollator(pad_token_id=material.tokenizer.pad_token_id)
    before = measure(trainer.model, held_out, collator).value
    trainer.train()
    figures |= _of_run(real_text.counted_figures(counter, time.perf_counter() - begin))
    after = measure(trainer.model, held_out, collator).value
    report = trainer.privacy_report()
    figures["perplexity before"] = before
    figures.check("perplexity after", after, at_least=1, at_most=1e6 if setting.toy else before / 2)
    figures.check("epsilon", trainer.epsilon, at_least=0.5 * EPSILON, at_most=EPSILON)
    figures.require(report["statement"]["epsilon"] == trainer.epsilon, "the report states another epsilon")
    figures.check("steps", trainer.plan.num_steps, at_least=steps, at_most=steps)
    figures["noise multiplier"] = trainer.plan.noise_multiplier
    figures["summary"] = f"perplexity {before:.4g} before, {after:.4g} after, ε {format_epsilon(trainer.epsilon)}"
    figures.say(figures["summary"])
    del trainer
    free_memory()


def _held_out(settings: real_text.Settings, material: real_text.Material) -> Any:
    """Rows of the development part, at most a thousand, taken evenly."""
    path = str(Path(settings.data).with_name("devset.csv"))
    data = section_of(path, settings.columns, settings.max_length)
    return tokenize_records(records_of(data, most=1000), material.tokenizer, data)


def _of_run(figures: dict[str, Any]) -> dict[str, Any]:
    kept = ("real_tokens_per_second", "padding_share", "seconds", "whole_seconds", "peak_bytes", "microbatches")
    return {name: figures[name] for name in kept}


def speed(figures: Figures, setting: Setting) -> None:
    """Real tokens per second of the private Trainer, the stock one, and the stock one that groups rows by length."""
    quiet()
    free_memory()
    settings = settings_of(setting, steps=8, warmup=4, dtype="bfloat16", batch=12 if setting.toy else 512)
    report = real_text.measure(settings)
    figures["token_budget"] = report["token_budget"]
    told = []
    for method, found in report["methods"].items():
        over = found["real_tokens_per_second_over"][real_text.STOCK]
        memory = found["peak_bytes_over"][real_text.STOCK]
        figures[method] = {**_of_run(found), "over_stock": over, "memory_over_stock": memory}
        told.append(f"{method} {found['real_tokens_per_second']:.0f} tokens/s, {over:.3f}/{memory:.3f}")
        figures.say(told[-1])
    figures["summary"] = "; ".join(told)
    free_memory()
