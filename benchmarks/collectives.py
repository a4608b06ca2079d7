"""Count the collectives of a step on each engine, and their bytes, beside training without privacy on the same engine.

    python benchmarks/collectives.py                                  # all engines, full and LoRA, 1 and 4 microbatches
    python benchmarks/collectives.py --engines ddp zero3 --modes full --microbatches 4 --kinds --json collectives.json
    python benchmarks/collectives.py --dtype float32 --peak           # and the memory of a process

Two gloo processes on the CPU, a small Llama in bfloat16 (FSDP2: float32 weights that compute in bfloat16). No speed is
measured: a GPU runs the same collectives. The third step is counted, after the checks of a run's first step and after
ZeRO-3 has recorded the order of the layers.

calls    collectives that a process takes part in
bytes    bytes that a process sends, if all-reduce, reduce-scatter and all-gather go around a ring: with f = (n - 1) / n
         and S bytes in the whole tensor, 2fS for an all-reduce, fS for a reduce-scatter, an all-gather and a broadcast
control  collectives of dpllm's own group for small facts (checksums of the weights, counts, errors), which stay on the
         CPU. They are in no other column
plain    the same engine without dpllm, with its own settings. ZeRO-2 and -3 reduce each microbatch's gradient, because
         they do not store whole ones; DDP, ZeRO-1 and FSDP2 reduce once per step (``no_sync``)
peak     with --peak: the most memory that a process has resident, less that before the model was built; of a model of
         47 million parameters, in processes of their own. It has the CPU's weights and gloo's buffers, and counts
         pages that the allocator has not returned
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.setups import ENGINES
from tests.distributed.world import run

MODES = ("full", "lora")
MICROBATCHES = (1, 4)
STEPS = 3  # of which the last is counted
ROWS, TOKENS = 2, 8  # rows and tokens of a microbatch
LARGE = {"hidden": 512, "vocabulary": 32_000}  # where memory is measured
# Part of the name of an operation, the kind of the collective, passes around a ring.
_KINDS = (
    ("allreduce", "all-reduce", 2),
    ("all_reduce", "all-reduce", 2),
    ("reduce_scatter", "reduce-scatter", 1),
    ("allgather", "all-gather", 1),
    ("all_gather", "all-gather", 1),
    ("broadcast", "broadcast", 1),
)
_NAMESPACES, _NO_COLLECTIVES = ("c10d", "_c10d_functional"), ("wait_tensor", "wrap_tensor", "barrier")


@dataclass(frozen=True)
class Setting:
    """A way of training."""

    engine: str
    mode: str
    microbatches: int
    dtype: str = "bfloat16"
    hidden: int = 64
    vocabulary: int = 512


@dataclass
class Traffic:
    """The collectives of a step: their number and the bytes that a process sends, by kind; and those of control."""

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    control: int = 0


class Counting(TorchDispatchMode):
    """Counts the collectives that pass torch.distributed, also those of DDP's C++ reducer.

    Args:
        control: the group of small facts.
    """

    def __init__(self, control: dist.ProcessGroup) -> None:
        """Begin to count."""
        super().__init__()
        self.traffic, self._control = Traffic(), control

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES and not any(name in str(func) for name in _NO_COLLECTIVES):
            self._count(func, args, result)
        return result

    def _count(self, func: Any, args: tuple, result: Any) -> None:
        if any(_group(value) == self._control for value in args):
            self.traffic.control += 1
            return
        found = next((row for row in _KINDS if row[0] in str(func)), None)
        if found is None:
            raise RuntimeError(f"No rule for the collective {func}: add it, or the count is too small.")
        _, kind, passes = found
        # The whole tensor is the largest: the input of a reduce-scatter, the output of an all-gather.
        size = max(_num_bytes(value) for value in (*args, result))
        world = dist.get_world_size()
        self.traffic.calls[kind] += 1
        self.traffic.sent[kind] += passes * size * (world - 1) // world


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _group(value: Any) -> Any:
    """Return the process group that an argument of an operation is, or None."""
    with contextlib.suppress(Exception):
        return dist.ProcessGroup.unbox(value)
    return None


def build(setting: Setting) -> nn.Module:
    """Return a Llama of four layers, the same on every process."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.hidden,
        intermediate_size=setting.hidden * 5 // 2,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    if setting.mode == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.to(getattr(torch, setting.dtype)).train()


def private_steps(setting: Setting) -> Callable[[], None]:
    """Return a private step of this process, with its update."""
    from dpllm import per_sequence_loss
    from dpllm.data.units import UnitIndex
    from dpllm.engines import engine_for, model_inside
    from dpllm.mechanism.generators import NoiseSource
    from dpllm.training.choose_clipper import clipper_for
    from dpllm.training.microbatches import microbatches
    from dpllm.training.step import private_step
    from tests.distributed.matrix import plan_of
    from tests.distributed.setups import prepare
    from tests.memory_ledger import MemoryLedger

    model, optimizer = prepare(setting.engine, build(setting), 1e-3, setting.dtype)
    inner, engine = model_inside(model), engine_for(model, optimizer)
    rank, size = engine.processes.rank, engine.processes.size
    num_units = ROWS * setting.microbatches * size
    plan = plan_of(0.5, 1.0, num_units=num_units)
    clipper = clipper_for("ghost", inner, plan.mechanism.clipping)
    stream, ledger = plan.mechanism.noise.stream(NoiseSource(), plan.num_steps), MemoryLedger()
    rows = _rows(num_units, setting)

    def loss(inputs: Any) -> Tensor:
        return per_sequence_loss(inner(input_ids=inputs["input_ids"]).logits, inputs["labels"])

    def step() -> None:
        batch = microbatches(
            fetch=lambda numbers: [rows[int(number)] for number in numbers],
            collate=lambda chosen: {"input_ids": torch.stack(chosen), "labels": torch.stack(chosen)},
            units=UnitIndex.one_row_per_unit(num_units),
            lengths=np.full(num_units, TOKENS),
            unit_ids=np.arange(num_units),
            max_rows=ROWS,
            rank=rank,
            size=size,
        )
        private_step(clipper, batch, loss, plan, engine, ledger, stream)
        if not setting.engine.startswith("zero"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def plain_steps(setting: Setting) -> Callable[[], None]:
    """Return a step of this process without privacy, with its update."""
    from tests.distributed.setups import deepspeed_config, prepare

    model, rows, last = build(setting), _rows(ROWS, setting), setting.microbatches - 1
    if not setting.engine.startswith("zero"):
        prepared, optimizer = prepare(setting.engine, model, 1e-3, setting.dtype)

        def step() -> None:
            for number in range(setting.microbatches):
                if setting.engine == "fsdp2":
                    prepared.set_requires_gradient_sync(number == last)
                postponed = setting.engine == "ddp" and number < last
                with prepared.no_sync() if postponed else contextlib.nullcontext():
                    prepared(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    import deepspeed

    config = {
        **deepspeed_config(setting.engine, setting.dtype),
        "gradient_accumulation_steps": setting.microbatches,
        "gradient_clipping": 0.0,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    runner, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=1e-3), config=config)

    def step_of_deepspeed() -> None:
        for _ in range(setting.microbatches):
            runner.backward(runner(input_ids=rows, labels=rows).loss)
            runner.step()

    return step_of_deepspeed


def _rows(count: int, setting: Setting) -> Tensor:
    """Return (count, TOKENS) tokens."""
    return torch.randint(setting.vocabulary, (count, TOKENS), generator=torch.Generator().manual_seed(1))


def counted(settings: Sequence[Setting]) -> list[tuple[Traffic, Traffic]]:
    """Return the traffic of a step without privacy and of a private one; in each process."""
    from dpllm.engines.processes import _host_group

    found = []
    for setting in settings:
        pair = []
        for make in (plain_steps, private_steps):
            step = make(setting)
            for _ in range(STEPS - 1):
                step()
            with Counting(_host_group()) as counting:
                step()
            pair.append(counting.traffic)
        found.append((pair[0], pair[1]))
    return found


def resident(values: tuple, private: bool) -> int:
    """Return the peak bytes of this process in some steps of a setting, above those before the model was built."""
    setting = Setting(*values)
    import deepspeed
    import peft
    import transformers

    del deepspeed, peft, transformers  # imported before the memory is read
    before = psutil.Process().memory_info().rss
    step = (private_steps if private else plain_steps)(setting)
    for _ in range(STEPS):
        step()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def peaks(setting: Setting, folder: Path) -> tuple[int, int]:
    """Return `resident` of a large model, without privacy and with it."""
    large = astuple(replace(setting, **LARGE))  # a class of this program has another module in a fresh process
    plain, private = (
        run(folder / name, "benchmarks.collectives:resident", fresh=True, values=large, private=name == "private")
        for name in ("plain", "private")
    )
    return max(plain), max(private)


def in_two_processes(settings: Sequence[Setting], folder: Path) -> list[tuple[Traffic, Traffic]]:
    """Return `counted` of the first of two gloo processes."""
    return run(folder, "benchmarks.collectives:counted", settings=list(settings))[0]


def table(
    settings: Sequence[Setting],
    found: Sequence[tuple[Traffic, Traffic]],
    kinds: bool,
    memory: Sequence[tuple[int, int]] = (),
) -> str:
    """Return the figures as a Markdown table."""
    names = ["engine", "mode", "microbatches", "calls plain", "calls", "KB plain", "KB", "bytes ratio", "control"]
    names += ["peak MB plain", "peak MB", "peak ratio"] if memory else []
    lines = [names, ["---"] * len(names)]
    for number, (setting, (plain, private)) in enumerate(zip(settings, found, strict=True)):
        before, after = plain.sent.total(), private.sent.total()
        line = [setting.engine, setting.mode, str(setting.microbatches)]
        line += [str(plain.calls.total()), str(private.calls.total()), f"{before / 1e3:.1f}", f"{after / 1e3:.1f}"]
        line += [f"{after / before:.2f}", str(private.control)]
        if memory:
            least, most = memory[number]
            line += [f"{least / 1e6:.0f}", f"{most / 1e6:.0f}", f"{most / least:.2f}"]
        lines.append(line)
        for kind in sorted(plain.calls | private.calls) if kinds else ():
            line = ["", "", kind, str(plain.calls[kind]), str(private.calls[kind])]
            line += [f"{plain.sent[kind] / 1e3:.1f}", f"{private.sent[kind] / 1e3:.1f}"]
            lines.append([*line, *[""] * (len(names) - len(line))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--microbatches", nargs="+", type=int, default=list(MICROBATCHES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--peak", action="store_true", help="also the memory of a process, with a larger model")
    parser.add_argument("--kinds", action="store_true", help="also a line for each kind of collective")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args()
    ways = itertools.product(chosen.engines, chosen.modes, chosen.microbatches)
    settings = [Setting(*way, dtype=chosen.dtype) for way in ways]
    with tempfile.TemporaryDirectory() as folder:
        found = in_two_processes(settings, Path(folder))
        memory = [peaks(setting, Path(folder) / str(number)) for number, setting in enumerate(settings) if chosen.peak]
    print(table(settings, found, chosen.kinds, memory))
    if chosen.json:
        figures = [
            {**asdict(setting), "plain": vars(plain), "private": vars(private), "peaks": peak}
            for setting, (plain, private), peak in itertools.zip_longest(settings, found, memory)
        ]
        chosen.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
