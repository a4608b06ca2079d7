"""The program in the processes of `test_packed`: a private step on packed rows, against padded ones in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dpllm import PrivateRun
from dpllm.data.rows import PackedCollator
from dpllm.data.units import UnitIndex
from dpllm.engines import model_inside
from dpllm.models.inputs import attention_by_row
from dpllm.models.tasks import default_row_loss
from dpllm.training.row_losses import HeadLosses, RowLosses
from tests.distributed.matrix import NUM_ROWS, flat, plan_of
from tests.distributed.setups import dispose, prepare, update, whole_parameters
from tests.memory_ledger import MemoryLedger
from tests.reference.oracle import clipped_sum
from tests.reference.zoo import Case, build_model, enable_checkpointing, float64_copy, make_batch
from tests.small_model import rows_by_number


def errors(engine: str, clip_norm: float = 0.5) -> list[float]:
    """Relative error of the released sum, for units of one row and of two, and for a model with checkpointing."""
    found = []
    for case, rows_per_unit in (
        (Case("llama", tied=True, dtype="float32"), 1),
        (Case("gpt2-without-dropout", tied=True, dtype="float32"), 2),
        (Case("llama", mode="lora-all-linear", dtype="float32", checkpointing="non-reentrant"), 1),
    ):
        owners = [row // rows_per_unit for row in range(NUM_ROWS)]
        batch = make_batch(case.spec, num_rows=NUM_ROWS)
        model = build_model(case)
        expected = clipped_sum(float64_copy(model), case.but(dtype="float64"), batch, clip_norm, torch.tensor(owners))
        released = movement(engine, model, case, owners, batch, clip_norm)
        found.append(float((released - expected.total).norm() / expected.total.norm()))
    return found


def movement(engine: str, model: Any, case: Case, owners: list[int], batch: Any, clip_norm: float) -> torch.Tensor:
    """Return the release of one step, from microbatches of at most 22 tokens: two or three rows."""
    lengths = batch.inputs["attention_mask"].sum(1).numpy()
    rows = [
        {"input_ids": ids[:length], "labels": labels[:length]}
        for ids, labels, length in zip(batch.inputs["input_ids"], batch.labels, lengths, strict=True)
    ]
    units = UnitIndex.from_ids(owners)
    data = rows_by_number(rows, PackedCollator(), lengths, units=units, max_rows=None, max_tokens=22, packed=True)

    chunks = set()

    class Watched(HeadLosses):
        def __call__(self, *args: Any) -> Any:
            outputs, losses = super().__call__(*args)
            chunks.add(losses is not None)
            return outputs, losses

    loss = RowLosses(default_row_loss(model), packed=True, head=Watched())
    with attention_by_row(model):
        prepared, optimizer = prepare(engine, model, lr=1e3)
        inner = model_inside(prepared)
        enable_checkpointing(inner, case.checkpointing)
        plan = plan_of(clip_norm, noise_multiplier=0.0, num_units=units.num_units)
        run = PrivateRun(plan, data, MemoryLedger())
        run.attach(prepared, optimizer)
        before = whole_parameters(prepared, inner)
        run.step(run.choose(np.arange(units.num_units)), loss)
        update(prepared, optimizer)
        after = whole_parameters(prepared, inner)
        run.detach()
        assert chunks == {case.mode != "full" and engine != "zero3"}, chunks  # DeepSpeed's hooks are on every module
        dispose(prepared)
    return (flat(before) - flat(after)) / 1e3 * plan.expected_batch_size
