"""Every engine releases the same as one process: the same clipped sum, the same bound, noise exactly once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.stats

from tests import tiers
from tests.distributed.matrix import NUM_ROWS, Job
from tests.distributed.setups import ENGINES, VARIANTS
from tests.distributed.world import ROOT, run
from tests.mutations import kills
from tests.reference.zoo import Case

SHARED = ROOT.parent / "shared" / "data"
MODES = ("full", "lora-all-linear")
DTYPES = ("float32", "bfloat16")
# tied head, activation checkpointing, rows of a microbatch (fewer than all: accumulation), rows of a unit
WAYS = (
    (False, "none", 2, 1),
    (False, "non-reentrant", NUM_ROWS, 1),
    (True, "none", NUM_ROWS, 2),
    (True, "none", 2, 3),  # units of more rows than a microbatch has
    (True, "reentrant", 2, 1),
)


def jobs_of(engine: str) -> list[Job]:
    """Every combination; for a variant of an engine, those that differ most."""
    dtypes = ("float32",) if engine == "zero2-offload" else DTYPES  # refused in bfloat16
    ways = WAYS if engine in ENGINES else WAYS[:1]
    jobs = [
        Job(engine, Case("llama", mode=mode, tied=tied, dtype=dtype, checkpointing=checkpointing), rows, per_unit)
        for mode in MODES
        for dtype in dtypes
        for tied, checkpointing, rows, per_unit in ways
    ]
    divides = engine.startswith(("fsdp2", "zero2", "zero3"))  # sums of LoRA are small: always kept whole
    short = [job for job in jobs if divides and job.max_rows < NUM_ROWS and job.case.mode == "full"]
    return jobs + [dataclasses.replace(job, short=True) for job in short]


def size_of(engine: str) -> int:
    """Processes: two, and four where replicas of shards need them."""
    return 4 if engine == "fsdp2-hybrid" else 2


def some(jobs: Sequence[Job]) -> list[Job]:
    """Jobs among these in which every engine and every option appears."""
    options = ("mode", "tied", "dtype", "checkpointing")
    axes = [
        [
            ("engine", job.engine),
            *((option, getattr(job.case, option)) for option in options),
            ("rows of a microbatch", job.max_rows),
            ("rows of a unit", job.rows_per_unit),
            ("short of memory", job.short),
        ]
        for job in jobs
    ]
    return [jobs[number] for number in sorted(tiers.sample(axes, 1))]


def check_exact(jobs: list[Job], folder: Path) -> None:
    """See `check_errors` and `check_reach`."""
    check_errors(jobs, run(folder / "errors", "tests.distributed.matrix:errors", jobs=jobs))
    check_reach(jobs, run(folder / "reach", "tests.distributed.matrix:reach", jobs=jobs))


def check_errors(jobs: list[Job], results: list) -> None:
    """The reduced clipped sums are those of one process, on every rank."""
    for job, (to_float64, to_same_precision) in zip(jobs, results[0], strict=True):
        if job.case.dtype == "float32":
            assert to_float64 < 2e-5 and to_same_precision < 1e-6, job
        else:  # activations in bfloat16: the engine adds at most one rounding to the error of one process
            assert to_float64 < 2e-2, job
            assert to_same_precision < (5e-3 if job.case.mode == "full" else 2e-2), job
    assert all(result == results[0] for result in results)


def check_reach(jobs: list[Job], results: list) -> None:
    """The parameters moved by at most lr·C·B, and by lr·C for one long unit."""
    for job, (all_units, one_unit) in zip(jobs, results[0], strict=True):
        rounding = 1e-5 if job.case.dtype == "float32" else 4e-3  # of parameters in bfloat16, after the update
        assert 0.1 < all_units <= 1 + rounding, job
        assert 0.99 < one_unit <= 1 + rounding, job


@kills(
    "FSDP2 forgets the reduced sums of earlier microbatches",
    "dpllm/engines/fsdp2.py",
    "before = self._parts.pop(bucket, None)",
    "before = None",
)
@kills(
    "ZeRO-3 forgets the reduced sums of earlier microbatches",
    "dpllm/engines/deepspeed.py",
    "            if self._has_parts:",
    "            if False:",
)
@kills(
    "the whole sums of earlier microbatches are forgotten",
    "dpllm/engines/buckets.py",
    "self._sums[parameter] = total",
    "pass",
)
def test_every_engine_releases_the_clipped_sum_of_one_process(tmp_path):
    """Every engine with every option; all combinations are in `test_the_reduced_clipped_sum_is_that_of_one_process`.

    Engines that divide gradients keep the sums of earlier microbatches whole or, short of memory, reduced.
    """
    jobs = some([job for engine in (*ENGINES, *VARIANTS) if size_of(engine) == 2 for job in jobs_of(engine)])
    kept = itertools.product(("fsdp2", "zero2", "zero3"), (("full", False), ("full", True), ("lora-all-linear", False)))
    accumulating = [
        Job(engine, Case("llama", mode=mode, dtype="float32"), 2, short=short) for engine, (mode, short) in kept
    ]
    jobs += [job for job in accumulating if job not in jobs]
    small: Any = {"bucket_bytes": 5000}  # a model of several buckets, of one parameter or more
    check_errors(jobs, run(tmp_path / "two", "tests.distributed.matrix:errors", jobs=jobs, **small))
    hybrid = jobs_of("fsdp2-hybrid")[:1]
    check_errors(hybrid, run(tmp_path / "four", "tests.distributed.matrix:errors", 4, jobs=hybrid, **small))


def test_every_engine_moves_the_parameters_by_at_most_lr_clip_norm_batch(tmp_path):
    """A sample of `test_an_update_moves_the_parameters_by_at_most_lr_clip_norm_batch`."""
    jobs = some([job for engine in (*ENGINES, *VARIANTS) if size_of(engine) == 2 for job in jobs_of(engine)])
    check_reach(jobs, run(tmp_path, "tests.distributed.matrix:reach", jobs=jobs))


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks(tmp_path):
    """The same sums on engines that shard; ZeRO-3 gathers the parameters of modules, whose blocks stay eager."""
    jobs = [
        Job(engine, Case("llama", mode=mode, tied=mode == "full", dtype="float32", checkpointing=checkpointing))
        for engine in ("ddp", "fsdp2", "zero1", "zero2", "zero3")
        for mode in MODES
        for checkpointing in ("none", "non-reentrant", "reentrant")
    ]
    results = run(tmp_path, "tests.distributed.matrix:compiled_errors", jobs=jobs)
    for job, (to_float64, to_same_precision, blocks) in zip(jobs, results[0], strict=True):
        assert to_float64 < 2e-5 and to_same_precision < 1e-6, job
        assert bool(blocks.eager) == (job.engine == "zero3") != bool(blocks.blocks), (job, str(blocks))


# family, mode, activation checkpointing, rows of a microbatch, rows of a unit
MIXTURES: dict[str, tuple[tuple[str, str, str, int, int], ...]] = {
    **dict.fromkeys(
        ENGINES, (("mixtral", "full", "none", NUM_ROWS, 1), ("mixtral", "lora-experts", "non-reentrant", 2, 2))
    ),
    "zero3": (
        ("mixtral", "full", "none", NUM_ROWS, 1),
        ("qwen3_moe", "full", "non-reentrant", 2, 3),
        ("deepseek_v3-in-one-group", "full", "none", 2, 2),
        ("deepseek_v3-in-one-group", "lora-experts", "reentrant", NUM_ROWS, 2),
        ("mixtral", "lora-experts", "non-reentrant", 2, 2),
        ("mixtral", "routers-only", "none", NUM_ROWS, 1),
        # Frozen experts, of which each process may use others.
        ("qwen3_moe", "lora-attention", "non-reentrant", 2, 1),
        ("deepseek_v3", "lora-attention", "none", 3, 2),
        ("mixtral", "experts-only", "none", 2, 1),
        # Trained routers multiply inside ZeRO-3's own linear function, where only a twin of the product can be tapped.
        ("deepseek_v3", "frozen-experts", "none", NUM_ROWS, 1),
        ("deepseek_v3", "frozen-experts", "non-reentrant", 2, 2),
        ("deepseek_v3", "frozen-experts", "reentrant", 2, 2),
    ),
    # Four calls on each process: from the third on, DeepSpeed compares each with its record of the first two.
    "zero3-unfetched": (("mixtral", "lora-experts", "none", 1, 1), ("qwen3_moe", "full", "none", 1, 1)),
}


@kills(
    "a stack of experts with LoRA is not gathered by the module that computes it",
    "dpllm/engines/deepspeed.py",
    "deepspeed.zero.register_external_parameter(wrapper.get_base_layer(), stack)",
    "pass",
    case="zero3-unfetched",
)
@pytest.mark.deep
@pytest.mark.parametrize("engine", MIXTURES)
def test_mixtures_of_experts_are_exact_on_engines(engine, tmp_path):
    """Stacks of experts, LoRA factors of them, and routers are reduced and sharded like any parameter."""
    jobs = [
        Job(engine, Case(family, mode=mode, dtype="float32", checkpointing=checkpointing), rows, per_unit)
        for family, mode, checkpointing, rows, per_unit in MIXTURES[engine]
    ]
    check_exact(jobs, tmp_path)


@kills(
    "each process decides by itself whether to call the model again, and shards wait for each other",
    "dpllm/ghost/tapped_model.py",
    "            needed, is_open = self.receiver.any_of([needed, not self._check.covers(2, 2, packed > 0)])\n",
    "            is_open = True\n",
    case="fsdp2",
)
@pytest.mark.parametrize("engine", ["fsdp2", tiers.deep_case("zero3")])
def test_a_process_that_gets_several_rows_first_does_not_leave_the_others(engine, tmp_path):
    """One unit on each process, then two and one: what several rows show for the first time is compared on both."""
    assert run(tmp_path, "tests.distributed.matrix:uneven", engine=engine, counts=[2, 3, 5]) == [[2, 3, 5]] * 2


@pytest.mark.deep
def test_trained_parameters_in_a_leaf_module_of_zero3_are_refused(tmp_path):
    """DeepSpeed would fill in zeros for their gradients in the clipper's own pass; frozen ones are only gathered."""
    for trained, frozen in run(tmp_path, "tests.distributed.matrix:leaves"):
        assert "mlp.gate.weight is trained but belongs to a ZeRO-3 leaf module (MixtralSparseMoeBlock)" in trained
        assert frozen < 2e-5


@pytest.mark.deep
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "qwen3_next"])
def test_parameters_that_functions_use_are_exact_on_engines(family, engine, tmp_path):
    """State space models and linear attention, recomputed or not."""
    ways = ("full", "none", NUM_ROWS, 1), ("lora-attention", "non-reentrant", 2, 2), ("full", "reentrant", 2, 2)
    jobs = [
        Job(engine, Case(family, mode=mode, dtype="float32", checkpointing=checkpointing), rows, per_unit)
        for mode, checkpointing, rows, per_unit in ways
    ]
    check_exact(jobs, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("engine", [*ENGINES, *VARIANTS])
def test_the_reduced_clipped_sum_is_that_of_one_process(engine, tmp_path):
    """Full and LoRA, float32 and bfloat16, accumulated, checkpointed, tied: the same sum as one float64 process."""
    jobs = jobs_of(engine)
    results = run(tmp_path, "tests.distributed.matrix:errors", size=size_of(engine), fresh=True, jobs=jobs)
    check_errors(jobs, results)


@pytest.mark.deep
@pytest.mark.parametrize("engine", [*ENGINES, *VARIANTS])
def test_an_update_moves_the_parameters_by_at_most_lr_clip_norm_batch(engine, tmp_path):
    """C = 1e-6, no noise, SGD: an engine that leaks unclipped gradients moves them a million times further."""
    jobs = jobs_of(engine)
    results = run(tmp_path, "tests.distributed.matrix:reach", size=size_of(engine), fresh=True, jobs=jobs)
    check_reach(jobs, results)


@pytest.mark.deep
def test_one_unit_at_a_time_releases_the_clipped_sum_of_one_process(tmp_path):
    """By plain autograd beside the hooks of replicas and of DeepSpeed: the same sum, and the same bound."""
    ways = [*WAYS[:-1], (True, "non-reentrant", 2, 1)]
    jobs = [
        Job(engine, Case("llama", mode=mode, tied=tied, dtype=dtype, checkpointing=again), rows, of_unit, "per_unit")
        for engine in ("ddp", "zero1", "zero2")
        for mode, dtype, (tied, again, rows, of_unit) in zip(MODES * 3, DTYPES * 3, ways, strict=False)
    ]
    check_exact(jobs, tmp_path)


@pytest.mark.deep
def test_a_loss_of_two_calls_releases_the_clipped_sum_of_one_process(tmp_path):
    """A preference loss calls the model with both answers of its pairs before the backward pass, on every engine."""
    jobs = [
        Job(engine, Case("llama", mode=mode, tied=tied, dtype="float32", checkpointing=again), rows, of_unit, calls=2)
        for engine in ENGINES
        for mode, (tied, again, rows, of_unit) in (("full", WAYS[0]), ("lora-all-linear", WAYS[1]), ("full", WAYS[3]))
    ]
    check_errors(jobs, run(tmp_path / "errors", "tests.distributed.matrix:errors", jobs=jobs))


@pytest.mark.deep
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_one_unit_at_a_time_is_refused_for_shards_by_name(engine, tmp_path):
    for refused in run(tmp_path, "tests.distributed.matrix:refused", engine=engine):
        assert "privacy.gradients=per_unit needs" in refused


@kills(
    "every process draws all of the noise",
    "dpllm/training/step.py",
    "rank, size = self._engine.processes.rank, self._engine.processes.size",
    "rank, size = 0, 1",
    case="ddp",
)
@kills(
    "the sums of the processes are not added up",
    "dpllm/engines/ddp.py",
    "return reduce_scatter(own, flat, async_op=True)",
    "return reduce_scatter(own, flat * (self.processes.rank == 0), async_op=True)",
    case="ddp",
)
@kills(
    "DeepSpeed's mean over processes is not undone",
    "dpllm/engines/deepspeed.py",
    "self._backward(self.processes.size * scale * ",
    "self._backward(scale * ",
    case="zero2",
)
@pytest.mark.parametrize("engine", [*ENGINES, tiers.deep_case("fsdp2-hybrid"), tiers.deep_case("zero3-offload")])
def test_noise_is_drawn_exactly_once(engine, tmp_path):
    """Variance σ²C² per entry, independent between the processes' slices and between steps, equal on replicas."""
    results = run(tmp_path, "tests.distributed.matrix:noise", size=size_of(engine), engine=engine)
    stddev = results[0]["noise_stddev"]
    steps = np.stack(results[0]["released"]).astype(np.float64) / stddev
    entries = steps.shape[1]
    variance = float(steps.var())
    correlations = [abs(np.corrcoef(steps[i], steps[j])[0, 1]) for i in range(len(steps)) for j in range(i)]
    halves = max(abs(np.corrcoef(*np.array_split(step[: entries // 2 * 2], 2))[0, 1]) for step in steps)
    normal = scipy.stats.kstest(steps.ravel(), "norm").pvalue
    assert abs(variance - 1) < 6 * (2 / steps.size) ** 0.5 + 1e-3
    assert max(*correlations, halves) < 6 / (entries // 2) ** 0.5
    assert normal > 1e-8
    for result in results[1:]:
        assert all(
            np.array_equal(mine, first) for mine, first in zip(result["released"], results[0]["released"], strict=True)
        )


def check_covariance(kind: str, found: dict, entries: int) -> None:
    """The covariance of the releases of empty steps is (MᵀM)⁻¹, of a dense M made from the strategy's column."""
    covariance, column = found["covariance"], np.array(found["column"])
    steps = len(covariance)
    assert kind == "blt" or (steps > 2 * len(column) and abs(np.linalg.norm(column) - 1) < 1e-9)
    dense = scipy.linalg.toeplitz([*column, *[0.0] * (steps - len(column))], [column[0], *[0.0] * (steps - 1)])
    expected = np.linalg.inv(dense.T @ dense)
    variance = np.diag(expected)
    error = np.sqrt((np.outer(variance, variance) + expected**2) / entries)  # of a product of Gaussians
    assert (np.abs(covariance - expected) < 7 * error + 1e-3 * np.abs(expected)).all()
    assert found["variance"] == pytest.approx(variance, rel=1e-9)  # which the guard is told
    neighbours = np.diag(expected, 1) / np.sqrt(variance[1:] * variance[:-1])
    assert neighbours.max() < -0.25 and 7 * error.max() < 0.1 * variance.min()  # white noise is far away


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        ("fsdp2", 2),
        ("zero3", 2),
        tiers.deep_case("single", 1),
        tiers.deep_case("ddp", 2),
        tiers.deep_case("zero1", 2),
        tiers.deep_case("zero2", 2),
        tiers.deep_case("fsdp2-hybrid", 4),
        tiers.deep_case("zero3-offload", 2),
    ],
)
def test_other_mechanisms_hold_on_every_engine(engine, size, tmp_path):
    """Other clippings reach C at most; correlated noise has its covariance over steps; white noise is no such noise."""
    results = run(tmp_path, "tests.distributed.matrix:mechanism", size=size, engine=engine)
    found = results[0]
    assert found["reached"].keys() == {"automatic", "per-layer", "quantile", "groups"}
    (moved,) = {result["moved"] for result in results}  # 4 of 7 units at or below the threshold, b = 1
    assert moved == pytest.approx(-0.2 * (0.5 + (4 - 3) / 2 - 0.5), rel=1e-9)
    assert all(0.1 < value <= 1 + 1e-5 for value in found["reached"].values())
    assert found["noises"].keys() == {"banded", "blt"}
    for kind, noise in found["noises"].items():
        check_covariance(kind, noise, found["entries"])
    for result in results:
        refusal = str(result["refusal"])
        assert refusal.startswith("UpdateError: The gradient that reaches the optimizer is not the private sum: its")


@kills(
    "discrete noise is added to a whole bucket for each of its parameters",
    "dpllm/engines/ddp.py",
    "                to_total(parameter, part)\n",
    "                to_total(parameter, own)\n",
    case="ddp",
)
@pytest.mark.parametrize("engine", [*map(tiers.deep_case, ("fsdp2", "ddp", "fsdp2-hybrid"))])
def test_discrete_noise_is_added_once_to_complete_sums(engine, tmp_path):
    """Every entry of the sum over microbatches and processes gets it from one process, and all replicas are equal."""
    results = run(tmp_path, "tests.distributed.matrix:totals", size=size_of(engine), engine=engine)
    steps = np.stack(results[0]["released"]).astype(np.float64) / results[0]["noise_stddev"]
    halves = abs(np.corrcoef(*np.array_split(steps[0][: steps.shape[1] // 2 * 2], 2))[0, 1])
    assert results[0]["error"] < 1e-4
    assert abs(steps.var() - 1) < 6 * (2 / steps.size) ** 0.5 + 1e-3
    assert max(halves, abs(np.corrcoef(steps)[0, 1])) < 6 / (steps.shape[1] // 2) ** 0.5
    assert scipy.stats.kstest(steps.ravel(), "norm").pvalue > 1e-8
    for result in results[1:]:
        pairs = zip(result["released"], results[0]["released"], strict=True)
        assert all(np.array_equal(mine, first) for mine, first in pairs)


@pytest.mark.parametrize("engine", ["fsdp2", "zero2", *map(tiers.deep_case, ("ddp", "zero1", "zero3"))])
def test_regenerated_noise_is_stored_noise_on_every_engine(engine, tmp_path):
    """Bit by bit in every step, on every process, for noise that is correlated over steps."""
    results = run(tmp_path, "tests.distributed.matrix:memories", size=size_of(engine), engine=engine)
    stored = results[0]["stored"]
    assert len(set(stored)) == 5 and all(len(step) > 100_000 for step in stored)
    for found in results:
        assert found["stored"] == found["regenerated"] == found["auto"] == stored


@kills(
    "every process adds noise to the count of a quantile",
    "dpllm/training/step.py",
    "add_share_(STATISTIC, total, deviation, processes.rank, processes.size)",
    "add_share_(STATISTIC, total, deviation, 0, 1)",
)
def test_the_count_of_a_clipping_that_adapts_gets_its_noise_from_one_process(tmp_path):
    """N(0, σ_b²) once, and one threshold everywhere; a process that moved its own stops all."""
    results = run(tmp_path, "tests.distributed.matrix:count")
    counts = np.array(results[0]["counts"]) / 2.0
    normal = scipy.stats.kstest(counts, "norm").pvalue
    assert normal > 1e-8 and abs(counts.std() - 1) < 6 / (2 * len(counts)) ** 0.5
    for result in results:
        assert result["counts"] == results[0]["counts"]
        assert "clip to different thresholds (rank 0: 1.0, rank 1: 2.0)" in result["refusal"]


def test_an_engine_that_is_broken_from_outside_stops_in_its_first_step(tmp_path):
    """Hooks that no longer fire, clipping switched on, a missing reduction, something added: every process stops."""
    results = run(tmp_path, "tests.distributed.matrix:broken")
    for name, error in results[0].items():
        assert error is not None and error.startswith("UpdateError: The gradient that reaches the optimizer"), name
    assert results[1].keys() == results[0].keys() and all(results[1].values())


@kills(
    "a gradient that reaches a shard past the taps is not noticed",
    "dpllm/ghost/tapped_model.py",
    "            if state_of_gradient(parameter) != before[name]:",
    "            if False:",
)
def test_a_use_that_no_tap_sees_stops_every_engine_in_the_step_in_which_it_begins(tmp_path):
    """Two steps were sound; then a layer reads a trained weight once more, on all processes."""
    for found in run(tmp_path, "tests.distributed.matrix:missed", engines=list(ENGINES)):
        assert len(found) == 2 * len(ENGINES)
        for name, (steps, error) in found.items():
            assert steps == 2 and error.startswith("MissedUseError: ") and "q_proj" in error, name


@pytest.mark.deep
@pytest.mark.skipif(not SHARED.exists(), reason="the test weights and texts beside the project are not here")
def test_pretrained_weights_on_real_text(tmp_path):
    """A pretrained model and E2E's records, through the public loop: every engine releases one process's sum."""
    arguments = {"weights": str(SHARED / "stories260K"), "text": str(SHARED / "e2e" / "devset.csv")}
    results = run(tmp_path, "tests.distributed.matrix:real", engines=list(ENGINES), **arguments)
    assert len(results[0]) == len(ENGINES)
    assert all(error < 1e-5 and 0.05 < ratio <= 1 for error, ratio in results[0])
