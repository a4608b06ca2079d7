"""The program in the processes of `test_engines`: private steps on every engine, and their results."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpllm import GhostClipper, GhostError, PrivacyConfig, PrivateRun, make_plan, per_sequence_loss
from dpllm.config import DataConfig
from dpllm.data.rows import RowCollator, load_records, tokenize_records
from dpllm.data.units import UnitIndex
from dpllm.engines import EngineError, buckets, engine_for, model_inside
from dpllm.engines.processes import DisagreementError, Processes
from dpllm.mechanism import generators
from dpllm.mechanism.clipping import FlatClipping
from dpllm.mechanism.generators import NoiseSource, stream_of
from dpllm.mechanism.limits import NOISE_MEMORIES
from dpllm.mechanism.noise import IndependentStream
from dpllm.mechanism.parts import NoiseStream
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.choose_clipper import clipper_for
from dpllm.training.microbatches import microbatches
from dpllm.training.step import StepStatistic, private_step
from tests.distributed.setups import dispose, prepare, unreduced, update, whole_parameters
from tests.memory_ledger import MemoryLedger
from tests.reference.oracle import LOSSES
from tests.reference.zoo import (
    Batch,
    Case,
    build_model,
    enable_checkpointing,
    float64_copy,
    forward_context,
    make_batch,
)
from tests.small_model import rows_by_number

NUM_ROWS = 7  # over two processes: unequal shares, and microbatches that have to be made up


@dataclass(frozen=True)
class Job:
    """One way of running a step."""

    engine: str
    case: Case
    max_rows: int = NUM_ROWS  # rows of a microbatch; fewer: accumulation
    rows_per_unit: int = 1
    gradients: str = "ghost"
    calls: int = 1  # of the model for each loss: 2 for pairs of sequences
    short: bool = False  # no memory is left for whole sums of all weights: each microbatch's are reduced

    def __str__(self) -> str:
        ways = ["accumulated"] * (self.max_rows < NUM_ROWS)
        ways += ["one unit at a time"] * (self.gradients == "per_unit")
        ways += [f"units of {self.rows_per_unit} rows"] * (self.rows_per_unit > 1)
        ways += [f"{self.calls} calls"] * (self.calls > 1)
        ways += ["short of memory"] * self.short
        return "-".join([self.engine, str(self.case), *ways])

    @property
    def owners(self) -> list[int]:
        """The unit of each row."""
        return [row // self.rows_per_unit for row in range(NUM_ROWS)]


def plan_of(
    clip_norm: float,
    noise_multiplier: float,
    num_units: int = NUM_ROWS,
    num_steps: int = 9,
    batch_size: int | None = None,
    **mechanism: Any,
) -> PrivacyPlan:
    privacy = PrivacyConfig(
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        expected_batch_size=batch_size or num_units,
        delta=1e-2,
        **mechanism,
    )
    return make_plan(privacy, num_units, num_steps)


def batches_of(
    batch: Batch, owners: list[int], units: list[int], max_rows: int, rank: int, size: int, one_unit: bool = False
) -> Any:
    """The microbatches of one process."""
    lengths = batch.inputs["attention_mask"].sum(1).numpy()
    return microbatches(
        fetch=lambda rows: [int(row) for row in rows],
        collate=lambda rows: {**batch.rows(rows).inputs, "labels": batch.labels[rows]},
        units=UnitIndex.from_ids(owners),
        lengths=lengths,
        unit_ids=np.array(units, dtype=np.int64),
        max_rows=max_rows,
        rank=rank,
        size=size,
        one_unit=one_unit,
    )


def loss_of(model: Any, case: Case, calls: int = 1) -> Any:
    def loss(inputs: dict[str, Tensor]) -> Tensor:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        with forward_context(case):
            logits = model(**inputs).logits
            if calls == 1:
                return LOSSES[case.spec.task](logits, labels)
            other = {**inputs, "input_ids": inputs["input_ids"].flip(1).clamp_min(1)}
            rejected = model(**other).logits  # under the same labels
        first, second = (LOSSES[case.spec.task](one, labels) for one in (logits, rejected))
        return -torch.nn.functional.logsigmoid(second - first)

    return loss


def flat(parameters: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten().double() for value in parameters.values()])


def movement(
    engine: str,
    model: nn.Module,
    case: Case,
    plan: PrivacyPlan,
    max_rows: int = NUM_ROWS,
    units: list[int] | None = None,
    owners: list[int] | None = None,
    steps: int = 1,
    lr: float = 1e3,
    sabotage: Any = None,
    white: Any = None,
    thresholds: list[float] | None = None,
    gradients: str = "ghost",
    calls: int = 1,
    compiled: list[Any] | None = None,
    short: bool = False,
) -> list[Tensor]:
    """Return each step's release: the movement of all parameters under SGD, over lr/b, (P,) in float64.

    Args:
        engine: as in `setups`.
        model: the model to train.
        case: description of the case.
        plan: the constants.
        max_rows: of a microbatch.
        units: of each step; None: all.
        owners: unit of each row; None: each row is one.
        steps: how many to take.
        lr: of SGD.
        sabotage: called with the engine and the prepared model.
        white: makes other noise of the plan than its mechanism's.
        thresholds: takes the clipper's threshold after each step.
        gradients: as in recipes.
        calls: of the model for each loss.
        compiled: takes what of the blocks was compiled; None: nothing is.
        short: whether no memory is left for whole sums of all weights.
    """
    batch = make_batch(case.spec, num_rows=NUM_ROWS)
    dtype = "bfloat16" if case.dtype == "bfloat16" else "float32"
    prepared, optimizer = prepare(engine, model, lr, dtype)
    inner = model_inside(prepared)
    enable_checkpointing(inner, case.checkpointing)
    runner = engine_for(prepared, optimizer)
    if sabotage is not None:
        sabotage(runner, prepared)
    clipper = clipper_for(gradients, inner, plan.mechanism.clipping)
    if compiled is not None:
        clipper.compile("aot_eager")
    rank, size = runner.processes.rank, runner.processes.size
    owners = owners or list(range(NUM_ROWS))
    every = list(range(max(owners) + 1)) if units is None else units
    ledger = MemoryLedger()
    stream = white(plan) if white is not None else plan.mechanism.noise.stream(NoiseSource(), plan.num_steps)
    released = []
    for _ in range(steps):
        before = whole_parameters(prepared, inner)
        mine = batches_of(batch, owners, every, max_rows, rank, size, clipper.one_unit)
        none_left = mock.patch.object(buckets, "free_memory", lambda device, processes: (0.0, 1.0))
        with none_left if short else contextlib.nullcontext():
            private_step(clipper, mine, loss_of(inner, case, calls), plan, runner, ledger, stream)
        if thresholds is not None:
            thresholds.append(clipper.threshold)
        update(prepared, optimizer)
        after = whole_parameters(prepared, inner)
        released.append((flat(before) - flat(after)) / lr * plan.expected_batch_size)
    if compiled is not None:
        compiled.append(clipper.compiled)
    clipper.remove()
    dispose(prepared)
    return released


def reference(job: Job, clip_norm: float) -> tuple[Tensor, Tensor]:
    """The clipped sum of one process in the job's microbatches: in float64, and in the case's own precision."""
    case, units = job.case, sorted(set(job.owners))
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    wide = float64_copy(model)
    sums = []
    for candidate, kind in ((wide, case.but(dtype="float64")), (model, case)):
        clipper = clipper_for(job.gradients, candidate, FlatClipping(clip_norm))
        for microbatch in batches_of(batch, job.owners, units, job.max_rows, 0, 1, clipper.one_unit):
            losses = loss_of(candidate, kind, job.calls)(microbatch.inputs)
            if microbatch.continues:
                clipper.hold(losses)
            else:
                clipper.backward(losses, microbatch.unit_index)
        clipper.remove()
        sums.append(flat({name: p.grad for name, p in candidate.named_parameters() if p.requires_grad}))
    return sums[0], sums[1]


def errors(jobs: list[Job], clip_norm: float = 0.5, bucket_bytes: int | None = None) -> list[tuple[float, float]]:
    """Relative error of each job's reduced clipped sum: against float64, and against one process in its precision.

    Args:
        jobs: the ways of running a step.
        clip_norm: C.
        bucket_bytes: of the sums that DDP and FSDP2 reduce together; None: as in training, where a tiny model is one
            bucket.
    """
    if bucket_bytes is not None:
        buckets._BUCKET_BYTES = bucket_bytes
    plan = plan_of(clip_norm, noise_multiplier=0.0)
    found = []
    expected = [reference(job, clip_norm) for job in jobs]  # first: ZeRO-3 puts its own linear function in place
    for job, values in zip(jobs, expected, strict=True):
        model = build_model(job.case)
        ways: Any = {"owners": job.owners, "gradients": job.gradients, "calls": job.calls, "short": job.short}
        (released,) = movement(job.engine, model, job.case, plan, job.max_rows, **ways)
        found.append(tuple(float((released - value).norm() / value.norm()) for value in values))
    return found


def compiled_errors(jobs: list[Job], clip_norm: float = 0.5) -> list[tuple[float, float, Any]]:
    """As `errors`, for two steps with compiled blocks: the errors of the first, and what was compiled."""
    plan = plan_of(clip_norm, noise_multiplier=0.0)
    expected, found = [reference(job, clip_norm) for job in jobs], []
    for job, values in zip(jobs, expected, strict=True):
        torch._dynamo.reset()
        blocks: list[Any] = []
        first, _ = movement(
            job.engine, build_model(job.case), job.case, plan, job.max_rows, owners=job.owners, steps=2, compiled=blocks
        )
        found.append((*(float((first - value).norm() / value.norm()) for value in values), blocks[0]))
    return found


def uneven(engine: str, counts: list[int]) -> list[int]:
    """Steps over so many units, which the processes cannot share evenly; return the units of each step."""
    case = Case("llama", tied=True, dtype="float32")
    plan, batch = plan_of(0.5, 0.0), make_batch(case.spec, num_rows=NUM_ROWS)
    model, optimizer = prepare(engine, build_model(case), 1.0)
    inner, runner = model_inside(model), engine_for(model, optimizer)
    clipper = clipper_for("ghost", inner, plan.mechanism.clipping)
    ledger, stream, taken = MemoryLedger(), plan.mechanism.noise.stream(NoiseSource(), len(counts)), []
    for count in counts:
        rank, size = runner.processes.rank, runner.processes.size
        mine = batches_of(batch, list(range(NUM_ROWS)), list(range(count)), NUM_ROWS, rank, size)
        done = private_step(clipper, mine, loss_of(inner, case), plan, runner, ledger, stream)
        taken.append(done.num_units)
        update(model, optimizer)
    clipper.remove()
    dispose(model)
    return taken


def reach(jobs: list[Job], clip_norm: float = 1e-6) -> list[tuple[float, float]]:
    """Largest movement over lr·C·B with all units, and over lr·C with one unit, whose gradient is longer than C."""
    plan = plan_of(clip_norm, noise_multiplier=0.0)
    found = []
    for job in jobs:
        ratios = []
        for units in (sorted(set(job.owners)), [job.owners[5]]):
            model = build_model(job.case)
            ways = {"owners": job.owners, "gradients": job.gradients, "lr": 1e10, "short": job.short}
            (released,) = movement(job.engine, model, job.case, plan, job.max_rows, units, **ways)
            ratios.append(float(released.norm()) / (clip_norm * len(units)))
        found.append((ratios[0], ratios[1]))
    return found


def refused(engine: str) -> str:
    """The error for a model on this engine that is to be clipped one unit at a time."""
    case = Case("llama", dtype="float32")
    prepared, _ = prepare(engine, build_model(case), 0.1)
    try:
        clipper_for("per_unit", model_inside(prepared), plan_of(0.5, 0.0).mechanism.clipping)
    except GhostError as error:
        return str(error)
    finally:
        dispose(prepared)
    return ""


def leaves() -> tuple[str, float]:
    """The error for a mixture of experts that is a leaf module of ZeRO-3 by itself, and its sum with frozen ones."""
    from deepspeed.utils import set_z3_leaf_modules

    full, lora = (Case("mixtral", mode=mode, dtype="float32") for mode in ("full", "lora-attention"))
    model = build_model(full)
    set_z3_leaf_modules(model, ["MixtralSparseMoeBlock"])
    refusal = ""
    prepared, optimizer = prepare("zero3", model, 0.1)
    try:
        engine_for(prepared, optimizer)
    except EngineError as error:
        refusal = str(error)
    dispose(prepared)
    wide, _ = reference(Job("zero3", lora), 0.5)
    model = build_model(lora)
    set_z3_leaf_modules(model, ["MixtralSparseMoeBlock"])
    (released,) = movement("zero3", model, lora, plan_of(0.5, noise_multiplier=0.0))
    return refusal, float((released - wide).norm() / wide.norm())


def noise(engine: str, steps: int = 3, noise_multiplier: float = 2.0, clip_norm: float = 0.5) -> dict[str, Any]:
    """The releases of empty steps, which are only noise, and whether the processes hold equal parameters after them."""
    case = Case("llama", tied=True, dtype="float32")
    plan = plan_of(clip_norm, noise_multiplier)
    released = movement(engine, build_model(case), case, plan, units=[], steps=steps)
    return {"released": [r.float().numpy() for r in released], "noise_stddev": plan.noise_stddev}


def mechanism(engine: str, steps: int = 7, clip_norm: float = 1e-6) -> dict[str, Any]:
    """Other clippings and correlated noise on an engine: how far units reach, the noise of all steps, white noise."""
    case = Case("llama", tied=True, dtype="float32")
    parts = {"clipping": {"kind": "automatic", "stability": 0.01}, "batch_size": 1}
    every, reached, thresholds = list(range(NUM_ROWS)), {}, []
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    clipper = GhostClipper(model, 1.0)
    start = float(clipper.clip(loss_of(model, case)({**batch.inputs, "labels": batch.labels})).norms.median())
    clipper.remove()
    kinds: list[Any] = [parts["clipping"], "per-layer", {"kind": "quantile", "start": 1.0001 * start}]
    kinds.append({"kind": "groups", "parameters": {"embeddings": "*embed*", "rest": "*"}})
    for clipping in kinds:
        silent = plan_of(clip_norm, 0.0, **{**parts, "clipping": clipping})
        total = movement(engine, build_model(case), case, silent, units=every, thresholds=thresholds)[0]
        reached[silent.mechanism.clipping.kind] = float(total.norm() / (clip_norm * NUM_ROWS))
    plan = plan_of(0.5, 2.0, num_steps=steps, noise={"kind": "banded", "bands": 3, "strategy": "geometric"}, **parts)
    strategy = {"kind": "blt", "buffers": 2, "decays": [0.9, 0.5], "weights": [0.2, 0.2]}
    other = plan_of(0.5, 2.0, num_steps=steps, noise=strategy, **parts)
    noises = {
        made.mechanism.noise.kind: {
            "covariance": second_moments(
                torch.stack(movement(engine, build_model(case), case, made, units=[], steps=steps)) / made.noise_stddev
            ),
            "variance": [made.mechanism.noise.variance(step, made.num_steps) for step in range(steps)],
            "column": made.mechanism.noise.column(made.num_steps),
        }
        for made in (plan, other)
    }
    try:
        refusal = None
        movement(engine, build_model(case), case, plan, units=[], white=lambda _: IndependentStream(NoiseSource()))
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    return {
        "reached": reached,
        "moved": math.log(thresholds[2] / (1.0001 * start)),
        "noises": noises,
        "entries": sum(parameter.numel() for parameter in build_model(case).parameters()),
        "refusal": refusal,
    }


def second_moments(released_TP: Tensor) -> np.ndarray:
    """(T, T): the mean over all entries of the products of two steps' releases, which have mean 0."""
    return (released_TP @ released_TP.T / released_TP.shape[1]).numpy()


def memories(engine: str, steps: int = 5) -> dict[str, list[bytes]]:
    """The releases of empty steps with banded noise that is stored, regenerated, or both, from one seed."""
    case = Case("llama", tied=True, dtype="float32")
    plan = plan_of(0.5, 2.0, num_steps=steps, noise={"kind": "banded", "bands": 3}, batch_size=1, randomness="chacha20")

    def made(plan: PrivacyPlan, memory: str) -> NoiseStream:
        source = NoiseSource(5, Processes().rank, plan.randomness)
        return stream_of(plan.mechanism.noise, source, plan.num_steps, memory)

    generators.ENTRIES_AT_A_TIME = 1000  # several blocks in a parameter
    generators.memory_of = lambda device: 600_000
    found = {}
    for memory in NOISE_MEMORIES:
        noise = functools.partial(made, memory=memory)
        released = movement(engine, build_model(case), case, plan, units=[], steps=steps, white=noise)
        found[memory] = [one.numpy().tobytes() for one in released]
    return found


class Shift:
    """Noise that is known: one deviation in every entry of a complete sum."""

    def begin(self, step: int) -> None:
        """Nothing to begin."""

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        total.add_(stddev)


def totals(engine: str, clip_norm: float = 0.5) -> dict[str, Any]:
    """Noise on complete sums: a known one on the sum of all units, and the discrete one on empty steps."""
    job = Job(engine, Case("llama", tied=True, dtype="float32"), max_rows=2)
    plan = plan_of(clip_norm, 2.0, randomness="discrete")
    wide, _ = reference(job, clip_norm)
    (shifted,) = movement(engine, build_model(job.case), job.case, plan, max_rows=2, white=lambda _: Shift())

    def discrete(plan: PrivacyPlan) -> NoiseStream:
        return plan.mechanism.noise.stream(NoiseSource(randomness=plan.randomness), plan.num_steps)

    noisy = movement(engine, build_model(job.case), job.case, plan, units=[], steps=2, white=discrete)
    return {
        "error": float((shifted - plan.noise_stddev - wide).norm() / wide.norm()),
        "released": [one.float().numpy() for one in noisy],
        "noise_stddev": plan.noise_stddev,
    }


def count(steps: int = 400) -> dict[str, Any]:
    """The noisy counts of empty steps with a clipping that adapts, and what happens if one process moved its own."""
    plan = plan_of(0.5, 0.4, num_steps=9, clipping={"kind": "quantile", "count_noise": 2.0}, batch_size=2)
    processes = Processes()
    stream, counts = plan.mechanism.noise.stream(NoiseSource(None), plan.num_steps), []
    holder: Any = SimpleNamespace(clipping=plan.mechanism.clipping)
    for step in range(steps):
        stream.begin(step)
        before = holder.clipping.threshold
        StepStatistic(holder, plan, stream).finish(processes)
        counts.append(2 * (math.log(before) - math.log(holder.clipping.threshold)) / 0.2)
    holder.clipping = holder.clipping.at(1.0 + processes.rank)
    try:
        refusal = None
        StepStatistic(holder, plan, stream).finish(processes)
    except DisagreementError as error:
        refusal = str(error)
    return {"counts": counts, "refusal": refusal}


def real(
    engines: list[str], weights: str, text: str, clip_norm: float = 1.0, device: str = "cpu"
) -> list[tuple[float, float]]:
    """Pretrained weights and real text through `PrivateRun`, dpllm's public loop: its sum against one process's.

    Args:
        engines: as in `setups`.
        weights: folder of a pretrained model.
        text: a CSV file with the columns ``mr`` and ``ref``.
        clip_norm: C.
        device: where all of it runs.

    Returns:
        For each engine: relative error of the sum, and its norm over C·B.
    """
    rows = tokenize_records(
        load_records(
            DataConfig(
                path=text,
                format="prompt_completion",
                columns={"prompt": "mr", "completion": "ref"},
                max_length=64,
                limit=24,
            )
        ),
        tokenizer := AutoTokenizer.from_pretrained(weights),
        DataConfig(path=text, format="prompt_completion", columns={"prompt": "mr", "completion": "ref"}, max_length=64),
    )
    collator = RowCollator(pad_token_id=tokenizer.pad_token_id or 0)
    plan = plan_of(clip_norm, noise_multiplier=0.0, num_units=len(rows))
    data = rows_by_number(rows, collator, [len(ids) for ids in rows["input_ids"]])
    every = np.arange(len(rows))

    def loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        inputs = {name: value.to(device) for name, value in inputs.items()}
        labels = inputs.pop("labels")
        return per_sequence_loss(model(**inputs).logits, labels)

    def fresh() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).to(device).train()

    alone = fresh()
    clipper = GhostClipper(alone, clip_norm)
    for start in range(0, len(rows), 4):
        clipper.backward(loss(alone, collator([rows[i] for i in range(start, min(start + 4, len(rows)))])))
    clipper.remove()
    expected = flat({name: p.grad for name, p in alone.named_parameters()})
    found = []
    for engine in engines:
        model, optimizer = prepare(engine, fresh(), lr=1e3)
        inner = model_inside(model)
        run = PrivateRun(plan, data, MemoryLedger())
        run.attach(model, optimizer)
        before = whole_parameters(model, inner)
        run.step(run.choose(every), loss)
        update(model, optimizer)
        released = (flat(before) - flat(whole_parameters(model, inner))) / 1e3 * plan.expected_batch_size
        run.detach()
        dispose(model)
        found.append(
            (float((released - expected).norm() / expected.norm()), float(released.norm()) / (clip_norm * len(rows)))
        )
    return found


def broken() -> dict[str, str | None]:
    """Engines whose reduction was broken from outside, and the result of their first step."""

    def nothing_reduced(runner: Any, prepared: Any) -> None:
        runner._reduce = lambda own, flat: unreduced(runner.processes.rank, own, flat)

    def hooks_gone(runner: Any, prepared: Any) -> None:
        for hook in prepared.optimizer._grad_acc_hooks:
            hook.remove()

    def nothing_set(runner: Any, prepared: Any) -> None:
        prepared.optimizer.set_local_grad_for_param = lambda value, parameter: None

    def clipping_on(runner: Any, prepared: Any) -> None:
        prepared.optimizer.clip_grad = 1e-3

    def left_over(runner: Any, prepared: Any) -> None:
        finish = runner.finish

        def add_and_finish() -> None:
            for parameter in prepared.module.parameters():
                parameter.grad.add_(torch.randn_like(parameter.grad) * parameter.grad.norm() * 0.01)
            finish()

        runner.finish = add_and_finish

    ways = {
        "ddp: sums are not reduced": ("ddp", nothing_reduced),
        "ddp: something is added to the gradient": ("ddp", left_over),
        "zero1: gradient clipping": ("zero1", clipping_on),
        "zero2: hooks no longer fire": ("zero2", hooks_gone),
        "zero2: gradient clipping": ("zero2", clipping_on),
        "zero3: gradient clipping": ("zero3", clipping_on),
        "zero3: sums are not reduced": ("zero3", nothing_reduced),
        "zero3: gradients are not set": ("zero3", nothing_set),
    }
    found: dict[str, str | None] = {}
    for name, (engine, sabotage) in ways.items():
        case = Case("llama", tied=True, dtype="float32")
        plan = plan_of(0.5, noise_multiplier=0.8)
        try:
            movement(engine, build_model(case), case, plan, sabotage=sabotage)
            found[name] = None
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def missed(engines: list[str]) -> dict[str, tuple[int, str]]:
    """By engine and mode: the steps before a trained weight is used outside its layer, and the error of the next."""
    found: dict[str, tuple[int, str]] = {}
    for engine in engines:
        for mode in ("full", "lora-attention"):
            case, done = Case("llama", mode=mode, dtype="float32"), []
            part = "q_proj.lora_A.default" if mode == "lora-attention" else "q_proj"

            def use_later(runner: Any, prepared: Any, part: str = part, done: list[float] = done) -> None:
                layer = next(m for name, m in model_inside(prepared).named_modules() if name.endswith(part))

                def also(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:  # within the layer's call: ZeRO-3 gathers
                    return args if len(done) < 2 else (args[0] + module.weight.mean(0),)

                layer.register_forward_pre_hook(also)

            try:
                movement(
                    engine, build_model(case), case, plan_of(0.5, 0.0), steps=3, sabotage=use_later, thresholds=done
                )
                found[f"{engine}, {mode}"] = len(done), ""
            except Exception as error:
                found[f"{engine}, {mode}"] = len(done), f"{type(error).__name__}: {error}"
    return found
