"""Count the launches and the bytes of the sums of a private step, for the code that runs on a GPU.

    python benchmarks/launches.py --json launches.json             # all four modes, bytes
    python benchmarks/launches.py --modes full LoRA --operations   # which operations a private layer adds

A step is forward, backward, norms and clipped sums of a tiny Llama in bfloat16, without noise and optimizer, as in
throughput.py. No GPU is needed: the library takes the paths that it takes on a GPU, and the products run on the CPU.

launches    ATen operations that are neither views nor allocations; a launch of a Triton kernel is one. Figures of a
            layer are the difference of two depths. One operation may be several kernels on a GPU (index_put), so that
            this is a count for comparisons, not a profile
bytes       memory traffic of the clipped sums for each entry of a bfloat16 matrix: tensors of the matrix's size that
            the operations from the factors to ``.grad`` read or write. The noise is read and counted so; writing it is
            not counted. Without privacy a step writes 2
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from methods import OURS, PLAIN, GhostStep, Step
from throughput import Settings, batch_of, build_model, machine, twin

from dpllm.ghost import NormMethod, kernels, norm_method, triton_launch, triton_programs
from dpllm.ghost.sums import Sum
from dpllm.models.losses import per_sequence_loss

DEPTHS = (2, 3)
WHOLE = 16  # layers of the model to which the counts are extended
MODES = {
    "full": ("full", "none"),
    "full, checkpointing": ("full", "reentrant"),
    "LoRA": ("lora", "none"),
    "LoRA, checkpointing": ("lora", "reentrant"),
}
MICROBATCHES = 16  # of a step, for the bytes at many
# These lengths and widths take the same algorithms as a real model's: Gram norms of full weights, instances of factors.
TOKENS, WIDTH = 48, 64
VOCABULARY = 512
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
_NOTHING = ("_unsafe_view",)  # a view whose schema does not say so


# ------------------------------------------------------- the paths of a GPU


@dataclass
class Launches:
    """Counts of one piece of work.

    Attributes:
        operations: launches by the name of the operation or Triton program.
        bytes: memory traffic of tensors of the sizes asked for.
    """

    operations: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    @property
    def total(self) -> int:
        """All launches."""
        return self.operations.total()


class Counting(TorchDispatchMode):
    """Counts operations, and the traffic of tensors with one of some numbers of entries."""

    def __init__(self, sizes: frozenset[int] = frozenset()) -> None:
        """Start from nothing."""
        super().__init__()
        self.found, self._sizes = Launches(), sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run the operation; count it unless it is a view or an allocation."""
        name = func._overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in _ALLOCATES:
            return result.zero_()  # in place of garbage, which may not be finite
        if not func.is_view and name not in _NOTHING:
            self.found.operations[name] += 1
            self._traffic(func, args, kwargs or {}, result)
        return result

    def launch(self, name: str, arguments: tuple, options: dict[str, Any]) -> None:
        """Count a Triton launch: it reads or writes each matrix of sums that is passed, once for each time."""
        self.found.operations[name] += 1
        self.found.bytes += self._bytes((arguments, options))

    def _traffic(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        written = [argument.name for argument in func._schema.arguments if _is_written(argument)]
        for position, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            only_written = argument.name in written and (
                argument.name == "out" or func._overloadpacket.__name__ in ("zero_", "fill_", "copy_")
            )
            self.found.bytes += self._bytes(value) * (not only_written)
        self.found.bytes += self._bytes(result)

    def _bytes(self, value: Any) -> int:
        return sum(t.nbytes for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel() in self._sizes)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class Program:
    """Takes the place of a Triton program: a launch is counted, and leaves zeros in place of partial results."""

    def __init__(self, name: str, program: Any, mode: Counting | None) -> None:
        """Remember its name and which of its arguments are partial results."""
        names = inspect.signature(program.fn).parameters
        self._partial = [place for place, one in enumerate(names) if one.startswith("partial")]
        self._name, self._mode = name, mode

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the launch."""
        return self._launch

    def _launch(self, *arguments: Any, **options: Any) -> None:
        if self._mode is not None:
            self._mode.launch(self._name, arguments, options)
            return
        for place in self._partial:
            if arguments[place] is not None:
                arguments[place].zero_()  # without a kernel they are garbage, which may not be finite


def _wide_bmm(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.bmm(x.to(dtype), y.to(dtype))


def _wide_bmm_out(x: Tensor, y: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(_wide_bmm(x, y, dtype))


def _of_16_bits(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.bfloat16 for t in tensors)


@contextlib.contextmanager
def as_on_gpu(mode: Counting | None = None) -> Iterator[None]:
    """Take the paths of a GPU on the CPU: Triton launches are counted, 16-bit products return float32 in one launch."""
    library = torch.library.Library("aten", "IMPL")  # a CPU has no kernel of these
    library.impl("bmm.dtype", _wide_bmm, "CPU")
    library.impl("bmm.dtype_out", _wide_bmm_out, "CPU")
    programs = [name for name in vars(triton_programs) if name.endswith("_program")]
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for name in programs:
            stand_in = Program(name, getattr(triton_programs, name), mode)
            stack.enter_context(mock.patch.object(triton_programs, name, stand_in))
        stack.enter_context(mock.patch.object(triton_launch, "available", lambda: True))
        stack.enter_context(mock.patch.object(triton_launch, "INTERPRETED", True))
        stack.enter_context(mock.patch.object(kernels, "on_tensor_cores", _of_16_bits))
        stack.enter_context(mock.patch.object(norm_method, "_MORE_ON_CPU", 1))
        if mode is not None:
            stack.enter_context(mode)
        yield


# ------------------------------------------------------------------- counts


def settings_of(mode: str, layers: int) -> Settings:
    """Return the model and the batch of a mode at a depth."""
    trained, checkpointing = MODES[mode]
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": layers}
    return Settings(
        config=json.dumps(CONFIG | shape),
        mode=trained,
        rank=8,
        batch=2,
        tokens=TOKENS,
        dtype="bfloat16",
        checkpointing=checkpointing,
        device="cpu",
    )


def steps_of(settings: Settings) -> tuple[dict[str, Step], Tensor]:
    """Return a plain and a private step on the same weights, and the batch; the checks of a first batch are done."""
    model = build_model(settings)
    ids_BT = batch_of(settings, VOCABULARY)
    ours = GhostStep(twin(model), NormMethod(fused=False))
    ours.prepare(ids_BT)  # by values, which programs that do not run have not
    with as_on_gpu():
        ours.clipper.norm_method = NormMethod(fused=True)
    steps: dict[str, Step] = {PLAIN: Step(model), OURS: ours}
    for name, step in steps.items():
        for tokens_BT in (ids_BT[:, :4], ids_BT):
            counted(name, step, tokens_BT)
    return steps, ids_BT


def counted(name: str, step: Step, ids_BT: Tensor) -> Launches:
    """Return the launches of one step."""
    step.forget()
    counting = Counting()
    with as_on_gpu(counting) if name == OURS else counting:
        step.run(ids_BT)
    step.forget()
    _require_finite(step)
    return counting.found


@dataclass(frozen=True)
class Row:
    """The launches of one mode.

    Attributes:
        mode: its name.
        layer: of a layer, by `PLAIN` and `OURS`.
        whole: of a model of `WHOLE` layers.
        operations: of a layer, those that `OURS` adds to `PLAIN`, by name.
    """

    mode: str
    layer: dict[str, int]
    whole: dict[str, int]
    operations: dict[str, int]

    @property
    def ratio(self) -> float:
        """Launches of a layer, private / plain."""
        return self.layer[OURS] / self.layer[PLAIN]


def launches(mode: str) -> Row:
    """Count a mode at both depths."""
    found: list[dict[str, Launches]] = []
    for layers in DEPTHS:
        steps, ids_BT = steps_of(settings_of(mode, layers))
        found.append({name: counted(name, step, ids_BT) for name, step in steps.items()})
    shallow, deeper = found
    layer = {name: deeper[name].total - shallow[name].total for name in shallow}
    whole = {name: shallow[name].total + (WHOLE - DEPTHS[0]) * layer[name] for name in shallow}
    added: Counter[str] = Counter()
    for name, sign in ((OURS, 1), (PLAIN, -1)):
        for operation, number in deeper[name].operations.items():
            added[operation] += sign * (number - shallow[name].operations[operation])
    return Row(mode, layer, whole, {name: number for name, number in added.most_common() if number})


# -------------------------------------------------------------------- bytes


def sum_bytes(microbatches: int) -> float:
    """Return the bytes of traffic of the clipped sums for each entry of a matrix and microbatch, full fine-tuning."""
    steps, ids_BT = steps_of(settings_of("full", DEPTHS[0]))
    step = steps[OURS]
    assert isinstance(step, GhostStep)
    matrices = [p for p in step.clipper.parameters.values() if p.ndim == 2 and p.numel() not in _shared_sizes(ids_BT)]
    counting = Counting(frozenset(p.numel() for p in matrices))
    # Embedding and head have the same size; only the head's sum is a matrix product.
    table = step.model.get_input_embeddings().weight
    parameters = {name: p for name, p in step.clipper.parameters.items() if p is not table}
    entries = sum(p.numel() for p in parameters.values() if p.ndim == 2)

    def add_to(parameter: torch.nn.Parameter, total: Sum) -> None:
        if last:  # the noise is in it, whose own traffic is not counted
            total.is_empty = False
        step.clipper.add_clipped_sum_(parameter, total)

    for microbatch in range(microbatches):
        last = microbatch + 1 == microbatches
        with as_on_gpu():
            losses_B = per_sequence_loss(step.model(input_ids=ids_BT).logits, ids_BT)
            step.norms = step.clipper.clip(losses_B).norms
        _require_finite(step)
        with as_on_gpu(counting):
            step.engine.collect(parameters, add_to, last=last, scale=1.0)
    step.forget()
    return counting.found.bytes / entries / microbatches


def _shared_sizes(ids_BT: Tensor) -> set[int]:
    """Return the numbers of entries of activations, which would be taken for those of a matrix."""
    return {ids_BT.numel() * width for width in (WIDTH, 2 * WIDTH, VOCABULARY)}


def _require_finite(step: Step) -> None:
    """Refuse a step that clipped garbage: rows that are not finite are left out of the sums, so less is launched."""
    if step.norms is not None and not bool(torch.isfinite(step.norms).all()):
        raise RuntimeError("A norm is not finite: an argument of a Triton program holds garbage. Name it partial.")


# ------------------------------------------------------------- command line


def report(modes: list[str]) -> dict[str, Any]:
    """Return every figure, ready for json.dump."""
    rows = [launches(mode) for mode in modes]
    return {
        "machine": machine(torch.device("cpu")),
        "launches": {row.mode: asdict(row) for row in rows},
        "bytes_per_entry": {"1": sum_bytes(1), str(MICROBATCHES): sum_bytes(MICROBATCHES)},
    }


def printed(figures: dict[str, Any], operations: bool) -> str:
    """Return the figures as a table in Markdown, and two lines below it."""
    lines = [
        f"| mode | per layer: plain | private | ratio | {WHOLE} layers: plain | private |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mode, row in figures["launches"].items():
        layer, whole = row["layer"], row["whole"]
        lines.append(
            f"| {mode} | {layer[PLAIN]} | {layer[OURS]} | {layer[OURS] / layer[PLAIN]:.2f} | {whole[PLAIN]} | "
            f"{whole[OURS]} |"
        )
    found = figures["bytes_per_entry"]
    lines.append("")
    lines += [f"Bytes per entry of a matrix and microbatch, {count} in a step: {found[count]:.1f}" for count in found]
    if operations:
        for mode, row in figures["launches"].items():
            added = ", ".join(f"{name} {number:+d}" for name, number in row["operations"].items())
            lines += ["", f"{mode}, a private layer against a plain one: {added}"]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="the rows of the table")
    parser.add_argument("--operations", action="store_true", help="print which operations a private layer adds")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    if triton_programs.triton is None:
        parser.error("Triton is not installed, so the paths of a GPU cannot run; pip install triton")
    torch.set_num_threads(1)
    figures = report(options.modes)
    print(printed(figures, options.operations))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
