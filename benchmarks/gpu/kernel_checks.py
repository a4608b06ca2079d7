"""Checks of step 7: kernels with their times, rounding, noise, TF32, packed rows, other models."""

from __future__ import annotations

import argparse
import contextlib
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import kernel_times
import numpy as np
import scipy.stats
import torch

from dpllm.ghost import NormMethod, kernels
from dpllm.ghost.norm_method import _MOST, _SHAPES, shortfalls, slack_factor
from dpllm.ghost.sums import Sum, Weights
from dpllm.mechanism.chacha20 import KEY_BYTES, ChaCha20Normals, DeviceNormals
from dpllm.mechanism.generators import ENTRIES_AT_A_TIME, NoiseSource, philox
from gpu.record import Figures, Skipped, shown
from gpu.setting import ROOT, Setting, free_memory
from tests.ghost.test_kernels import WAYS, flags, reset_matmul_settings
from tests.invariant.test_packed_rows import packed_sum, reference, rows_of
from tests.reference.oracle import clipped_sum, compare, relative_error, released_over_clip_norm
from tests.reference.zoo import Case, build_model, make_batch

EXACT = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""Largest relative error against float64, as in tests/ghost/test_triton_launch.py: the inputs are exact."""
TESTS_LIMIT = 75  # seconds


def case_makers(kernel: str, dtype: torch.dtype, device: torch.device, whole: bool) -> list[Callable[[], Any]]:
    """Return functions that make each case of a kernel, so that only one is in memory.

    Args:
        kernel: one of `kernel_times.KERNELS`.
        dtype: of the inputs.
        device: of the inputs.
        whole: the shapes of real models instead of odd, tiny ones.
    """
    shapes = kernel_times.FULL if whole else kernel_times.TINY
    makers = {
        "gram": kernel_times.gram_case,
        "instance": kernel_times.instance_case,
        "weighted sum": kernel_times.weighted_sum_case,
        "lookup": kernel_times.lookup_case,
    }
    made: list[Callable[[], Any]] = [partial(makers[kernel], shape, dtype, device) for shape in shapes[kernel]]
    if kernel == "gram":
        positive = partial(kernel_times.gram_case, dtype=dtype, device=device, positive=True)
        made += [partial(positive, shape) for shape in shapes["positive"]]
    return made


def errors_of(case: Any) -> dict[str, Any]:
    """Return the relative error and the share of the slack of a kernel's result."""
    with kernels.exact_matmul(), torch.no_grad():
        return kernel_times.errors(case, "fused")


def table(figures: Figures, setting: Setting) -> None:
    """Every kernel on the shapes of real models in bfloat16, with times; on odd shapes in the other dtypes."""
    rates: tuple[float | None, float | None] = (None, None)
    if not setting.toy:
        with contextlib.suppress(SystemExit):  # a GPU without known rates has no roofline
            rates = kernel_times.device_rates(argparse.Namespace(peak_tflops=None, bandwidth=None, dtype="bfloat16"))
    options = argparse.Namespace(rounds=10, warmup=3)
    figures["rows"] = []
    for kernel in kernel_times.KERNELS:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            whole = dtype == torch.bfloat16 and not setting.toy
            errors, slacks = [], [0.0]
            for make in case_makers(kernel, dtype, setting.device, whole):
                row = kernel_times.measure(make(), options, *rates) if whole else {"fused": errors_of(make())}
                errors.append(row["fused"]["error"])
                slacks.append(row["fused"]["slack_used"] or 0.0)
                if whole:
                    figures["rows"].append(_timed(row))
                    figures.say(", ".join(f"{name} {value}" for name, value in figures["rows"][-1].items()))
            name = f"{kernel}, {str(dtype).removeprefix('torch.')}"
            figures.check(f"{name}, error", float(np.max(errors)), at_most=EXACT[dtype])
            figures.check(f"{name}, share of the slack", float(np.max(slacks)), at_most=_MOST)
    free_memory()


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    """Return one shape's row of the table, in microseconds."""
    figures = {"kernel": row["kernel"], "shape": row["shape"], "error": f"{row['fused']['error']:.1e}"}
    for form, name in (("fused", "fused us"), ("plain", "PyTorch us")):
        figures[name] = f"{1e3 * row[form]['median_ms']:.1f}"
    if "roofline_ms" in row:
        figures["roofline us"] = f"{1e3 * row['roofline_ms']:.1f}"
    return figures


def own_tests(figures: Figures, setting: Setting) -> None:
    """The kernels' own tests, compiled for this device: odd shapes, layouts, infinities, chunks."""
    tests = "tests/ghost/test_triton_launch.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=-q", tests]
    if setting.toy:
        raise Skipped("in the toy the same as in the suite")
    try:
        done = subprocess.run([*command, "-n", "12"], cwd=ROOT, capture_output=True, text=True, timeout=TESTS_LIMIT)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"pytest took more than {TESTS_LIMIT} s: {str(error.stdout)[-1000:]}") from None
    lines = done.stdout.strip().splitlines()
    figures["pytest"] = lines[-1] if lines else ""
    figures["failures"] = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    figures.say(figures["pytest"])
    printed = (done.stdout + done.stderr)[-2000:]
    figures.require(done.returncode == 0, f"pytest ended with status {done.returncode}: {printed}")
    figures.require(bool(re.search(r"\d+ passed", figures["pytest"])), "no test ran")


def rounding(figures: Figures, setting: Setting) -> None:
    """Run the measurement that training makes before its first norm; it refuses a device that is far off."""
    sizes = [(17, 200)] if setting.toy else [*_SHAPES]
    for fused in (True, False):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            name = f"{'fused' if fused else 'PyTorch'} {str(dtype).removeprefix('torch.')}"
            method = NormMethod(fused=fused)
            found = [shortfalls(method, setting.device, dtype, *size) for size in sizes]
            figures[name] = {what: max(one[what] for one in found) for what in found[0]}
            for what, value in figures[name].items():
                figures.require(value <= _MOST, f"{name}: {what} is {value:.3g} times the slack")
            if not setting.toy:
                figures[f"{name}, slack times"] = slack_factor(method, setting.device, dtype)
            figures.say(f"{name}: {shown(figures[name])}")


def noise(figures: Figures, setting: Setting) -> None:
    """Check the noise of both generators of normal numbers; print its time beside PyTorch's own normal numbers."""
    for level in ("os", "chacha20"):
        _distribution(figures, setting, level)
        _seeded(figures, setting, level)
    cpu = ChaCha20Normals(bytes(32)).standard_normal(1000, np.float64)
    same = DeviceNormals(bytes(32), setting.device).standard_normal(1000, torch.float64)
    figures.check("ChaCha20: difference from the CPU", float(np.abs(same.cpu().numpy() - cpu).max()), at_most=1e-12)
    if setting.device.type == "cuda":
        _philox_state(figures, setting.device)
        _time_of_noise(figures, setting)


def _time_of_noise(figures: Figures, setting: Setting) -> None:
    """Nanoseconds per entry, each in one run, beside `Tensor.normal_` of the device's default generator."""
    total = torch.zeros(4 * ENTRIES_AT_A_TIME, device=setting.device)
    draws: dict[str, Callable[[], object]] = {"normal_": total.normal_}
    draws |= {level: partial(NoiseSource(randomness=level).add_, total, 1.0) for level in ("os", "chacha20")}
    for name, draw in draws.items():
        draw()
        times = []
        for _ in range(5):
            torch.cuda.synchronize(setting.device)
            began = time.perf_counter()
            draw()
            torch.cuda.synchronize(setting.device)
            times.append(time.perf_counter() - began)
        figures[f"{name}, ns per entry"] = 1e9 * min(times) / total.numel()


def _distribution(figures: Figures, setting: Setting, level: str) -> None:
    """Check that noise is normal with the requested variance over blocks and tensors, and never the same twice."""
    entries = 50_000 if setting.toy else 2 * ENTRIES_AT_A_TIME + 12_345
    source, stddev = NoiseSource(randomness=level), 3.0
    drawn = []
    for _ in range(3):
        total = torch.zeros(entries, device=setting.device)
        source.add_(total, stddev)
        drawn.append(total.double().cpu().numpy() / stddev)
    sampled = [x[:: max(1, entries // 1_000_000)] for x in drawn]
    bound = 6 / entries**0.5
    figures.check(f"{level}: mean", max(abs(float(x.mean())) for x in drawn), at_most=bound)
    figures.check(f"{level}: variance - 1", max(abs(float(x.var()) - 1) for x in drawn), at_most=bound * 2**0.5)
    smallest = min(scipy.stats.kstest(x, "norm").pvalue for x in sampled)
    figures.check(f"{level}: Kolmogorov-Smirnov p", smallest, at_least=1e-6)
    pairs = [(drawn[0], drawn[1]), (drawn[0], drawn[2]), (drawn[1], drawn[2])]
    lags = [lag for lag in (1, 2, 4, 1024, ENTRIES_AT_A_TIME) if lag < entries // 2]
    pairs += [(drawn[0][lag:], drawn[0][:-lag]) for lag in lags]
    worst = max(abs(float(np.mean(a * b))) * len(a) ** 0.5 for a, b in pairs)
    figures.check(f"{level}: correlation in standard errors", worst, at_most=6)
    figures.check(f"{level}: equal entries of two tensors", float(np.mean(drawn[0] == drawn[1])), at_most=1e-4)


def _seeded(figures: Figures, setting: Setting, level: str) -> None:
    """A seed gives the same noise again; only tests have one."""
    seeded = []
    for _ in range(2):
        total = torch.zeros(1000, device=setting.device)
        NoiseSource(seed=5, randomness=level).add_(total, 1.0)
        seeded.append(total)
    figures.require(torch.equal(*seeded), f"{level}: a seed does not give the same noise twice")


def _philox_state(figures: Figures, device: torch.device) -> None:
    """Key and offset are taken as they were given, for offsets that use all their bits."""
    generators = [philox(secrets.token_bytes(KEY_BYTES), device) for _ in range(20)]
    states = [generator.get_state().view(torch.int64).tolist() for generator in generators]
    figures["largest offset"] = max(offset for _, offset in states)
    figures.require(figures["largest offset"] > 2**58, "the generator does not keep the random offset")
    figures.require(len({key for key, _ in states}) == 20, "keys repeat")


def other_models(figures: Figures, setting: Setting) -> None:
    """Rows longer than the model is wide, with and without checkpointing, and other models against the float64 loop."""
    from gpu.correctness import MODES, model_against_the_loop

    for checkpointing in ("none", "reentrant", "non-reentrant"):
        for family in ("llama",) if setting.toy else ("llama", "gpt2-without-dropout"):
            case = Case(family, dtype="float32", checkpointing=checkpointing)
            found = compare(case, stretch=3, device=setting.device.type)
            figures.check(f"{family} {checkpointing}, norms", found.norm_error, at_most=1e-5)
            figures.check(f"{family} {checkpointing}, sum", found.sum_error, at_most=2e-5)
        if setting.toy:
            return
    for family in ("llama", "gpt2-without-dropout", "gemma3", "bert", "t5"):
        for mode in MODES:
            for dtype in ("float32", "autocast"):
                if setting.is_over():
                    raise RuntimeError(f"the time was over before {family} {mode} {dtype}")
                tied = family != "bert" and mode == "full"
                model_against_the_loop(figures, setting, Case(family, mode, tied, dtype=dtype))


def tf32(figures: Figures, setting: Setting) -> None:
    """After TF32 was switched on through any interface, norms and sums are still in float32."""
    device, width = setting.device, 256 if setting.toy else 2048
    x, y = (torch.randn(2, 96, width, device=device) for _ in range(2))
    exact = kernels.gram_norms(x.double(), [y.double()])[0]
    exact_sum = torch.einsum("btl,btr->lr", x.double(), y.double())
    try:
        for name, ways in WAYS.items():
            reset_matmul_settings()
            for way in ways:
                way("tf32")
            try:
                plain = relative_error(x[0].mT @ y[0], x[0].double().mT @ y[0].double())
            except RuntimeError as error:  # a mixture of interfaces that PyTorch itself refuses, with any program
                figures[f"{name}, refused by PyTorch"] = str(error).splitlines()[0]
                continue
            before, sums = flags(), torch.zeros(width, width, device=device)
            with kernels.exact_matmul():
                norms = [
                    form.outer_norms(x, [y])[0]
                    for form in (NormMethod("gram"), NormMethod("tiled"), NormMethod("gram", False))
                ]
                NormMethod().add_weighted_outer_(Sum.onto(sums), x, y, Weights(torch.ones(2, device=device)))
            figures.require(flags() == before, f"{name}: the settings are not what they were")
            worst = max(relative_error(norm, exact) for norm in norms)
            figures.check(f"{name}, norms", worst, at_most=1e-5)
            figures.check(f"{name}, sums", relative_error(sums, exact_sum), at_most=1e-5)
            figures[f"{name}, a plain product"] = plain
        if device.type == "cuda":  # if not, nothing was shown
            shown = max((value for key, value in figures.items() if key.endswith("plain product")), default=0.0)
            figures.require(shown > 1e-5, "TF32 never came on, so that this step shows nothing")
    finally:
        reset_matmul_settings()
    for precision in () if setting.toy else ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        try:
            _, largest = released_over_clip_norm(Case("llama", dtype="float32"), device=device.type)
        finally:
            torch.set_float32_matmul_precision("highest")
        figures.check(f"{precision}, one unit over C", largest, at_least=0.99, at_most=1)


def packed(figures: Figures, setting: Setting) -> None:
    """Rows laid end to end: the clipped sum of the loop, and of padded rows."""
    cases = [Case("llama", tied=True, dtype="float32"), Case("llama", "lora-all-linear", dtype="float32")]
    for case in cases[:1] if setting.toy else [*cases, Case("gpt2-without-dropout", tied=True, dtype="float32")]:
        batch = make_batch(case.spec, num_rows=6)
        units, clip_norm = reference(case, rows_of(batch))
        model = build_model(case).to(setting.device)
        norms, total = packed_sum(model, case, rows_of(batch), clip_norm)
        factors = (clip_norm / units.norm(dim=1)).clamp(max=1.0)
        name = f"{case.family} {case.mode}"
        figures.check(f"{name}, norms", relative_error(norms.cpu(), units.norm(dim=1)), at_most=1e-5)
        figures.check(f"{name}, sum", relative_error(total.cpu(), factors @ units), at_most=1e-4)
        padded = clipped_sum(model, case, batch, clip_norm)
        figures.check(f"{name}, against padded rows", relative_error(total.cpu(), padded.total), at_most=1e-4)


def without_triton(figures: Figures, setting: Setting) -> None:
    """Check the PyTorch forms on this device, which run if Triton is not installed."""
    setting.needs_cuda()
    for dtype in ("float32", "bfloat16"):
        case = Case("llama", dtype=dtype)
        model, batch = build_model(case).to(setting.device), make_batch(case.spec)
        fused, plain = (clipped_sum(model, case, batch, 0.1, forms=NormMethod(fused=fused)) for fused in (True, False))
        bound = 1e-5 if dtype == "float32" else 5e-3
        figures.check(f"{dtype}, norms", relative_error(plain.norms, fused.norms), at_most=bound)
        figures.check(f"{dtype}, sums", relative_error(plain.total, fused.total), at_most=bound)
