"""Stage 4: pretrained weights fine-tuned privately on real text, to the end; and speed against the stock Trainer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import real_text
from real_records import records_of, section_of

from dpllm import DPTrainer, PrivacyConfig
from dpllm.data.rows import RowCollator, tokenize_records
from dpllm.training.evaluation import measure
from gpu.record import Figures, Skipped, Step
from gpu.setting import Setting, free_memory
from gpu.toy import make_material

TITLE = "a whole run"
COLUMNS = ("mr", "ref")
DELTA, CLIP_NORM, LEARNING_RATE = 2e-6, 0.1, 2e-3  # as in recipes/gpt2_e2e_full.yaml


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


def private_run(target_epsilon: float) -> Step:
    """All of DP fine-tuning: calibration, draws, microbatches, noise, ledger, AdamW, evaluation, report."""

    def step(figures: Figures, setting: Setting) -> None:
        if setting.toy and target_epsilon == 3:
            raise Skipped("in the toy the same as at 8")
        free_memory()
        settings = settings_of(setting, steps=405, warmup=5)
        steps = settings.warmup + settings.steps
        material = real_text.prepare(settings)
        privacy = PrivacyConfig(
            target_epsilon=target_epsilon,
            delta=None if setting.toy else DELTA,
            clip_norm=CLIP_NORM,
            expected_batch_size=settings.batch,
        )
        folder = setting.folder / f"run-{target_epsilon:g}"
        begin = time.perf_counter()
        trainer, counter = real_text.make_trainer(
            real_text.PRIVATE,
            settings,
            material,
            str(folder / time.strftime("%H%M%S")),
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
        figures.check("epsilon", trainer.epsilon, at_least=0.5 * target_epsilon, at_most=target_epsilon)
        figures.require(report["statement"]["epsilon"] == trainer.epsilon, "the report states another epsilon")
        figures.check("steps", trainer.plan.num_steps, at_least=steps, at_most=steps)
        figures["noise multiplier"] = trainer.plan.noise_multiplier
        del trainer
        free_memory()

    return step


def _held_out(settings: real_text.Settings, material: real_text.Material) -> Any:
    """Rows of the development part, at most a thousand, taken evenly."""
    path = str(Path(settings.data).with_name("devset.csv"))
    data = section_of(path, settings.columns, settings.max_length)
    return tokenize_records(records_of(data, most=1000), material.tokenizer, data)


def _of_run(figures: dict[str, Any]) -> dict[str, Any]:
    kept = ("real_tokens_per_second", "padding_share", "seconds", "whole_seconds", "peak_bytes", "microbatches")
    return {name: figures[name] for name in kept}


def speed(dtype: str) -> Step:
    """Real tokens per second of the private Trainer, the stock one, and the stock one that groups rows by length."""

    def step(figures: Figures, setting: Setting) -> None:
        if setting.toy and dtype == "float32":
            raise Skipped("in the toy the same as in bfloat16")
        free_memory()
        settings = settings_of(setting, steps=20, warmup=5, dtype=dtype)
        report = real_text.measure(settings)
        figures["token_budget"] = report["token_budget"]
        for method, found in report["methods"].items():
            figures[method] = _of_run(found)
            figures[method]["over_stock"] = found["real_tokens_per_second_over"][real_text.STOCK]
            figures[method]["memory_over_stock"] = found["peak_bytes_over"][real_text.STOCK]
        free_memory()

    return step


STEPS: list[tuple[str, Step]] = [
    ("epsilon 8", private_run(8)),
    ("speed: bfloat16", speed("bfloat16")),
    ("epsilon 3", private_run(3)),
    ("speed: float32", speed("float32")),
]
