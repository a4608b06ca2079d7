"""Compare each fused kernel with its PyTorch form and with the best possible time of the device.

    python benchmarks/kernel_times.py                                    # on CUDA: times; elsewhere: counts and errors
    python benchmarks/kernel_times.py --json kernels.json --rounds 50
    python benchmarks/kernel_times.py --peak-tflops 989 --bandwidth 4.8  # of a GPU that is not in the table
    python benchmarks/kernel_times.py --dtype float32 --only gram

roofline    max(operations / peak rate, bytes / bandwidth): the operations are those that the kernel cannot do without
            (for the Gram form T (T + 1) (D + P) per row, one triangle), the bytes are each input once and the result.
            Peak rates are the data sheet's, dense, or --peak-tflops and --bandwidth
fused, PyTorch
            medians over the rounds, by CUDA events, in turn, warm, with the L2 cache overwritten in between; launches
            are in it, as in a training step. In brackets: time / roofline, 1 is the limit
error       largest relative error of a result against the same in float64 on the same inputs
slack       for Gram norms, how much too small the norm came out, in units of the allowed margin
            (`dpllm.ghost.kernels.rounding_slack` times the mass): above 1 the clipped gradient may exceed its bound.
            The rows of positive entries are there for it: all terms of a sum then have one sign

Without CUDA the kernels run in Triton's interpreter on tiny shapes, and no time is measured: an interpreter's would say
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from dpllm.ghost import kernels, triton_launch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COLUMNS = (
    *("kernel", "shape", "GFLOP", "MB", "roofline µs", "fused µs", "PyTorch µs"),
    *("error", "PyTorch error", "slack", "PyTorch slack"),
)
KERNELS = ("gram", "instance", "weighted sum", "lookup")

# Dense peak rates in TFLOP/s for 16-bit inputs on tensor cores and for float32 outside of them, and memory bandwidth
# in TB/s, by a part of the device's name; from NVIDIA's data sheets (half of the figures given "with sparsity").
KNOWN_GPUS = {
    "H200": (989.0, 67.0, 4.8),
    "H100 80GB HBM3": (989.0, 67.0, 3.35),
    "H100 PCIe": (756.0, 51.0, 2.0),
    "A100-SXM4-80GB": (312.0, 19.5, 2.039),
    "A100-SXM4-40GB": (312.0, 19.5, 1.555),
    "L40S": (362.0, 91.6, 0.864),
}

# (B, T, D, widths of the output gradients): Llama 1B and 8B, one layer, q + k + v, gate + up, the head.
GRAM_SHAPES = [
    (8, 512, 2048, (2048,)),
    (8, 512, 2048, (2048, 512, 512)),
    (8, 512, 2048, (8192, 8192)),
    (8, 512, 8192, (2048,)),
    (8, 1024, 2048, (8192, 8192)),
    (8, 512, 2048, (32_000,)),
    (4, 512, 4096, (4096, 1024, 1024)),
    (4, 512, 4096, (14_336, 14_336)),
    (2, 2048, 4096, (14_336,)),
    (64, 37, 2048, (2048,)),
]
POSITIVE_SHAPES = [(8, 1, 14_336, (14_336,)), (8, 512, 14_336, (4096,))]
INSTANCE_SHAPES = [(8, 512, 2048, 16), (8, 4096, 2048, 2048), (2, 4096, 2048, 512), (2, 8192, 4096, 1024)]
SUM_SHAPES = [(8, 512, 2048, 2048), (8, 512, 2048, 8192), (8, 512, 32_000, 2048), (4, 512, 4096, 14_336)]
LOOKUP_SHAPES = [(8, 512, 2048, 32_000), (4, 512, 4096, 128_256), (64, 37, 2048, 32_000)]
TINY: dict[str, list] = {
    "gram": [(2, 17, 48, (80,)), (2, 70, 33, (16, 7))],
    "positive": [(2, 1, 300, (200,))],
    "instance": [(2, 17, 48, 80)],
    "weighted sum": [(2, 17, 48, 80)],
    "lookup": [(2, 17, 48, 9)],
}
FULL: dict[str, list] = {
    "gram": GRAM_SHAPES,
    "positive": POSITIVE_SHAPES,
    "instance": INSTANCE_SHAPES,
    "weighted sum": SUM_SHAPES,
    "lookup": LOOKUP_SHAPES,
}


@dataclass(frozen=True)
class Case:
    """One kernel on one shape.

    Attributes:
        kernel: one of `KERNELS`.
        shape: in words.
        fused: runs the kernel; returns its result, and for Gram norms the mass.
        plain: the same in PyTorch.
        exact: the result in float64.
        flops: operations that cannot be avoided.
        bytes: of inputs and result.
    """

    kernel: str
    shape: str
    fused: Callable[[], tuple[Tensor, Tensor | None]]
    plain: Callable[[], tuple[Tensor, Tensor | None]]
    exact: Callable[[], Tensor]
    flops: int
    bytes: int


def random(*shape: int, dtype: torch.dtype, device: torch.device, positive: bool = False) -> Tensor:
    """Normal entries; their sizes where ``positive``."""
    x = torch.randn(shape, device=device)
    return (x.abs() if positive else x).to(dtype)


def gram_case(shape: tuple, dtype: torch.dtype, device: torch.device, positive: bool = False) -> Case:
    """Norms of one or more linear layers on one input."""
    rows, tokens, width, widths = shape
    a = random(rows, tokens, width, dtype=dtype, device=device, positive=positive)
    grads = [random(rows, tokens, p, dtype=dtype, device=device, positive=positive) for p in widths]

    def fused() -> tuple[Tensor, Tensor]:
        sq_norm_1B, mass_1B = triton_launch.grouped_gram_norms([(a, grads)])
        return sq_norm_1B[0], mass_1B[0]

    return Case(
        kernel="gram",
        shape=f"B={rows} T={tokens} D={width} P={'+'.join(map(str, widths))}{', positive' if positive else ''}",
        fused=fused,
        plain=lambda: kernels.gram_norms(a, grads),
        exact=lambda: kernels.gram_norms(a.double(), [g.double() for g in grads])[0],
        flops=rows * tokens * (tokens + 1) * (width + sum(widths)),
        bytes=sum(x.nbytes for x in (a, *grads)) + 8 * rows,
    )


def instance_case(shape: tuple, dtype: torch.dtype, device: torch.device) -> Case:
    """Norms by way of the gradient, which PyTorch writes and reads again."""
    rows, tokens, left, right = shape
    x, y = (random(rows, tokens, width, dtype=dtype, device=device) for width in (left, right))
    return Case(
        kernel="instance",
        shape=f"B={rows} T={tokens} L={left} R={right}",
        fused=lambda: (triton_launch.instance_norms(x, y), None),
        plain=lambda: (kernels.instance_norms(x, y), None),
        exact=lambda: kernels.gram_norms(x.double(), [y.double()])[0],
        flops=2 * rows * tokens * left * right,
        bytes=x.nbytes + y.nbytes + 4 * rows,
    )


def weighted_sum_case(shape: tuple, dtype: torch.dtype, device: torch.device) -> Case:
    """The clipped sum of a linear layer. Ordinary training's weight gradient is the same product without factors."""
    rows, tokens, left, right = shape
    x, y = (random(rows, tokens, width, dtype=dtype, device=device) for width in (left, right))
    factor = torch.rand(rows, device=device)

    def fused() -> Tensor:
        sum_LR = torch.empty(left, right, device=device)
        triton_launch.weighted_outer_(sum_LR, None, x, y, factor)
        return sum_LR

    def plain(x: Tensor, y: Tensor, factor: Tensor) -> Tensor:
        sum_LR = torch.empty(left, right, dtype=kernels.accumulation_dtype(x.dtype), device=device)
        kernels.add_weighted_outer_(sum_LR, x, y, factor, is_empty=True)
        return sum_LR

    return Case(
        kernel="weighted sum",
        shape=f"B={rows} T={tokens} L={left} R={right}",
        fused=lambda: (fused(), None),
        plain=lambda: (plain(x, y, factor), None),
        exact=lambda: plain(x.double(), y.double(), factor.double()),
        flops=2 * rows * tokens * left * right,
        bytes=x.nbytes + y.nbytes + 4 * left * right,
    )


def lookup_case(shape: tuple, dtype: torch.dtype, device: torch.device) -> Case:
    """Norms of an embedding; the tokens are drawn as in text, the n-th most frequent with probability ~ 1 / n."""
    rows, tokens, width, entries = shape
    frequency = 1 / torch.arange(1, entries + 1, device=device)
    index = torch.multinomial(frequency.expand(rows, -1), tokens, replacement=True)
    right = random(rows, tokens, width, dtype=dtype, device=device)
    unit_B = torch.arange(rows, device=device)
    return Case(
        kernel="lookup",
        shape=f"B={rows} T={tokens} R={width} V={entries}",
        fused=lambda: (triton_launch.lookup_norms(index, right, unit_B, rows, entries), None),
        plain=lambda: (kernels.lookup_norms(index, right, unit_B, rows, entries), None),
        exact=lambda: kernels.lookup_norms(index, right.double(), unit_B, rows, entries),
        flops=rows * tokens * width,
        bytes=index.nbytes + right.nbytes + 4 * rows,
    )


def cases(only: list[str], dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """One after another, so that the inputs of one are gone before the next."""
    shapes = FULL if device.type == "cuda" else TINY
    makers = {
        "instance": instance_case,
        "weighted sum": weighted_sum_case,
        "lookup": lookup_case,
    }
    for kernel in only:
        if kernel == "gram":
            yield from (gram_case(shape, dtype, device) for shape in shapes["gram"])
            yield from (gram_case(shape, dtype, device, positive=True) for shape in shapes["positive"])
        else:
            yield from (makers[kernel](shape, dtype, device) for shape in shapes[kernel])


def errors(case: Case, form: str) -> dict[str, float | None]:
    """Largest relative error of one form against float64, and the share of the slack that it takes."""
    value, mass = getattr(case, form)()
    exact = case.exact()
    scale = exact.abs() if mass is not None or exact.ndim == 1 else torch.linalg.vector_norm(exact, dim=1, keepdim=True)
    relative = float(((value.double() - exact).abs() / scale).max())
    slack = None
    if mass is not None:
        # As the clipper computes it, for a result in float32.
        slack = float(((exact - value.double()) / (kernels.rounding_slack(value.dtype) * mass.double())).max())
    return {"error": relative, "slack_used": slack}


def times_ms(functions: dict[str, Callable[[], Any]], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Times of each by CUDA events, taken in turn, the L2 cache overwritten before each."""
    cache = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    results: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + rounds):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if turn >= warmup:
                results[name].append(start.elapsed_time(end))
    return results


def measure(
    case: Case, options: argparse.Namespace, peak_tflops: float | None, bandwidth: float | None
) -> dict[str, Any]:
    """All figures of one case."""
    figures: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "flops": case.flops, "bytes": case.bytes}
    if peak_tflops and bandwidth:
        figures["roofline_ms"] = 1e3 * max(case.flops / (peak_tflops * 1e12), case.bytes / (bandwidth * 1e12))
    with kernels.exact_matmul(), torch.no_grad():
        for form in ("fused", "plain"):
            figures[form] = errors(case, form)
        if torch.cuda.is_available():
            timed = times_ms({"fused": case.fused, "plain": case.plain}, options.rounds, options.warmup)
            for form, times in timed.items():
                figures[form] |= {"median_ms": statistics.median(times), "times_ms": times}
    return figures


def device_rates(options: argparse.Namespace) -> tuple[float | None, float | None]:
    """Peak TFLOP/s for the dtype and TB/s: as given, or of a known GPU; None where there is no GPU."""
    peak, bandwidth = options.peak_tflops, options.bandwidth
    if not torch.cuda.is_available() or (peak and bandwidth):
        return peak, bandwidth
    name = torch.cuda.get_device_name()
    for part, (tensor, single, memory) in KNOWN_GPUS.items():
        if part in name:
            return peak or (single if options.dtype == "float32" else tensor), bandwidth or memory
    raise SystemExit(f"{name} is not in the table of known GPUs: give --peak-tflops and --bandwidth (TB/s).")


def machine() -> dict[str, str | int]:
    """Return the machine of the figures."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, Triton's interpreter",
        "torch": torch.__version__,
        "triton": triton_launch.triton.__version__,
        "python": platform.python_version(),
    }


def markdown(report: dict[str, Any]) -> str:
    """The figures as a table."""
    where = report["machine"]
    lines = [
        f"{where['device']}, PyTorch {where['torch']}, Triton {where['triton']}, {report['dtype']}. "
        + (
            f"Peak {report['peak_tflops']:g} TFLOP/s, {report['bandwidth']:g} TB/s."
            if report["timed"]
            else "No CUDA device: no time was measured."
        ),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---:|" * (len(COLUMNS) - 2),
    ]
    for row in report["cases"]:
        roofline = row.get("roofline_ms")
        cells = [row["kernel"], row["shape"], f"{row['flops'] / 1e9:.4g}", f"{row['bytes'] / 1e6:.4g}"]
        cells.append(f"{1e3 * roofline:.3g}" if roofline else "-")
        for form in ("fused", "plain"):
            time = row[form].get("median_ms")
            cells.append(f"{1e3 * time:.1f} ({time / roofline:.2f})" if time and roofline else "-")
        cells += [f"{row[form]['error']:.1e}" for form in ("fused", "plain")]
        cells += ["-" if (used := row[form]["slack_used"]) is None else f"{used:.2f}" for form in ("fused", "plain")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""

    class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of activations and gradients")
    parser.add_argument("--only", choices=KERNELS, action="append", help="only this kernel; may be repeated")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each form")
    parser.add_argument("--warmup", type=int, default=5, help="runs before that")
    parser.add_argument("--peak-tflops", type=float, help="dense peak rate for the dtype, in TFLOP/s")
    parser.add_argument("--bandwidth", type=float, help="memory bandwidth, in TB/s")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    for name in ("rounds", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    for name in ("peak_tflops", "bandwidth"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be positive")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    if not triton_launch.available():
        raise SystemExit("Triton is not installed here, so there is no kernel to measure; pip install 'triton>=3.4'.")
    peak_tflops, bandwidth = device_rates(options)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {
        "machine": machine(),
        "dtype": options.dtype,
        "timed": device.type == "cuda",
        "peak_tflops": peak_tflops,
        "bandwidth": bandwidth,
        "cases": [
            measure(case, options, peak_tflops, bandwidth)
            for case in cases(options.only or list(KERNELS), DTYPES[options.dtype], device)
        ],
    }
    print(markdown(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
