"""Rows laid end to end have the clipped sum of padded ones and of the float64 loop, and don't know of each other."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dpllm import GhostClipper, packed_sequence_loss
from dpllm.data.rows import PackedCollator
from dpllm.models.inputs import attention_by_row
from tests.reference.oracle import (
    clipped_sum,
    float64_copy,
    relative_error,
    released,
    row_gradients,
    unit_gradients,
    worst_parameter,
)
from tests.reference.zoo import (
    IGNORED,
    VOCABULARY_SIZE,
    Batch,
    Case,
    build_model,
    enable_checkpointing,
    forward_context,
    make_batch,
)

NUM_ROWS = 6
FAMILIES = ("gpt2-without-dropout", "llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox", "opt")
CASES = [
    *(Case(family, tied=True) for family in FAMILIES),
    Case("llama"),
    Case("gpt2-without-dropout", "lora-all-linear"),
    Case("llama", "lora-all-linear", tied=True),
    Case("llama", "lora-dora"),
    Case("gemma3", "lora-all-linear", tied=True),
    Case("qwen2", "bias-only"),
    Case("opt", "frozen-lower"),
]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=str)
SOME = pytest.mark.parametrize("case", [CASES[0], Case("llama", tied=True), CASES[11]], ids=str)


def rows_of(batch: Batch) -> list[dict]:
    """The rows without their padding, as a data set has them."""
    rows = []
    for ids, mask, labels in zip(batch.inputs["input_ids"], batch.inputs["attention_mask"], batch.labels, strict=True):
        length = int(mask.sum())
        rows.append({"input_ids": ids[:length].tolist(), "labels": labels[:length].tolist()})
    return rows


def packed_losses(model, case: Case, rows: list[dict]):
    """(B,) losses of rows that go through the model end to end."""
    device = next(model.parameters()).device
    inputs = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in PackedCollator()(rows).items()}
    labels = inputs.pop("labels")
    with forward_context(case, device.type):
        logits = model(**inputs).logits
    return packed_sequence_loss(logits, labels, inputs["cu_seq_lens_q"])


def packed_sum(model, case: Case, rows: list[dict], clip_norm: float, unit_index=None, sizes=None, held=0):
    """Norms, and what is released, of rows packed in microbatches of the given sizes.

    Args:
        held: how many of the first microbatches hold rows of a unit that goes on.
    """
    sizes = sizes or [len(rows)]
    model.zero_grad(set_to_none=True)
    clipper, norms, start = GhostClipper(model, clip_norm), [], 0
    try:
        with attention_by_row(model):
            for number, size in enumerate(sizes):
                here = slice(start, start + size)
                start += size
                losses = packed_losses(model, case, rows[here])
                if number < held:
                    clipper.hold(losses)
                    continue
                index = None if unit_index is None else unit_index[here] - unit_index[here].clamp_min(0).min()
                norms.append(clipper.backward(losses, index).norms)
    finally:
        clipper.remove()
    return torch.cat(norms), released(model)


def reference(case: Case, rows: list[dict], unit_index=None):
    """(U, P) gradients by single-row autograd in float64, and a clip norm between their norms."""
    model = float64_copy(build_model(case))
    alone = [Batch({"input_ids": torch.tensor([row["input_ids"]])}, torch.tensor([row["labels"]])) for row in rows]
    for batch in alone:
        batch.inputs["attention_mask"] = torch.ones_like(batch.inputs["input_ids"])
    units = unit_gradients(torch.cat([row_gradients(model, "causal_lm", batch) for batch in alone]), unit_index)
    return units, float(units.norm(dim=1).median()) * (1 + 1e-9)


def clipped(units_UP, clip_norm):
    return ((clip_norm / units_UP.norm(dim=1)).clamp(max=1.0)[:, None] * units_UP).sum(0)


@EVERY_CASE
def test_packed_rows_match_padded_ones_and_the_loop(case):
    """Norms, sum and every parameter's part of it, in float64."""
    batch = make_batch(case.spec, num_rows=NUM_ROWS)
    units, clip_norm = reference(case, rows_of(batch))
    model = build_model(case)
    norms, total = packed_sum(model, case, rows_of(batch), clip_norm)
    torch.testing.assert_close(norms, units.norm(dim=1).float(), rtol=1e-5, atol=0)
    assert relative_error(total, clipped(units, clip_norm)) <= 1e-5
    padded = clipped_sum(model, case, batch, clip_norm)
    torch.testing.assert_close(norms, padded.norms, rtol=1e-6, atol=0)
    assert worst_parameter(model, total, padded.total)[0] <= 1e-5


@pytest.mark.parametrize("unit_index", [[1, 0, 2, 1, 0, 0], [0, -1, 1, 0, 2, 1]], ids=str)
@SOME
def test_units_of_several_packed_rows_and_padding_rows(case, unit_index):
    """Cross terms between rows of one unit are part of its norm; a row of unit -1 counts nowhere."""
    index = torch.tensor(unit_index)
    rows = rows_of(make_batch(case.spec, num_rows=NUM_ROWS))
    units, clip_norm = reference(case, rows, index)
    norms, total = packed_sum(build_model(case), case, rows, clip_norm, index)
    torch.testing.assert_close(norms, units.norm(dim=1).float(), rtol=1e-5, atol=0)
    assert relative_error(total, clipped(units, clip_norm)) <= 1e-5


@pytest.mark.parametrize("sizes", [[1] * 6, [3, 2, 1], [4, 2]], ids=str)
@SOME
def test_packed_microbatches_add_up(case, sizes):
    """Also where one holds a single row, whose attention no boundary divides."""
    rows = rows_of(make_batch(case.spec, num_rows=NUM_ROWS))
    units, clip_norm = reference(case, rows)
    norms, total = packed_sum(build_model(case), case, rows, clip_norm, sizes=sizes)
    torch.testing.assert_close(norms, units.norm(dim=1).float(), rtol=1e-5, atol=0)
    assert relative_error(total, clipped(units, clip_norm)) <= 1e-5


@pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 4, 1]], ids=str)
@SOME
def test_a_unit_of_more_packed_rows_than_one_pass_takes(case, sizes):
    """Its rows are held over several passes and clipped as one."""
    index = torch.zeros(NUM_ROWS, dtype=torch.int64)
    rows = rows_of(make_batch(case.spec, num_rows=NUM_ROWS))
    units, _ = reference(case, rows, index)
    clip_norm = 0.6 * float(units.norm())
    norms, total = packed_sum(build_model(case), case, rows, clip_norm, index, sizes, held=len(sizes) - 1)
    assert norms.tolist() == pytest.approx([float(units.norm())], rel=1e-5)
    assert relative_error(total, clipped(units, clip_norm)) <= 1e-5 and float(total.norm()) <= clip_norm


@SOME
def test_rows_of_one_token_and_of_equal_length(case):
    """A row of one token has no target and contributes nothing; neighbours of it are told apart all the same."""
    generator = torch.Generator().manual_seed(3)
    for lengths in ((9, 1, 1, 5, 1), (1, 1, 1), (6, 6, 6), (4, 4)):
        ids = [torch.randint(4, VOCABULARY_SIZE, (n,), generator=generator).tolist() for n in lengths]
        rows = [{"input_ids": row, "labels": row} for row in ids]
        long = [n for n, length in enumerate(lengths) if length > 1]
        norms, total = packed_sum(build_model(case), case, rows, 0.5)
        assert (norms > 0).nonzero().flatten().tolist() == long
        if long:
            units, _ = reference(case, [rows[n] for n in long])
            assert relative_error(total, clipped(units, 0.5)) <= 1e-5


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@SOME
def test_packed_rows_with_activation_checkpointing(case, kind):
    """What is recomputed is cut into the same rows."""
    rows = rows_of(make_batch(case.spec, num_rows=NUM_ROWS))
    units, clip_norm = reference(case, rows)
    model = build_model(case)
    enable_checkpointing(model, kind)
    norms, total = packed_sum(model, case, rows, clip_norm, sizes=[4, 2])
    torch.testing.assert_close(norms, units.norm(dim=1).float(), rtol=1e-5, atol=0)
    assert relative_error(total, clipped(units, clip_norm)) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@SOME
def test_packed_rows_in_lower_precision(case, dtype):
    """Rounding is that of padded rows, and every unit's share stays within the clip norm."""
    case = case.but(dtype=dtype)
    batch = make_batch(case.spec, num_rows=NUM_ROWS)
    model = build_model(case)
    clip_norm = float(clipped_sum(model, case, batch, 1.0).norms.median())
    padded = clipped_sum(model, case, batch, clip_norm)
    norms, total = packed_sum(model, case, rows_of(batch), clip_norm)
    exact = dtype == "float32"
    torch.testing.assert_close(norms, padded.norms, rtol=1e-5 if exact else 3e-2, atol=0)
    assert relative_error(total, padded.total) <= (1e-4 if exact else 3e-2)
    for row in rows_of(batch):
        _, share = packed_sum(model, case, [row], 0.3 * float(norms.min()))
        assert float(share.norm()) <= 0.3 * float(norms.min())


@SOME
def test_leaving_a_packed_row_out_takes_away_its_share(case):
    """The other rows' norms don't change by a bit more than rounding, wherever the row stood."""
    rows = rows_of(make_batch(case.spec, num_rows=NUM_ROWS))
    model = build_model(case)
    norms, total = packed_sum(model, case, rows, 0.5)
    for out in (0, 2, NUM_ROWS - 1):
        rest = [row for number, row in enumerate(rows) if number != out]
        others, without = packed_sum(model, case, rest, 0.5)
        kept = [number for number in range(NUM_ROWS) if number != out]
        torch.testing.assert_close(others, norms[kept], rtol=1e-6, atol=0)
        assert float((total - without).norm()) <= 0.5


def test_a_unit_that_overflows_takes_no_other_one_with_it():
    """Its own share is exactly zero; the rest of its microbatch is what it is without it."""
    case = Case("llama", tied=True, dtype="float32")
    rows = rows_of(make_batch(case.spec, num_rows=NUM_ROWS))
    model = build_model(case)
    with torch.no_grad():
        model.get_input_embeddings().weight[96] = float("inf")  # a token that no other row has
    rest = [{name: [min(t, 95) for t in tokens] for name, tokens in row.items()} for row in rows]
    model.lm_head = torch.nn.Linear(32, VOCABULARY_SIZE, bias=False)  # untied: its own row stays finite
    bad = {"input_ids": [5, 96, 7, 8], "labels": [5, 96, 7, 8]}
    index = torch.arange(NUM_ROWS + 1)
    expected, without = packed_sum(model, case, rest, 0.5)
    model.zero_grad(set_to_none=True)
    clipper = GhostClipper(model, 0.5)
    mixed = [*rest[:3], bad, *rest[3:]]
    with attention_by_row(model):
        clipper.check_rows(lambda: packed_losses(model, case, rest), index[:-1])
        result = clipper.backward(packed_losses(model, case, mixed), index)
    clipper.remove()
    assert result.num_nonfinite == 1 and result.factors[3] == 0
    torch.testing.assert_close(result.norms[[0, 1, 2, 4, 5, 6]], expected, rtol=1e-6, atol=0)
    assert relative_error(released(model), without) <= 1e-6


def test_packing_saves_the_work_on_padding():
    """Model and clipper together, counted in floating-point operations: rows of 40, 8, 8, ... tokens."""
    case = Case("llama", dtype="float32")
    lengths = (40, 8, 8, 8, 8, 8, 8, 8)
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(4, VOCABULARY_SIZE, (n,), generator=generator).tolist() for n in lengths]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    longest = max(lengths)
    batch = Batch(
        {
            "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
        },
        torch.tensor([row + [IGNORED] * (longest - len(row)) for row in ids]),
    )
    model = build_model(case)
    with FlopCounterMode(display=False) as padded, torch.no_grad():
        model(**batch.inputs)
    inputs = PackedCollator()(rows)
    del inputs["labels"]
    with FlopCounterMode(display=False) as packed, torch.no_grad(), attention_by_row(model):
        model(**inputs)
    share = sum(lengths) / (longest * len(lengths))
    assert packed.get_total_flops() <= 1.2 * share * padded.get_total_flops()
