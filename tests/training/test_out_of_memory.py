"""Memory that runs out in the middle of a step: every unit still enters the sum once, in smaller microbatches."""

import functools
import gc
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dpllm import GhostClipper, PrivacyConfig, make_plan
from dpllm.data.units import UnitIndex
from dpllm.engines import SingleProcess
from dpllm.ghost import GhostError
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentStream
from dpllm.privacy.ledger import Ledger, read_ledger
from dpllm.training.microbatches import Microbatch, RowsTaken, microbatches
from dpllm.training.out_of_memory import MicrobatchTooLargeError, OutOfMemory, attempt
from dpllm.training.step import private_step
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.reference.zoo import enable_checkpointing
from tests.scarce import Gate, more_than
from tests.training.test_step import Rows, loss_of

ROWS, CLIP = 24, 0.3
collate = Rows().collate
OWNERS = {
    "single rows": tuple(range(ROWS)),
    "several rows": (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, *range(6, 15)),
    "more rows than fit": (0,) * 9 + (1,) * 6 + (2, 2, 3, 4, 4, 5, 6, 7, 8),
}


def model_with(refuse=None):
    """A float64 model with a gate behind its last block's feed-forward layer."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(tiny_llama_config()).double()
    gate = Gate(refuse or (lambda direction, tokens: False))
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, gate)
    return model, gate


def row_ids():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 61, (5 + n % 4,), generator=generator) for n in range(ROWS)]


def cut(owners, max_rows=6, max_tokens=None, unit_ids=None):
    """The microbatches of a step in which all units take part."""
    units, rows = UnitIndex.from_ids(owners), row_ids()
    drawn = np.arange(units.num_units) if unit_ids is None else np.array(unit_ids, dtype=np.int64)
    return microbatches(
        lambda numbers: [rows[int(n)] for n in numbers],
        collate,
        units,
        np.array([len(row) for row in rows]),
        drawn,
        max_rows,
        max_tokens=max_tokens,
    )


class Recording(SingleProcess):
    """Notes which microbatches were collected as the last one."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.lasts = []

    def collect(self, *args, last, **kwargs):
        self.lasts.append(last)
        super().collect(*args, last=last, **kwargs)


class Stepped:
    """One private step without noise, on a new model."""

    def __init__(self, folder, batch, refuse=None, model=None, lockstep=False):
        self.model, self.gate = model_with(refuse) if model is None else (model, None)
        plan = make_plan(PrivacyConfig(noise_multiplier=0.0, clip_norm=CLIP, expected_batch_size=4), ROWS, 3)
        folder.mkdir()
        self.ledger = Ledger.create(folder / "ledger.jsonl", plan)
        self.engine = Recording(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.engine.lockstep = lockstep
        self.clipper = GhostClipper(self.model, CLIP)
        self.take = lambda: private_step(
            self.clipper, batch, loss_of(self.model), plan, self.engine, self.ledger, IndependentStream(NoiseSource())
        )

    def done(self):
        self.diagnostics = self.take()
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()]) * 4
        return self


@functools.cache
def undisturbed(owners):
    """The step with memory enough."""
    with tempfile.TemporaryDirectory() as folder:
        return Stepped(Path(folder) / "whole", cut(owners)).done()


@functools.cache
def single_units(owners):
    """The clipped sum by plain autograd, unit after unit and row after row."""
    model, _ = model_with()
    parameters, rows = list(model.parameters()), row_ids()
    total = 0
    for unit in sorted(set(owners)):
        unit_gradient = 0
        for row in (rows[n] for n in range(ROWS) if owners[n] == unit):
            grads = torch.autograd.grad(loss_of(model)(collate([row])).sum(), parameters)
            unit_gradient = unit_gradient + torch.cat([g.flatten() for g in grads])
        total = total + unit_gradient * min(1.0, CLIP / float(unit_gradient.norm()))
    return total


@kills(
    "half of a microbatch on which memory ran out is lost",
    "dpllm/training/out_of_memory.py",
    "self._waiting.extendleft(reversed(halves))",
    "self._waiting.appendleft(halves[0])",
)
@kills(
    "a unit whose rows are divided for lack of memory is clipped part by part",
    "dpllm/training/microbatches.py",
    "self.taken[:cut].microbatch(unit_B[:cut], 0, True, share)",
    "self.taken[:cut].microbatch(unit_B[:cut], 1, share=share)",
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("limit", [30, 8])  # of up to 48 tokens: memory runs out once, and until rows are single
@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS.keys())
def test_the_sum_is_that_of_an_undisturbed_step(owners, limit, direction, tmp_path):
    """The sum is that of single-unit autograd; the counts are equal, and the step is charged and ended once."""
    whole = undisturbed(owners)
    parts = Stepped(tmp_path / "parts", cut(owners), more_than(limit, direction)).done()
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(parts.gradient, single_units(owners), rtol=1e-5, atol=1e-8)
    for name in ("num_units", "num_nonfinite", "num_clipped"):
        assert getattr(parts.diagnostics, name) == getattr(whole.diagnostics, name), name
    assert parts.diagnostics.mean_loss == pytest.approx(whole.diagnostics.mean_loss, rel=1e-12)
    assert parts.diagnostics.num_units == len(set(owners)) and parts.diagnostics.num_clipped > 0
    assert parts.engine.lasts[-1] and parts.engine.lasts.count(True) == 1
    assert len(parts.engine.lasts) > len(whole.engine.lasts)
    assert parts.ledger.num_steps == 1
    assert parts.diagnostics.num_divided >= (1 if limit == 30 else 2) and whole.diagnostics.num_divided == 0
    assert parts.diagnostics.max_tokens <= limit and whole.diagnostics.max_tokens is None


@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS.keys())
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_memory_that_runs_out_on_the_last_microbatch(direction, owners, tmp_path):
    """The second half of it is the last of the step, and the first is not."""
    batch, refused = cut(owners), []

    def refuse(where, tokens):
        if len(parts.engine.lasts) == len(batch) - 1 and where == direction and not refused:
            refused.append(tokens)
            return True
        return False

    whole = undisturbed(owners)
    parts = Stepped(tmp_path / "parts", batch, refuse)
    parts.done()
    assert refused and parts.diagnostics.num_divided == 1
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-10, atol=1e-12)
    assert parts.engine.lasts == [False] * len(whole.engine.lasts) + [True]


SHORTAGES = {
    "the driver": "CUDA error: out of memory",
    "Triton": "Triton Error [CUDA]: out of memory",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "the CPU's allocator": "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
}


@pytest.mark.parametrize("text", SHORTAGES.values(), ids=SHORTAGES.keys())
def test_memory_that_others_than_pytorch_lack_runs_out_too(text, tmp_path):
    """These are plain RuntimeErrors; a charged step would be lost."""
    whole = undisturbed(OWNERS["single rows"])
    model, gate = model_with(more_than(30))
    gate.error = lambda: RuntimeError(text)
    parts = Stepped(tmp_path / "parts", cut(OWNERS["single rows"]), model=model).done()
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-10, atol=1e-12)
    assert parts.diagnostics.num_divided >= 1


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("something else")]
)
def test_another_error_is_no_shortage(error, tmp_path):
    """It is raised as it is, and no row is run again."""
    model, gate = model_with(more_than(30))
    gate.error = lambda: error
    parts = Stepped(tmp_path / "parts", cut(OWNERS["single rows"]), model=model)
    with pytest.raises(type(error), match=f"^{error}$"):
        parts.done()


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_memory_that_runs_out_while_activations_are_recomputed(kind, tmp_path):
    """With activation checkpointing the forward pass of a layer runs again within the backward pass."""
    passes = []

    def refuse(direction, tokens):
        recomputed = torch.is_grad_enabled() and passes and passes[-1] == "forward"
        passes.append(direction)
        return direction == "forward" and bool(recomputed) and tokens > 16

    owners = OWNERS["more rows than fit"]
    whole = undisturbed(owners)
    parts = Stepped(tmp_path / "parts", cut(owners), refuse)
    enable_checkpointing(parts.model, kind)
    parts.done()
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-10, atol=1e-12)
    assert parts.diagnostics.num_divided > 0 and parts.diagnostics.num_units == whole.diagnostics.num_units


def test_microbatches_that_follow_are_no_larger(tmp_path):
    """Memory runs out once in the step, not at every microbatch; those that fit are left as they are."""
    step = Stepped(tmp_path / "run", cut(OWNERS["single rows"]), more_than(30)).done()
    tokens = [tokens for direction, tokens in step.gate.passed if direction == "backward"]
    assert step.diagnostics.num_divided == 1 and step.diagnostics.max_tokens == 24
    assert max(tokens) <= 24 and tokens.count(24) >= 2


@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant"])
def test_nothing_of_the_failed_pass_stays_in_memory(kind):
    """Neither the exception nor the clipper refer to its tensors, which a GPU needs for the halves."""
    made = []

    def refuse(direction, tokens):
        return direction == "backward"

    class Watching(nn.Module):
        def forward(self, x):
            y = x * 1.0
            made.append(weakref.ref(y))
            return y

    model, _ = model_with(refuse)
    model.model.layers[1].mlp.insert(0, Watching())
    enable_checkpointing(model, kind)
    clipper = GhostClipper(model, CLIP)
    (microbatch, *_) = cut(OWNERS["single rows"])
    gc.disable()
    try:
        outcome = attempt(clipper, microbatch, loss_of(model), check_rows=False)
    finally:
        gc.enable()
    assert outcome == OutOfMemory("Tried to allocate 2.00 GiB.")
    assert made and all(reference() is None for reference in made)
    assert clipper._pass is None
    clipper.remove()


def first_of(owners="single rows"):
    return next(iter(cut(OWNERS[owners])))


class Coupled(nn.Module):
    """Makes each row depend on the others."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_first_pass_that_broke_off_has_not_shown_that_rows_are_independent(direction, tmp_path):
    """It is measured on the halves; a row that depends on another cannot be bounded."""
    step = Stepped(tmp_path / "run", cut(OWNERS["single rows"]), more_than(30, direction))
    step.model.model.layers[1].mlp.append(Coupled())
    with pytest.raises(GhostError, match="depends on row"):
        step.take()
    assert not step.clipper.rows_checked


def test_single_rows_show_nothing_about_independence(tmp_path):
    """If memory suffices only for single rows, the check waits for the first pass of several."""
    step = Stepped(tmp_path / "run", cut(OWNERS["single rows"]), more_than(8)).done()
    assert step.diagnostics.max_tokens == 8 and not step.clipper.rows_checked


def test_a_single_row_that_does_not_fit_is_an_error_that_says_what_to_do(tmp_path):
    """The step stays charged, and another one on this engine is refused."""
    step = Stepped(tmp_path / "run", cut(OWNERS["single rows"]), more_than(7))
    with pytest.raises(MicrobatchTooLargeError, match="Tried"):
        step.take()
    assert read_ledger(step.ledger.path).num_steps == 1
    with pytest.raises(ValueError, match="half-way"):
        step.take()


def test_processes_in_lockstep_do_not_divide(tmp_path):
    """The others would wait for this one at another layer; the remedy is named instead."""
    step = Stepped(tmp_path / "run", cut(OWNERS["single rows"]), more_than(30), lockstep=True)
    with pytest.raises(MicrobatchTooLargeError, match=r"microbatch\.tokens"):
        step.take()
    assert step.engine.lasts == [] and step.ledger.num_steps == 1


def test_a_microbatch_of_unknown_origin_is_not_divided(tmp_path):
    """Its tensors need not be divisible by rows."""
    by_hand = Microbatch(first_of().inputs, torch.arange(6), 6)
    assert by_hand.halves() is None and by_hand.num_tokens == 0
    with pytest.raises(MicrobatchTooLargeError, match=r"dpllm\.training\.microbatches"):
        Stepped(tmp_path / "run", [by_hand], more_than(30)).take()


class Scarce(TorchFunctionMode):
    """Memory runs out where tensors are concatenated."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.cat:
            raise torch.OutOfMemoryError("no room to concatenate")
        return func(*args, **(kwargs or {}))


def test_what_is_held_cannot_be_joined_twice():
    """Where memory runs out while parts of a unit are joined, a second attempt would count some of them twice."""
    model, _ = model_with()
    clipper = GhostClipper(model, CLIP)
    first = first_of("more rows than fit")
    assert first.continues
    clipper.hold(loss_of(model)(first.inputs))
    losses = loss_of(model)(first.inputs)
    with Scarce(), pytest.raises(torch.OutOfMemoryError, match="no room"):
        clipper.hold(losses)
    with pytest.raises(GhostError, match="could not be combined"):
        clipper.forget()
    clipper.remove()


@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS.keys())
def test_halves_have_the_same_rows_and_units(owners):
    """Down to single rows: in order, each unit ended once, and those that go on marked."""

    def shown(batch):
        return [row for m in batch for row in m.taken.rows], sum(m.num_units for m in batch)

    whole = list(cut(owners))
    singles = list(whole)
    while any(m.halves() for m in singles):
        singles = [part for m in singles for part in (m.halves() or [m])]
    rows, units = shown(singles)
    assert all(a is b for a, b in zip(rows, shown(whole)[0], strict=True)) and len(rows) == ROWS
    assert units == shown(whole)[1] == len(set(owners))
    assert all(len(m.unit_index) == 1 and m.num_units == (0 if m.continues else 1) for m in singles)
    assert all(m.unit_index.tolist() == [0] for m in singles)
    assert sum(m.continues for m in singles) == ROWS - len(set(owners))
    assert sum(m.share for m in singles) == pytest.approx(1) and all(m.share > 0 for m in singles)


@pytest.mark.parametrize(
    ("unit_index", "expected"),
    [
        ([0, 0, 1, 1, 1, 2], [[0, 0], [0, 0, 0, 1]]),  # nearest to the middle, the earlier of two
        ([0, 1, 1, 1, 1, 1], [[0], [0, 0, 0, 0, 0]]),
        ([0, 0, 0, 0, 1], [[0, 0, 0, 0], [0]]),
        ([0, 0, 0], [[0, 0], [0]]),
    ],
)
def test_the_cut_is_between_units_where_there_are_several(unit_index, expected):
    """A unit stays in one piece as long as it can; numbers begin with 0 in each half."""
    taken = RowsTaken(row_ids()[: len(unit_index)], np.full(len(unit_index), 8), collate)
    halves = taken.microbatch(np.array(unit_index), max(unit_index) + 1).halves()
    assert [half.unit_index.tolist() for half in halves] == expected
    assert [half.continues for half in halves] == [max(unit_index) == 0, False]
    assert [half.num_units for half in halves] == [
        0 if halves[0].continues else len(set(expected[0])),
        len(set(expected[1])),
    ]
