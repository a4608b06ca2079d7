"""Compare norms and clipped sums with a float64 loop over rows, eager and compiled, on every engine; count graphs.

    python benchmarks/compiled.py                                             # everything, about an hour on two cores
    python benchmarks/compiled.py --models llama --engines single ddp --json compiled.json
    python benchmarks/compiled.py --modes eager --graphs no

A cell has the larger relative error of the rows' norms and of the clipped sum of all processes, which is compared with
the loop's by the factors that were used. A step without units, in which first checks happen, comes before it. [n] is a
reason below the table: why the cell is refused, or why some blocks of it stay eager. Models are tiny and random
(tests/reference/zoo.py), in float32. A loop differentiates each row alone in float64, from the values to which a
quantised base is rounded. Engines other than "single" are two gloo processes on the CPU.

graphs      graphs that torch.compile made over 20 pairs of rows and tokens, of plain and of private training, each
            block class's forward compiled once. One that private training adds for a second shape is expected
breaks      graph breaks, which should be 0
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from methods import compile_blocks

from dpllm import GhostClipper, per_sequence_loss
from tests import children
from tests.distributed.world import run
from tests.reference.oracle import relative_error, row_gradients
from tests.reference.zoo import CHECKPOINTING, MODES, VOCABULARY_SIZE, Batch, Case, build_model, make_batch

MODELS = {"gpt2": ("gpt2-without-dropout", True), "llama": ("llama", False)}
MODELS |= {name: (name, False) for name in ("qwen3", "mixtral")}
TRAINED = ("full", "LoRA", "QLoRA")
WAYS = ("eager", "compiled")
ENGINES = ("single", "ddp", "fsdp2", "zero2", "zero3")
NUM_ROWS = 7  # over two processes: unequal shares, so that one has a padding row
LR = 1e3  # of SGD, whose movement is the sum
SHAPES = tuple(itertools.product((2, 3, 5, 8), (7, 9, 12, 16, 23)))  # rows, tokens


@dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        model: a key of `MODELS`.
        trained: one of `TRAINED`.
    """

    model: str
    trained: str

    @property
    def case(self) -> Case:
        """The case of the zoo, whose base QLoRA quantises."""
        family, tied = MODELS[self.model]
        # PEFT's all-linear wraps the experts of Mixtral as parameters.
        lora = "lora-attention" if self.model == "mixtral" else "lora-all-linear"
        return Case(family, "full" if self.trained == "full" else lora, tied, "float32")

    def build(self) -> tuple[nn.Module, nn.Module]:
        """Return the model in training mode, and a copy in float64 with the same values."""
        model, wide = self._built()
        if self.case.spec.experts:  # transformers' default, which has no float64; its loop over experts breaks graphs
            model.set_experts_implementation("grouped_mm")
        return model, wide

    def _built(self) -> tuple[nn.Module, nn.Module]:
        if self.trained != "QLoRA":
            model = build_model(self.case)
            return model, copy.deepcopy(model).double()
        import bitsandbytes.functional as quantized
        import transformers
        from safetensors.torch import save_model

        base = build_model(self.case.but(mode="full"))
        settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        settings.bnb_4bit_compute_dtype = torch.float32
        with tempfile.TemporaryDirectory() as folder:
            base.config.save_pretrained(folder)  # the model's own function writes only in the first process
            save_model(base, str(Path(folder, "model.safetensors")), metadata={"format": "pt"})
            loaded = type(base).from_pretrained(folder, quantization_config=settings, dtype=torch.float32)
        loaded.config.use_cache = False
        adapted = functools.partial(MODES[self.case.mode], self.case.spec)
        with torch.no_grad():
            for path, module in loaded.named_modules():
                if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
                    value = quantized.dequantize_4bit(module.weight.data, module.weight.quant_state)
                    base.get_submodule(path).weight.copy_(value.T if self.case.spec.conv1d else value)
        model, wide = adapted(loaded), adapted(base)
        generator, factors = torch.Generator().manual_seed(0), dict(wide.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:  # both factors are random, so that both have gradients
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
                    factors[name].copy_(parameter)
        return model.train(), wide.double().train()


@dataclass
class Cell:
    """One way of training on one engine.

    Attributes:
        training: the model and what is trained.
        way: one of `WAYS`.
        checkpointing: of activations.
        engine: one of `ENGINES`.
        norm_error: largest relative error of a row's norm.
        sum_error: relative error of the clipped sum, in the l2 norm.
        refused: why there are no errors.
        eager: reasons of blocks that stay eager, by path.
        graphs: that were compiled.
    """

    training: Training
    way: str
    checkpointing: str
    engine: str
    norm_error: float | None = None
    sum_error: float | None = None
    refused: str = ""
    eager: dict[str, str] = field(default_factory=dict)
    graphs: int = 0


class Recording(GhostClipper):
    """A clipper that records norms and factors by row; each row is a unit, and ``row`` in the inputs is its number."""

    rows: dict[int, tuple[float, float]]

    def run(self, loss_of: Any, inputs: Mapping[str, Any], unit_index: Tensor | None = None, finish: Any = None) -> Any:
        """See `GhostClipper.run`."""
        losses, result = super().run(loss_of, inputs, unit_index, finish)
        for row, unit in zip(inputs["row"].tolist(), unit_index.tolist(), strict=True):
            if unit >= 0:
                self.rows[row] = float(result.norms[unit]), float(result.factors[unit])
        return losses, result


def measured(cells: list[Cell], backend: str) -> list[Cell]:
    """Fill in the errors of cells of one training and engine; in each process of the engine."""
    _quiet()
    training = cells[0].training
    model, wide = training.build()
    batch = make_batch(training.case.spec, num_rows=NUM_ROWS)
    rows_BP = row_gradients(wide, "causal_lm", batch)  # first: ZeRO-3 puts its own linear function in place
    for cell in cells:
        _reset()
        try:
            _fill(cell, copy.deepcopy(model), batch, rows_BP, backend)
        except Exception as error:
            cell.refused = _reason(error)
    return cells


def _fill(cell: Cell, model: nn.Module, batch: Batch, rows_BP: Tensor, backend: str) -> None:
    from dpllm.engines import engine_for, model_inside
    from dpllm.mechanism.generators import NoiseSource
    from dpllm.training.step import private_step
    from tests.distributed.matrix import flat, plan_of
    from tests.distributed.setups import dispose, prepare, update, whole_parameters
    from tests.memory_ledger import MemoryLedger
    from tests.reference.zoo import enable_checkpointing

    norms_B = rows_BP.norm(dim=1)
    clip_norm = float(norms_B.median())
    plan, ledger = plan_of(clip_norm, noise_multiplier=0.0), MemoryLedger()
    prepared, optimizer = prepare(cell.engine, model, LR)
    clipper: Any = None
    try:
        inner = model_inside(prepared)
        enable_checkpointing(inner, cell.checkpointing)
        runner = engine_for(prepared, optimizer)
        clipper = Recording(inner, clipping=plan.mechanism.clipping)
        clipper.rows = {}
        if cell.way == "compiled":
            clipper.compile(backend=backend)
        stream = plan.mechanism.noise.stream(NoiseSource(), plan.num_steps)
        before = whole_parameters(prepared, inner)
        for units in ([], list(range(NUM_ROWS))):  # the first step moves nothing
            mine = _microbatches(batch, units, runner.processes)
            private_step(clipper, mine, functools.partial(_losses, inner), plan, runner, ledger, stream)
            update(prepared, optimizer)
            cell.eager = {path: str(reason) for path, reason in clipper.compiled.eager.items()}
        moved = flat(before) - flat(whole_parameters(prepared, inner))
    finally:
        if clipper is not None:
            clipper.remove()
        dispose(prepared)
    found = _of_all_processes(clipper.rows)
    factors_B = torch.tensor([found[row][1] for row in range(NUM_ROWS)], dtype=torch.float64)
    norms = torch.tensor([found[row][0] for row in range(NUM_ROWS)], dtype=torch.float64)
    cell.norm_error = float((norms / norms_B - 1).abs().max())
    cell.sum_error = relative_error(moved / LR * plan.expected_batch_size, factors_B @ rows_BP)
    cell.graphs, _ = _counts()
    if cell.way == "compiled" and not cell.graphs:
        raise RuntimeError("nothing was compiled")


def _microbatches(batch: Batch, units: list[int], processes: Any) -> Any:
    """Return the microbatch of a process: its share of the rows, each a unit."""
    from dpllm.data.units import UnitIndex
    from dpllm.training.microbatches import microbatches

    def collate(rows: list[int]) -> dict[str, Tensor]:
        return {**batch.rows(rows).inputs, "labels": batch.labels[rows], "row": torch.tensor(rows)}

    return microbatches(
        fetch=lambda rows: [int(row) for row in rows],
        collate=collate,
        units=UnitIndex.from_ids(list(range(NUM_ROWS))),
        lengths=batch.inputs["attention_mask"].sum(1).numpy(),
        unit_ids=np.array(units, dtype=np.int64),
        max_rows=NUM_ROWS,
        rank=processes.rank,
        size=processes.size,
    )


def _of_all_processes(rows: dict[int, Any]) -> dict[int, Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    return {row: value for part in parts for row, value in part.items()}


def _losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    named = {name: value for name, value in inputs.items() if name not in ("labels", "row")}
    return per_sequence_loss(model(**named).logits, inputs["labels"])


def _reason(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("transformers", "torch._dynamo", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


# ------------------------------------------------------------------- graphs


@dataclass
class Graphs:
    """Compilations over `SHAPES`.

    Attributes:
        training: the model and what is trained.
        plain: graphs and breaks without privacy; None where its process failed.
        private: the same with privacy; None where it is refused.
        eager: reasons of blocks that stay eager, by path, or of the refusal.
    """

    training: Training
    plain: tuple[int, int] | None
    private: tuple[int, int] | None
    eager: dict[str, str]


def graphs_of(training: Training, backend: str) -> Graphs:
    """Count the graphs of plain and private training over rows and tokens that vary."""
    _quiet()

    def batches() -> Iterable[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for shape in SHAPES:
            ids = torch.randint(4, VOCABULARY_SIZE, shape, generator=generator)
            yield {"input_ids": ids, "labels": ids}

    _reset()
    model, _ = training.build()
    compile_blocks(model, backend, dynamic=None)
    for inputs in batches():
        _losses(model, inputs).sum().backward()
    plain = _counts()
    _reset()
    model, _ = training.build()
    clipper: Any = GhostClipper(model, clip_norm=1.0)
    try:
        clipper.compile(backend=backend)
        for inputs in batches():
            clipper.backward(_losses(model, inputs))
        eager = dict(clipper.compiled.eager)
    except Exception as error:
        return Graphs(training, plain, None, {"": _reason(error)})
    finally:
        clipper.remove()
    return Graphs(training, plain, _counts(), eager)


def _reset() -> None:
    torch._dynamo.reset()
    counters.clear()


def _counts() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# ------------------------------------------------------------- command line


def errors(options: argparse.Namespace, folder: Path) -> list[Cell]:
    """Return all cells; each training and engine has processes of its own, so that a crash takes no other cell."""
    found = []
    for place, (model, trained, engine) in enumerate(
        itertools.product(options.models, options.trained, options.engines)
    ):
        ways = itertools.product(options.modes, options.checkpointing)
        cells = [Cell(Training(model, trained), way, checkpointing, engine) for way, checkpointing in ways]
        try:
            found += _of_processes(cells, options.backend, folder / str(place))
        except AssertionError:  # one cell at a time
            for number, cell in enumerate(cells):
                try:
                    found += _of_processes([cell], options.backend, folder / f"{place}.{number}")
                except AssertionError as error:
                    cell.refused = f"a process crashed or hung: {str(error).strip().splitlines()[-1]}"
                    found.append(cell)
        print(f"{model}, {trained}, {engine}: {' '.join(map(_shown, found[-len(cells) :]))}", file=sys.stderr)
    return found


def _of_processes(cells: list[Cell], backend: str, folder: Path) -> list[Cell]:
    size = 1 if cells[0].engine == "single" else 2
    ranks = run(folder, "benchmarks.compiled:measured", size=size, cells=cells, backend=backend)
    return [_joined(same) for same in zip(*ranks, strict=True)]


def _joined(same: tuple[Cell, ...]) -> Cell:
    """Return the cell of all processes: the largest errors, the first refusal."""
    cell = same[0]
    cell.refused = next((one.refused for one in same if one.refused), "")
    if not cell.refused:
        cell.norm_error = float(np.max([one.norm_error for one in same]))  # a NaN is the largest
        cell.sum_error = float(np.max([one.sum_error for one in same]))
    return cell


def _shown(cell: Cell) -> str:
    return "refused" if cell.refused else f"{np.max([cell.norm_error, cell.sum_error]):.1e}"


def errors_table(cells: list[Cell]) -> str:
    """Return the errors, and the reasons below them."""
    engines = list(dict.fromkeys(cell.engine for cell in cells))
    head = ["model", "trained", "", "checkpointing", *engines]
    lines, reasons = [head, ["---"] * len(head)], {}
    keys = dict.fromkeys((cell.training, cell.way, cell.checkpointing) for cell in cells)
    for training, way, checkpointing in keys:
        line = [training.model, training.trained, way, checkpointing]
        for cell in cells:
            if (cell.training, cell.way, cell.checkpointing) != (training, way, checkpointing):
                continue
            notes = [cell.refused] if cell.refused else sorted(set(cell.eager.values()))
            marks = "".join(f" [{reasons.setdefault(note, len(reasons) + 1)}]" for note in notes)
            line.append(f"{'-' if cell.refused else _shown(cell)}{marks}")
        lines.append(line)
    text = [f"| {' | '.join(line)} |" for line in lines]
    text += ["", *(f"[{number}] {reason}  " for reason, number in reasons.items())]
    return "\n".join(text)


def graphs_table(graphs: list[Graphs]) -> str:
    """Return the counts."""
    text = ["| model | trained | plain: graphs | breaks | private: graphs | breaks | blocks that stay eager |"]
    text.append("|---|---|---|---|---|---|---|")
    for one in graphs:
        counts = [*(one.plain or ("-", "-")), *(one.private or ("-", "-"))]
        eager = "; ".join(f"{path or 'refused'}: {reason}" for path, reason in one.eager.items()) or "none"
        text.append(f"| {' | '.join([one.training.model, one.training.trained, *map(str, counts), eager])} |")
    return "\n".join(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (
        ("models", MODELS),
        ("trained", TRAINED),
        ("modes", WAYS),
        ("checkpointing", CHECKPOINTING),
        ("engines", ENGINES),
    ):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices))
    parser.add_argument("--graphs", choices=("yes", "no"), default="yes", help="whether graphs are counted")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds for the cells of an engine (default %(default)s)"
    )
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(children, "LIMIT", options.limit):
        cells = errors(options, Path(folder))
        print(errors_table(cells), flush=True)
        figures["cells"] = [asdict(cell) for cell in cells]
        _write(figures, options.json)
        if options.graphs == "yes":
            graphs = [
                _counted(Training(model, trained), options.backend, Path(folder) / f"graphs-{model}-{trained}")
                for model, trained in itertools.product(options.models, options.trained)
            ]
            print(f"\n{graphs_table(graphs)}")
            _write(figures | {"graphs": [asdict(one) for one in graphs]}, options.json)


def _counted(training: Training, backend: str, folder: Path) -> Graphs:
    try:
        (found,) = run(folder, "benchmarks.compiled:graphs_of", size=1, training=training, backend=backend)
    except AssertionError as error:
        return Graphs(training, None, None, {"": f"the process crashed or hung: {str(error).strip().splitlines()[-1]}"})
    return found


def _write(figures: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    from benchmarks import compiled  # the processes unpickle its classes by this name

    compiled.main()
