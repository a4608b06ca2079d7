"""Real tokens per second of a private run against the stock `transformers.Trainer` without privacy, on real text.

    python benchmarks/real_text.py                                                       # GPT-2 on E2E, from the Hub
    python benchmarks/real_text.py --model folder --data trainset.csv --columns mr ref --json real_text.json
    python benchmarks/real_text.py --config llama.json --tokenizer folder --dtype bfloat16 --max-tokens 16384

Three runs in one process, one after the other, from the same weights, on the same rows, with the same optimizer, the
same number of steps, and (on average, in the private run) the same rows per step:

stock            random sampling, its default; rows are padded to the longest of their microbatch
stock, grouped   train_sampling_strategy="group_by_length": rows of like length are sampled together
dpllm            DPTrainer: Poisson sampling, clipping, noise; each step's rows are sorted by length

No microbatch of any of them has more tokens, padding included, than the budget: rows of the stock Trainer's microbatch
times the longest row of the data. This number of rows fits into --max-tokens and divides --batch.

tokens/s   tokens that are not padding, of the steps after the warm-up, over their time
whole      the same of the whole run, with making the trainer, the warm-up and, private, the report
padding    share of padding among the tokens that went through the model, counted in the collated batches
peak       memory, after the warm-up. On CUDA the allocator's record; elsewhere the bytes of live tensors in a
           run of two steps of its own, in the second of them
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from real_records import quiet, records_of, section_of
from throughput import CLOCKS, LiveBytes, machine

from dpllm import DPTrainer, PrivacyConfig
from dpllm.config import ConfigError, ModelConfig
from dpllm.data.rows import DataError, RowCollator, tokenize_records
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model

STOCK, GROUPED, PRIVATE = "stock", "stock, grouped", "dpllm"
METHODS = (STOCK, GROUPED, PRIVATE)


@dataclass(frozen=True)
class Settings:
    """The settings. ``config`` (a transformers configuration, random weights) replaces ``model``."""

    model: str = "openai-community/gpt2"
    config: dict[str, Any] | None = None
    tokenizer: str | None = None
    data: str = "tuetschek/e2e_nlg"
    split: str = "train"
    columns: tuple[str, ...] = ("meaning_representation", "human_reference")
    max_length: int = 128
    mode: str = "full"
    rank: int = 16
    dtype: str = "float32"
    device: str = "auto"
    steps: int = 10
    warmup: int = 2
    batch: int = 512
    max_tokens: int = 4096
    clock: str = "wall"

    def on_cpu(self) -> bool:
        """Whether the runs are on the CPU."""
        return self.device == "cpu" or not torch.cuda.is_available()


@dataclass(frozen=True)
class Material:
    """Shared material of all runs.

    Attributes:
        base: the model before LoRA, never trained itself.
        section: the recipe's section that made it.
        tokenizer: its tokenizer.
        rows: tokenized rows, at most those of one pass.
        longest: tokens of the longest of them.
        rows_per_microbatch: of the stock Trainer.
    """

    base: Any
    section: ModelConfig
    tokenizer: Any
    rows: Any
    longest: int
    rows_per_microbatch: int

    @property
    def budget(self) -> int:
        """Tokens of a microbatch at most, padding included."""
        return self.rows_per_microbatch * self.longest


def prepare(settings: Settings) -> Material:
    """Load model and data, and choose the microbatch.

    The rows are those of one pass over (warm-up + steps) logical batches, taken evenly from all records, so that a pass
    of the grouped sampler sees every length.

    Raises:
        ValueError: model or data cannot be loaded, there are fewer records than a logical batch, or the longest row
            exceeds the budget.
    """
    section = ModelConfig(
        name=None if settings.config else settings.model,
        config=settings.config,
        tokenizer=settings.tokenizer,
        dtype=settings.dtype,
        adapter={"r": settings.rank, "target_modules": "all-linear"} if settings.mode == "lora" else None,
    )
    tokenizer = load_tokenizer(section)
    data = section_of(settings.data, settings.columns, settings.max_length, settings.split)
    wanted = (settings.warmup + settings.steps) * settings.batch
    rows = tokenize_records(records_of(data, wanted, settings.batch, "--batch"), tokenizer, data)
    longest = max(map(len, rows["input_ids"]))
    if settings.max_tokens < longest:
        raise ConfigError(f"--max-tokens is {settings.max_tokens}, and the longest row has {longest} tokens; raise it")
    fits = min(settings.batch, settings.max_tokens // longest)
    return Material(
        base=load_base_model(section, tokenizer),
        section=section,
        tokenizer=tokenizer,
        rows=rows,
        longest=longest,
        rows_per_microbatch=max(rows for rows in range(1, fits + 1) if settings.batch % rows == 0),
    )


# ------------------------------------------------------------------- counting


class CountingCollator:
    """Collates rows and counts, for each batch, its real tokens, all its tokens and its rows.

    The row that replaces an empty draw counts as well; with b rows a step on average, a draw is empty with
    probability e^-b.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        """Wrap a collator."""
        self._collate, self._counts_calls = collate, True
        self.batches: list[tuple[int, int, int]] = []

    def __call__(self, rows: list[Any]) -> Mapping[str, Any]:
        """Collate and count."""
        inputs = self._collate(rows)
        if self._counts_calls:
            self._count(inputs["attention_mask"])
        return inputs

    def count_passes(self, model: torch.nn.Module) -> None:
        """Count what passes through a model instead: dpllm collates rows one at a time, and pads them itself."""
        self._counts_calls = False
        model.register_forward_pre_hook(lambda _, args, inputs: self._count(inputs["attention_mask"]), with_kwargs=True)

    def _count(self, mask_BT: torch.Tensor) -> None:
        self.batches.append((int(mask_BT.sum()), mask_BT.numel(), len(mask_BT)))

    def keep_last(self, start: int, rows: int) -> None:
        """Of the batches since ``start``, forget all but the last ones that have this many rows, or one."""
        kept = len(self.batches) - 1
        while kept > start and sum(batch[2] for batch in self.batches[kept:]) < rows:
            kept -= 1
        del self.batches[start:kept]


@dataclass
class Mark:
    """The state of a run after a step: the time, and the number of collated batches that had been trained on."""

    seconds: float
    batches: int


@dataclass
class StepCounter(TrainerCallback):
    """Notes when the steps after the warm-up began and ended, and which batches they took.

    Attributes:
        collator: the counting collator.
        settings: warm-up, clock, device.
        whole_steps: whether all batches of a step are collated within it (DPTrainer). The stock loader is one ahead.
        live: counts live tensors, where CUDA's allocator does not.
    """

    collator: CountingCollator
    settings: Settings
    whole_steps: bool
    live: LiveBytes | None = None
    start: Mark | None = None
    end: Mark | None = None
    trained: int = 0
    first_peak: int = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget earlier batches: DPTrainer compares samples of the rows between processes."""
        self.collator.batches.clear()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a microbatch of the stock Trainer that does not end a step."""
        self.trained += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of the warm-up and of the run."""
        self.trained = len(self.collator.batches) if self.whole_steps else self.trained + 1
        if state.global_step == self.settings.warmup:
            self.start = self._mark()
            self.first_peak = self.peak_bytes()
            self._forget_peak()
        elif state.global_step == self.settings.warmup + self.settings.steps:
            self.end = self._mark()

    def _mark(self) -> Mark:
        if not self.settings.on_cpu():
            torch.cuda.synchronize()
        return Mark(CLOCKS[self.settings.clock](), self.trained)

    def peak_bytes(self) -> int:
        """Since the run began, or since its warm-up ended; 0 where nothing counts it."""
        if self.live is not None:
            return self.live.peak
        return 0 if self.settings.on_cpu() else torch.cuda.max_memory_allocated()

    def _forget_peak(self) -> None:
        if self.live is not None:
            self.live.peak = self.live.current
        elif not self.settings.on_cpu():
            torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------------------ runs


class CountedTrainer(DPTrainer):
    """Counts the rows that a step draws; those that a step compares with each other beforehand are not trained on."""

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """As DPTrainer, whose collator is a `CountingCollator`."""
        counted = self.data_collator
        assert isinstance(counted, CountingCollator), "make_trainer() gives it"
        start = len(counted.batches)
        done = super().training_step(model, inputs, num_items_in_batch)
        counted.keep_last(start, len(inputs["unit_ids"]))
        return done


def make_trainer(
    method: str,
    settings: Settings,
    material: Material,
    folder: str,
    live: LiveBytes | None = None,
    privacy: PrivacyConfig | None = None,
    **changes: Any,
) -> tuple[Trainer, StepCounter]:
    """Return a trainer of this method on a copy of the model, and the counter of its batches.

    Args:
        method: one of `METHODS`.
        settings: steps, batch, device.
        material: model and rows.
        folder: for the run's files.
        live: counts live tensors.
        privacy: of the private method; None: a noise multiplier of 1.
        changes: of the arguments for training.
    """
    private = method == PRIVATE
    collator = CountingCollator(RowCollator(pad_token_id=material.tokenizer.pad_token_id))
    counter = StepCounter(collator, settings, whole_steps=private, live=live)
    rows = material.rows_per_microbatch
    values: dict[str, Any] = {
        "max_steps": settings.warmup + settings.steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1 if private else settings.batch // rows,
        "train_sampling_strategy": "group_by_length" if method == GROUPED else "random",
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": settings.on_cpu(),
        "dataloader_pin_memory": not settings.on_cpu(),
    }
    arguments = TrainingArguments(folder, **values | changes)
    common: dict[str, Any] = {
        "model": prepare_model(copy.deepcopy(material.base), material.section),
        "args": arguments,
        "train_dataset": material.rows,
        "processing_class": material.tokenizer,
        "data_collator": collator,
        "callbacks": [counter],
    }
    if private:
        privacy = privacy or PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=settings.batch)
        trainer: Trainer = CountedTrainer(**common, privacy=privacy, max_tokens_per_microbatch=material.budget)
        collator.count_passes(common["model"])
    else:
        trainer = Trainer(**common)
    trainer.remove_callback(PrinterCallback)
    return trainer, counter


def run(method: str, settings: Settings, material: Material) -> dict[str, Any]:
    """Train once and count."""
    begin = CLOCKS[settings.clock]()
    with tempfile.TemporaryDirectory() as folder:
        trainer, counter = make_trainer(method, settings, material, folder)
        trainer.train()
        whole_s = CLOCKS[settings.clock]() - begin
    return counted_figures(counter, whole_s)


def counted_figures(counter: StepCounter, whole_s: float) -> dict[str, Any]:
    """Return the tokens, padding, speed and memory of a run that has ended, from its total seconds."""
    assert counter.start is not None and counter.end is not None, "the run has all its steps"
    counted = counter.collator.batches[counter.start.batches : counter.end.batches]
    real, tokens, rows = (sum(column) for column in zip(*counted, strict=True))
    seconds = counter.end.seconds - counter.start.seconds
    whole_real = sum(batch[0] for batch in counter.collator.batches[: counter.end.batches])
    return {
        "real_tokens": real,
        "tokens": tokens,
        "rows": rows,
        "microbatches": len(counted),
        "padding_share": 1 - real / tokens,
        "largest_microbatch_tokens": max(batch[1] for batch in counted),
        "seconds": seconds,
        "real_tokens_per_second": real / seconds,
        "whole_seconds": whole_s,
        "whole_real_tokens_per_second": whole_real / whole_s,
        "peak_bytes": counter.peak_bytes(),
        "first_steps_peak_bytes": counter.first_peak,
    }


def peak_on_cpu(method: str, settings: Settings, material: Material) -> dict[str, int]:
    """Peak bytes of live tensors in the first and in the second step of a run of two."""
    short = Settings(**asdict(settings) | {"warmup": 1, "steps": 1})
    live = LiveBytes()
    with tempfile.TemporaryDirectory() as folder:
        trainer, counter = make_trainer(method, short, material, folder, live)
        model: Any = trainer.model
        for tensor in (*model.parameters(), *model.buffers()):
            live.watch(tensor)
        with live:
            trainer.train()
    return {"peak_bytes": counter.peak_bytes(), "first_steps_peak_bytes": counter.first_peak}


def measure(settings: Settings) -> dict[str, Any]:
    """All methods, one after the other."""
    material = prepare(settings)
    methods: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        memory = peak_on_cpu(method, settings, material) if settings.on_cpu() else {}
        _free()
        methods[method] = run(method, settings, material) | memory
        _free()
    for figures in methods.values():
        for name in ("real_tokens_per_second", "whole_real_tokens_per_second", "peak_bytes"):
            figures[f"{name}_over"] = {stock: figures[name] / methods[stock][name] for stock in (STOCK, GROUPED)}
    return {
        "settings": asdict(settings),
        "machine": machine(torch.device("cpu" if settings.on_cpu() else "cuda")),
        "transformers": transformers.__version__,
        "token_budget": material.budget,
        "rows_per_microbatch": material.rows_per_microbatch,
        "num_rows": len(material.rows),
        "longest_row": material.longest,
        "methods": methods,
    }


def _free() -> None:
    """Free the GPU's memory, and reset its peak."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---------------------------------------------------------------- command line


def print_table(report: dict[str, Any], console: Console) -> None:
    """One line per method."""
    settings, where = report["settings"], report["machine"]
    name = settings["model"] if settings["config"] is None else f"{settings['config']['model_type']} (random weights)"
    console.print(
        f"{name}, {settings['mode']}, {settings['dtype']}; {settings['data']}, {report['num_rows']} rows of at most "
        f"{report['longest_row']} tokens; {settings['steps']} steps of {settings['batch']} rows",
        f"microbatches of at most {report['token_budget']} tokens (stock: {report['rows_per_microbatch']} rows); "
        f"{settings['clock']} time",
        f"{where['device']}, {where['threads']} CPU threads, PyTorch {where['torch']}, "
        f"transformers {report['transformers']}",
        sep="\n",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("method", no_wrap=True)
    columns = ("tokens/s", "/stock", "/grouped", "padding", "s", "whole", "/stock", "MiB", "/stock")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for method, row in report["methods"].items():
        table.add_row(
            method,
            f"{row['real_tokens_per_second']:.0f}",
            *(f"{row['real_tokens_per_second_over'][stock]:.2f}" for stock in (STOCK, GROUPED)),
            f"{row['padding_share']:.1%}",
            f"{row['seconds']:.1f}",
            f"{row['whole_real_tokens_per_second']:.0f}",
            f"{row['whole_real_tokens_per_second_over'][STOCK]:.2f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['peak_bytes_over'][STOCK]:.2f}",
        )
    console.print(table)


def _configuration(text: str) -> dict[str, Any]:
    """A transformers configuration as JSON text or JSON file."""
    try:
        values = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is neither JSON nor a file of it ({error})") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise argparse.ArgumentTypeError("the configuration has no model_type; add it, for instance 'llama'")
    return values


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""

    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    d = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    what = parser.add_argument_group("model and data")
    source = what.add_mutually_exclusive_group()
    source.add_argument("--model", default=d.model, help="folder or Hub name of a causal language model")
    source.add_argument("--config", type=_configuration, help="configuration as JSON text or file; random weights")
    what.add_argument("--tokenizer", help="folder or Hub name; None: the model's own")
    what.add_argument("--data", default=d.data, help="local file or Hub name")
    what.add_argument("--split", default=d.split, help="split of a Hub data set")
    what.add_argument("--columns", nargs="+", default=d.columns, help="one: text; two: prompt and completion")
    what.add_argument("--max-length", type=int, default=d.max_length, help="tokens of a row; longer ones are cut")
    run_group = parser.add_argument_group("runs")
    run_group.add_argument("--mode", choices=("full", "lora", "both"), default="both", help="trained parameters")
    run_group.add_argument("--rank", type=int, default=d.rank, help="LoRA rank, on all linear layers")
    run_group.add_argument("--dtype", choices=("float32", "bfloat16"), default=d.dtype, help="of weights, activations")
    run_group.add_argument("--device", choices=("auto", "cpu"), default=d.device, help="auto: CUDA where there is one")
    run_group.add_argument("--batch", type=int, default=d.batch, help="rows per step")
    run_group.add_argument("--max-tokens", type=int, default=d.max_tokens, help="tokens of a microbatch, with padding")
    run_group.add_argument("--steps", type=int, default=d.steps, help="steps counted")
    run_group.add_argument("--warmup", type=int, default=d.warmup, help="steps before that")
    run_group.add_argument("--clock", choices=tuple(CLOCKS), default=d.clock, help="wall time, or processor time")
    run_group.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    for name in ("max_length", "rank", "batch", "max_tokens", "steps", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; at least 1 is needed")
    if len(options.columns) > 2:
        parser.error(f"--columns has {len(options.columns)} names; one (text) or two (prompt, completion) are needed")
    if options.device != "cpu" and torch.cuda.device_count() > 1:
        parser.error(f"{torch.cuda.device_count()} GPUs are visible to one process; set CUDA_VISIBLE_DEVICES=0")
    if options.config is not None and options.tokenizer is None:
        parser.error("--config has no tokenizer of its own; give --tokenizer")
    if options.clock == "cpu" and not Settings(device=options.device).on_cpu():
        parser.error("--clock cpu does not see what a GPU does; use --clock wall")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    quiet()
    values = {name: getattr(options, name) for name in Settings.__dataclass_fields__}
    values["columns"] = tuple(options.columns)
    console = Console(width=None if sys.stdout.isatty() else 120)
    reports = []
    for mode in ("full", "lora") if options.mode == "both" else (options.mode,):
        try:
            report = measure(Settings(**values | {"mode": mode}))
        except (ConfigError, DataError) as error:
            raise SystemExit(f"real_text.py: error: {error}") from error
        print_table(report, console)
        reports.append(report)
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
