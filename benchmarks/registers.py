"""Registers, spills and shared memory of every Triton program, and how many are compiled; needs no GPU.

    python benchmarks/registers.py                       # all of it: compiles for sm_80, sm_90 and sm_100
    python benchmarks/registers.py --capability 90 --json registers.json
    python benchmarks/registers.py --count               # only counts the compilations, in seconds

The library's own functions launch the programs for 1000 microbatches of mixed length, of a Llama in full and with LoRA,
each of at most 4096 tokens. A hook of Triton sees every combination of types, constants and alignments that it would
compile (a *specialisation*), and no program runs. Each is then compiled once for each architecture by Triton, which
brings NVIDIA's assembler, and the figures are read from the machine code.

registers   of a thread; a multiprocessor has 65 536, so 128 for 8 warps lets two programs run on it at a time
spills      bytes of registers that did not fit and are stored in memory (STACK and LOCAL of cuobjdump); should be 0
shared      bytes of shared memory of a program
seconds     of this compilation, if it was not in Triton's cache
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from dpllm.ghost import kernels, triton_launch, triton_programs
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.norms import NormTally
from dpllm.ghost.sums import Sum, Weights
from dpllm.ghost.unit_gradients import Lookup, Outer, Rows

CAPABILITIES = (80, 90, 100)
COLUMNS = ("program", "sm", "registers", "spills", "shared", "warps", "seconds", "constants")
TOKENS_AT_ONCE = 4096
TENSOR_CORES = r"wgmma\.mma_async\.\S+|tcgen05\.mma|mma\.sync\.aligned\.\S+"
# Rows and tokens: ones, multiples of 16, the tiles' limits, and none of these.
EXTREMES = ((1, 1), (16, 1), (1, 16), (8, 17), (1, 64), (16, 65), (1, 1023), (4, 1024), (7, 512), (8, 512), (3, 100))


@dataclass(frozen=True)
class Specialisation:
    """A program as Triton would compile it."""

    name: str
    function: Any
    signature: dict[str, Any]
    constants: dict[tuple, Any]
    attributes: dict[tuple, Any]
    options: dict[str, Any]

    def words(self) -> str:
        """Return the constants that tell it from others of the same program."""
        names = [name for name, kind in self.signature.items() if kind == "constexpr" and name != "WIDEN"]
        places = {name: place for place, name in enumerate(self.signature)}
        return " ".join(f"{name}={self.constants.get((places[name],))}" for name in names)


class CompileOnly:
    """Triton's driver without a GPU: gives the target of compilations; nothing can run."""

    def __init__(self, capability: int) -> None:
        """Pretend to be a GPU of this compute capability."""
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Return the target."""
        return self._target

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


class Recorder:
    """Records the distinct specialisations that launches ask for, and keeps Triton from compiling and running them."""

    def __init__(self, capability: int) -> None:
        """Begin to record, with the tiles of this compute capability."""
        self.found: dict[str, Specialisation] = {}
        self.launches: dict[str, int] = {}
        driver.set_active(CompileOnly(capability))
        triton.knobs.runtime.jit_cache_hook = self._see
        # Tensors here are on the CPU, and never read.
        triton_launch._require = lambda name, *tensors: None
        triton_launch.available = lambda: True
        triton_launch.tile_of = lambda device, *more: triton_programs.tile_for(capability // 10, *more)

    def _see(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        name = fn.name.rpartition(".")[2]
        self.launches[name] = self.launches.get(name, 0) + 1
        if str((name, key)) not in self.found:
            options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
            self.found[str((name, key))] = Specialisation(
                name, fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], options
            )
        return True


@dataclass(frozen=True)
class Llama:
    """The sizes of a model."""

    hidden: int = 2048
    key_value: int = 512
    feed_forward: int = 8192
    vocabulary: int = 32_000
    rank: int = 16


def microbatches(count: int) -> Iterator[tuple[int, int]]:
    """Yield rows and tokens: first the extremes, then random ones of up to 1024 tokens, a third of them short."""
    draw = random.Random(0)
    yield from EXTREMES[:count]
    for _ in range(len(EXTREMES), count):
        tokens = draw.randint(1, 40) if draw.random() < 1 / 3 else draw.randint(1, 1024)
        yield draw.randint(1, max(1, TOKENS_AT_ONCE // tokens)), tokens


def activations(rows: int, tokens: int, width: int) -> Tensor:
    """Return a tensor without contents, whose memory is not touched."""
    return torch.empty(rows, tokens, width, dtype=torch.bfloat16)


def linear(x: Tensor, width: int, model: Llama, lora: bool) -> list[Outer]:
    """Return the uses of the trained matrices of one linear layer: the weight, or the two factors of LoRA."""
    rows, tokens, _ = x.shape
    grad = activations(rows, tokens, width)
    if not lora:
        return [Outer(grad, x, "right")]
    low, low_grad = (activations(rows, tokens, model.rank) for _ in range(2))
    return [Outer(low_grad, x, "right"), Outer(grad, low, "right")]


def uses(model: Llama, rows: int, tokens: int, lora: bool) -> Iterator[list[Outer]]:
    """Yield the uses of the matrices that read one activation: one layer, and the head where it is trained."""
    hidden, inner = model.hidden, model.feed_forward
    x = activations(rows, tokens, hidden)
    yield [use for width in (hidden, model.key_value, model.key_value) for use in linear(x, width, model, lora)]
    yield linear(activations(rows, tokens, hidden), hidden, model, lora)
    x = activations(rows, tokens, hidden)
    yield [use for width in (inner, inner) for use in linear(x, width, model, lora)]
    yield linear(activations(rows, tokens, inner), hidden, model, lora)
    if not lora:
        yield linear(activations(rows, tokens, hidden), model.vocabulary, model, lora)


def launch(model: Llama, rows: int, tokens: int, lora: bool, totals: dict[tuple, Tensor]) -> None:
    """Launch the norms and sums of one layer of a microbatch, as the clipper does."""
    method = NormMethod(fused=True)
    of_rows = Rows.of(torch.arange(rows), rows)
    tally = NormTally(of_rows, method, torch.float32)
    kept = [
        use
        for group in uses(model, rows, tokens, lora)
        for use in group
        if not method.holds_instance(use.factor_bytes(), use.instance_bytes(of_rows))
    ]
    if not lora:
        embedded = Lookup(
            torch.zeros(rows, tokens, dtype=torch.int64), activations(rows, tokens, model.hidden), model.vocabulary
        )
        tally.add([embedded])
    for use in kept:
        tally.add([use])
    tally.total()
    weights = Weights(torch.ones(rows))
    for use in kept:
        shape = torch.Size([use.left_BTL.shape[2], use.right_BTR.shape[2]])
        for total in sums(totals.setdefault(shape, torch.empty(shape))):
            use.add_weighted_(total, weights, method)


def sums(total: Tensor) -> Iterator[Sum]:
    """Yield the sums of a step's first microbatch, of a later one, and of the last one, also if it is the first."""
    for is_empty in (True, False):
        for is_last in (True, False):
            one = Sum.onto(total)
            one.is_empty = is_empty
            if is_last:
                one.finish_in(torch.bfloat16, 0.5)
            yield one


def record(count: int, capability: int) -> dict[str, Recorder]:
    """Return the specialisations in full and with LoRA."""
    recorders = {}
    for mode in ("full", "LoRA"):
        recorders[mode] = Recorder(capability)
        totals: dict[tuple, Tensor] = {}
        with kernels.exact_matmul(), torch.no_grad():
            for rows, tokens in microbatches(count):
                launch(Llama(), rows, tokens, mode == "LoRA", totals)
    return recorders


def compiled(one: Specialisation, capability: int) -> dict[str, Any]:
    """Compile for an architecture; return registers, spilled bytes, shared memory and the seconds it took."""
    began = time.perf_counter()
    source = ASTSource(one.function, one.signature, one.constants, one.attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=one.options)
    took = time.perf_counter() - began
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True)
    usage.check_returncode()
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout))
    return {
        "registers": int(found["REG"]),
        "spills": int(found["STACK"]) + int(found["LOCAL"]),
        "shared": kernel.metadata.shared,
        "warps": one.options["num_warps"],
        "seconds": round(took, 1),
        "instructions": sorted(set(re.findall(TENSOR_CORES, kernel.asm["ptx"]))),
    }


def cuobjdump() -> str:
    """Return the path of the tool, which Triton brings along."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def counts(found: dict[str, Specialisation]) -> dict[str, int]:
    """Return the number of compilations of each program."""
    names = [one.name for one in found.values()]
    return {name: names.count(name) for name in sorted(set(names))}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, action="append", help="80, 90, ...; default: 80, 90 and 100")
    parser.add_argument("--count", action="store_true", help="only count the compilations")
    parser.add_argument("--microbatches", type=int, default=1000, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    if options.microbatches < 1:
        parser.error(f"--microbatches is {options.microbatches}; at least 1 is needed")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Count, compile, print."""
    options = parse_arguments(arguments)
    report: dict[str, Any] = {"triton": triton.__version__, "compilations": {}, "programs": []}
    for place, capability in enumerate(options.capability or CAPABILITIES):
        # The number of programs does not depend on the architecture, only their tiles do.
        recorders = record(options.microbatches if place == 0 else len(EXTREMES), capability)
        together = {key: one for recorder in recorders.values() for key, one in recorder.found.items()}
        if place == 0:
            report["compilations"] = {mode: counts(recorder.found) for mode, recorder in recorders.items()}
            report["compilations"]["both"] = counts(together)
            for mode, found in report["compilations"].items():
                print(f"{mode}: {sum(found.values())} compilations over {options.microbatches} microbatches {found}")
            if options.count:
                break
            print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for one in sorted(together.values(), key=lambda one: one.name):
            row = {"program": one.name, "sm": capability, "constants": one.words(), **compiled(one, capability)}
            report["programs"].append(row)
            print(f"| {' | '.join(str(row[column]) for column in COLUMNS)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
