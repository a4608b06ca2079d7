"""Measure the cost of privacy: a DP step against the same step without privacy, in time, FLOPs and memory.

    python benchmarks/throughput.py                                            # 4-layer Llama, full fine-tuning
    python benchmarks/throughput.py --mode lora --tokens 512
    python benchmarks/throughput.py --compare opacus --json throughput.json    # Opacus' ghost clipping beside it
    python benchmarks/throughput.py --compare fastdp                           # fastDP's book-keeping beside it
    python benchmarks/throughput.py --config llama8b.json --mode lora --dtype bfloat16 --checkpointing nonreentrant

A step is forward, backward and, for the DP methods, norms and clipped sum; no noise, no optimizer. All methods run in
one process on one batch of random tokens and on the same weights, in turn, after a warm-up that also takes the one-off
checks of the first batch. Ratios are method / non-private: 1 is parity, less is better.

time    medians over the rounds; beside it the ratio of the fastest steps. Where others use the machine, processor time
        on one thread is steadier: OMP_NUM_THREADS=1 and --clock cpu
FLOPs   of matrix products and attention in one step, 2 per multiply-add, counted by torch.utils.flop_counter;
        elementwise work is not counted
memory  peak over one step, with weights and gradients: on CUDA the allocator's record, elsewhere the bytes of
        live tensors (buffers inside an operation are not seen)
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import logging
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from counting import LiveBytes, count_flops
from methods import LAYERS, METHODS, OPACUS, OURS, PEERS, PLAIN, TWICE, GhostStep, Step

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Settings:
    """The settings. ``config`` (a transformers configuration) or ``model`` (a folder) replaces the inline Llama."""

    hidden: int = 512
    layers: int = 4
    vocab: int = 32_000
    heads: int = 8
    intermediate: int | None = None
    tied: bool = False
    config: str | None = None
    model: str | None = None
    mode: str = "full"
    rank: int = 16
    batch: int = 4
    tokens: int = 256
    dtype: str = "float32"
    attention: str = "sdpa"
    checkpointing: str = "none"
    device: str = "auto"
    rounds: int = 5
    warmup: int = 2
    clock: str = "wall"

    def resolved_device(self) -> torch.device:
        """The device named, or CUDA where there is one."""
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device)


@dataclass
class Measurement:
    """One method's figures; times in milliseconds, one per round."""

    times_ms: list[float] = field(default_factory=list)
    flops_by_op: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    refused: str | None = None

    @property
    def median_ms(self) -> float:
        """Median time of a step."""
        return statistics.median(self.times_ms)

    @property
    def flops(self) -> int:
        """All counted floating-point operations of a step."""
        return sum(self.flops_by_op.values())


# ---------------------------------------------------------------------- model


def model_config(settings: Settings) -> Any:
    """The transformers configuration: inline, or from a JSON text, a JSON file or a folder."""
    from transformers import AutoConfig, LlamaConfig

    if settings.config is None:
        return LlamaConfig(
            hidden_size=settings.hidden,
            num_hidden_layers=settings.layers,
            vocab_size=settings.vocab,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            intermediate_size=settings.intermediate or -(-settings.hidden * 8 // 96) * 32,
            max_position_embeddings=max(2048, settings.tokens),
            tie_word_embeddings=settings.tied,
        )
    path = Path(settings.config)
    if not settings.config.lstrip().startswith("{"):
        text = (path / "config.json" if path.is_dir() else path).read_text()
    else:
        text = settings.config
    values = json.loads(text)
    if "model_type" not in values:
        raise ValueError("The configuration has no model_type; add it, for instance 'llama'.")
    return AutoConfig.for_model(**values)


def build_model(settings: Settings) -> nn.Module:
    """The model in training mode: random weights from a configuration, or those of a folder; with LoRA if asked for."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    arguments = {"dtype": getattr(torch, settings.dtype), "attn_implementation": settings.attention}
    with settings.resolved_device():
        if settings.model is not None:
            model = AutoModelForCausalLM.from_pretrained(settings.model, **arguments)
        else:
            model = AutoModelForCausalLM.from_config(model_config(settings), **arguments)
    model.config.use_cache = False
    if settings.checkpointing != "none":
        reentrant = settings.checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if settings.mode == "lora":
            model.enable_input_require_grads()
    if settings.mode == "lora":
        from peft import LoraConfig, get_peft_model

        # Random factors: with the usual zero in B, half of the gradients would be zero.
        model = get_peft_model(
            model,
            LoraConfig(r=settings.rank, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"),
        )
    return model.to(settings.resolved_device()).train()


def twin(model: nn.Module) -> nn.Module:
    """The same modules on the same storage, with hooks, ``requires_grad`` and ``.grad`` of their own."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    memo |= {id(b): b for b in model.buffers()}
    return copy.deepcopy(model, memo)


# ------------------------------------------------------------------- counting


def peak_memory(step: Step, ids_BT: Tensor) -> int:
    """Peak bytes of one step that starts without gradients, weights included."""
    step.forget()
    if ids_BT.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step.run(ids_BT)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    live = LiveBytes()
    for tensor in (ids_BT, *step.model.parameters(), *step.model.buffers()):
        live.watch(tensor)
    with live:
        step.run(ids_BT)
    return live.peak


def timed(step: Step, ids_BT: Tensor, clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of one step."""
    step.forget()
    if ids_BT.is_cuda:
        torch.cuda.synchronize()
    start = clock()
    step.run(ids_BT)
    if ids_BT.is_cuda:
        torch.cuda.synchronize()
    elapsed = 1000 * (clock() - start)
    step.forget()
    return elapsed


# ---------------------------------------------------------------- measurement


def batch_of(settings: Settings, vocab_size: int) -> Tensor:
    """Random tokens (B, T)."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(0, vocab_size, (settings.batch, settings.tokens), generator=generator)
    return ids_BT.to(settings.resolved_device())


def prepare(settings: Settings, methods: list[str]) -> tuple[dict[str, Step], dict[str, str], Tensor]:
    """Build one step per method on shared weights and warm them up.

    Returns:
        The steps; why a method failed on this model; the batch. A method that fails leaves the others as they are.

    Raises:
        Exception: the step without privacy failed.
    """
    model = build_model(settings)
    ids_BT = batch_of(settings, model.config.vocab_size)
    steps: dict[str, Step] = {}
    refused: dict[str, str] = {}
    for name in methods:
        try:
            step = METHODS[name](twin(model))
            if isinstance(step, GhostStep):
                step.prepare(ids_BT)
            for _ in range(settings.warmup):
                step.run(ids_BT)
                step.forget()
            steps[name] = step
        except Exception as error:
            if name == PLAIN:
                raise
            refused[name] = reason(error)
    return steps, refused, ids_BT


def reason(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def measure(
    settings: Settings, methods: list[str], timing: bool = True, counting: bool = True
) -> dict[str, Measurement]:
    """Figures of every method; times are taken in turn, in an order that rotates from round to round.

    Args:
        settings: the settings.
        methods: keys of `METHODS`.
        timing: whether to take times.
        counting: whether to count FLOPs. The work of a Triton kernel is not seen, so on CUDA the private step
            appears cheaper than it is.
    """
    steps, refused, ids_BT = prepare(settings, methods)
    results = {name: Measurement(refused=refused.get(name)) for name in methods}
    clock = CLOCKS[settings.clock]

    def attempt(name: str, function: Callable[[Step, Measurement], None]) -> None:
        try:
            function(steps[name], results[name])
        except Exception as error:
            if name == PLAIN:
                raise
            results[name].refused = reason(error)
            del steps[name]

    for turn in range(settings.rounds if timing else 0):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            attempt(name, lambda step, result: result.times_ms.append(timed(step, ids_BT, clock)))

    def count(step: Step, result: Measurement) -> None:
        step.forget()
        if counting:
            result.flops_by_op = count_flops(lambda: step.run(ids_BT))
        step.forget()
        result.peak_bytes = peak_memory(step, ids_BT)
        step.forget()

    for name in list(steps):
        attempt(name, count)
    if OURS in steps and OPACUS in steps:
        _same_norms(steps[OURS].norms, steps[OPACUS].norms)
    return results


def _same_norms(ours_B: Tensor | None, theirs_B: Tensor | None) -> None:
    """The methods compared must compute the same thing; bfloat16 norms are off by up to a few percent."""
    assert ours_B is not None and theirs_B is not None
    error = float(((theirs_B.float() - ours_B.float()).abs() / ours_B.float()).max())
    limit = 1e-3 if theirs_B.dtype == torch.float32 else 0.05
    if not error <= limit:
        raise RuntimeError(f"The gradient norms of {OPACUS} and {OURS} differ by {error:.1%}: nothing to compare.")


def machine(device: torch.device) -> dict[str, Any]:
    """Return the machine of the figures."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())):
        name = found.group(1)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def as_json(settings: Settings, results: dict[str, Measurement]) -> dict[str, Any]:
    """Settings, machine and figures, ready for json.dump."""
    base = results[PLAIN]
    methods = {}
    for name, result in results.items():
        methods[name] = {"refused": result.refused} if result.refused else _figures(result, base)
    return {"settings": asdict(settings), "machine": machine(settings.resolved_device()), "methods": methods}


def _figures(result: Measurement, base: Measurement) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "flops": result.flops,
        "flop_ratio": result.flops / base.flops,
        "peak_bytes": result.peak_bytes,
        "memory_ratio": result.peak_bytes / base.peak_bytes,
        "flops_by_op": result.flops_by_op,
    }
    if result.times_ms:
        figures |= {
            "median_ms": result.median_ms,
            "time_ratio": result.median_ms / base.median_ms,
            "fastest_ratio": min(result.times_ms) / min(base.times_ms),
            "times_ms": result.times_ms,
        }
    return figures


# --------------------------------------------------------------- command line


def print_table(report: dict[str, Any], console: Console) -> None:
    """The ratios, one line per method."""
    settings, where = report["settings"], report["machine"]
    source = settings["model"] or settings["config"]
    model = source or f"Llama {settings['layers']} x {settings['hidden']}, {'' if settings['tied'] else 'un'}tied head"
    title = (
        f"{model}, {settings['mode']}, B={settings['batch']} T={settings['tokens']}, {settings['dtype']}, "
        f"{settings['attention']}, checkpointing {settings['checkpointing']}, {settings['clock']} time"
    )
    console.print(title, f"{where['device']}, {where['threads']} CPU threads, PyTorch {where['torch']}", sep="\n")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for column in ("ms", "min-max", "time", "best", "GFLOPs", "FLOPs", "MiB", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in report["methods"].items():
        if row.get("refused"):
            continue
        times = row.get("times_ms")
        table.add_row(
            name,
            f"{row['median_ms']:.0f}" if times else "-",
            f"{min(times):.0f}-{max(times):.0f}" if times else "-",
            f"{row['time_ratio']:.2f}" if times else "-",
            f"{row['fastest_ratio']:.2f}" if times else "-",
            f"{row['flops'] / 1e9:.1f}",
            f"{row['flop_ratio']:.3f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['memory_ratio']:.3f}",
        )
    console.print(table)
    for name, row in report["methods"].items():
        if row.get("refused"):
            console.print(f"{name} has no figures for this model: {row['refused']}")


def profile(settings: Settings, method: str, rows: int = 20) -> str:
    """Where one method's time goes: torch.profiler's operations by their own time."""
    steps, refused, ids_BT = prepare(settings, [method])
    if method in refused:
        return refused[method]
    activities = [torch.profiler.ProfilerActivity.CPU]
    if ids_BT.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(settings.rounds):
            timed(steps[method], ids_BT)
    by = "self_cuda_time_total" if ids_BT.is_cuda else "self_cpu_time_total"
    averages = profiler.key_averages(group_by_input_shape=True)
    return averages.table(sort_by=by, row_limit=rows, max_shapes_column_width=60)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""

    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    d = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    model = parser.add_argument_group("model: an inline Llama with random weights, --config, or --model")
    model.add_argument("--hidden", type=int, default=d.hidden, help="hidden size")
    model.add_argument("--layers", type=int, default=d.layers, help="number of blocks")
    model.add_argument("--vocab", type=int, default=d.vocab, help="vocabulary size")
    model.add_argument("--heads", type=int, default=d.heads, help="attention heads")
    model.add_argument("--intermediate", type=int, help="width of the MLP; None: 8/3 of the hidden size")
    model.add_argument("--tied", action="store_true", help="tie the head to the embedding")
    source = model.add_mutually_exclusive_group()
    source.add_argument("--config", help="transformers configuration as JSON text, JSON file or folder; random weights")
    source.add_argument("--model", help="folder (or Hub name) of a model with its weights")
    what = parser.add_argument_group("trained parameters and method")
    what.add_argument(
        "--mode", choices=("full", "lora"), default=d.mode, help="all weights, or LoRA on all linear ones"
    )
    what.add_argument("--rank", type=int, default=d.rank, help="LoRA rank")
    what.add_argument("--batch", type=int, default=d.batch, help="rows per step, B")
    what.add_argument("--tokens", type=int, default=d.tokens, help="tokens per row, T")
    what.add_argument("--dtype", choices=("float32", "bfloat16"), default=d.dtype, help="of weights and activations")
    what.add_argument("--attention", choices=("sdpa", "eager"), default=d.attention, help="attention implementation")
    what.add_argument("--checkpointing", choices=("none", "reentrant", "nonreentrant"), default=d.checkpointing)
    run = parser.add_argument_group("measurement")
    run.add_argument("--device", default=d.device, help="auto, cpu, cuda, cuda:1, ...")
    run.add_argument("--rounds", "--steps", type=int, default=d.rounds, help="timed steps per method")
    run.add_argument("--warmup", type=int, default=d.warmup, help="steps before that, at least 1")
    run.add_argument("--clock", choices=tuple(CLOCKS), default=d.clock, help="wall time, or processor time")
    run.add_argument("--no-time", action="store_true", help="count FLOPs and memory only")
    run.add_argument(
        "--compare",
        choices=(*PEERS, TWICE, LAYERS),
        action="append",
        default=[],
        help="measure this method as well",
    )
    run.add_argument("--profile", choices=tuple(METHODS), help="print where this method's time goes, and stop")
    run.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    for name in ("hidden", "layers", "vocab", "heads", "rank", "batch", "tokens", "rounds", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    if options.clock == "cpu" and Settings(device=options.device).resolved_device().type != "cpu":
        parser.error("--clock cpu does not see what a GPU does; use --clock wall")
    for name, package in PEERS.items():
        if name in (*options.compare, options.profile) and importlib.util.find_spec(package) is None:
            parser.error(f"{package} is not installed here; pip install {package}, best in an extra environment")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    settings = Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__})
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for message in ("Full backward hook is firing", "`is_gradient_checkpointing`"):  # from Opacus' hooks and wrapper
        warnings.filterwarnings("ignore", message=message)
    console = Console()
    if options.profile:
        print(profile(settings, options.profile))
        return
    report = as_json(settings, measure(settings, [PLAIN, OURS, *options.compare], timing=not options.no_time))
    print_table(report, console)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if report["methods"][OURS].get("refused"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
