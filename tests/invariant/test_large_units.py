"""A unit with more rows than fit into one pass: clipped as one, whatever way its rows were divided."""

from __future__ import annotations

import pytest
import torch

from dpllm import GhostClipper
from dpllm.ghost import GhostError
from tests.invariant.test_invariance import CASES as OTHER_CASES
from tests.invariant.test_invariance import NUM_ROWS
from tests.mutations import kills
from tests.reference.oracle import (
    LOSSES,
    clipped_sum,
    float64_copy,
    relative_error,
    released,
    row_gradients,
    worst_parameter,
)
from tests.reference.zoo import Batch, Case, build_model, enable_checkpointing, forward_context, make_batch

CASES = [*OTHER_CASES, Case("albert")]
EVERY_CASE = pytest.mark.parametrize("case", [c.but(dtype=d) for d in ("float64", "float32") for c in CASES], ids=str)


def in_passes(model, case: Case, batch: Batch, sizes: list[int], clip_norm: float):
    """Clip all rows as one unit, in passes of so many rows; returns norms and what is released."""
    model.zero_grad(set_to_none=True)
    clipper = GhostClipper(model, clip_norm)
    try:
        start = 0
        for number, size in enumerate(sizes):
            part = batch.rows(list(range(start, start + size)))
            start += size
            with forward_context(case):
                logits = model(**part.inputs).logits
            losses = LOSSES[case.spec.task](logits, part.labels)
            if number < len(sizes) - 1:
                clipper.hold(losses)
            else:
                norms = clipper.backward(losses, torch.zeros(size, dtype=torch.long)).norms
    finally:
        clipper.remove()
    return norms, released(model)


@kills(
    "rows of a large unit are forgotten",
    "dpllm/ghost/receivers.py",
    "join(self._contributions.get(key, []), contributions, one.norm_method)",
    "join([], contributions, one.norm_method)",
)
@pytest.mark.parametrize("sizes", [[2, 2, 2], [4, 2], [1] * 6], ids=str)
@EVERY_CASE
def test_the_unit_is_that_of_the_float64_loop(case, sizes):
    """Norm and released share are those of the sum of its rows' gradients, by single-row autograd in float64."""
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    gradient = row_gradients(float64_copy(model), case.spec.task, batch).sum(0)
    clip_norm = 0.6 * float(gradient.norm())
    norms, total = in_passes(model, case, batch, sizes, clip_norm)
    exact = case.dtype == "float64"
    assert norms.tolist() == pytest.approx([float(gradient.norm())], rel=1e-6 if exact else 1e-4)
    expected = gradient * (clip_norm / gradient.norm())
    assert relative_error(total, expected) <= (1e-5 if exact else 1e-3)
    assert worst_parameter(model, total, expected)[0] <= (1e-5 if exact else 2e-3)
    assert float(total.norm()) <= clip_norm


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_with_checkpointing(kind):
    """Recomputing activations changes nothing in it."""
    case = Case("llama", tied=True, checkpointing=kind)
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    enable_checkpointing(model, kind)
    whole = clipped_sum(model, case, batch, 0.5, torch.zeros(NUM_ROWS, dtype=torch.long))
    _, total = in_passes(model, case, batch, [2, 3, 1], 0.5)
    assert relative_error(total, whole.total) <= 1e-4


def test_the_next_microbatch_is_for_itself():
    """What was held is used once: the units that follow are clipped as if there had been none."""
    case = Case("llama", tied=True, dtype="float64")
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    first, rest = batch.rows([0, 1, 2]), batch.rows([3, 4, 5])
    expected = (
        clipped_sum(model, case, first, 0.1, torch.zeros(3, dtype=torch.long)).total
        + clipped_sum(model, case, rest, 0.1).total
    )
    model.zero_grad(set_to_none=True)
    clipper = GhostClipper(model, 0.1)
    clipper.hold(LOSSES[case.spec.task](model(**first.rows([0, 1]).inputs).logits, first.rows([0, 1]).labels))
    for part, units in ((first.rows([2]), torch.zeros(1, dtype=torch.long)), (rest, None)):
        clipper.backward(LOSSES[case.spec.task](model(**part.inputs).logits, part.labels), units)
    clipper.remove()
    assert relative_error(released(model), expected) <= 1e-6


def test_a_unit_that_is_not_finite_contributes_nothing():
    """One bad row among those held makes the whole unit's share zero."""
    case = Case("llama", dtype="float64")
    model, batch = build_model(case), make_batch(case.spec, num_rows=2)
    model.zero_grad(set_to_none=True)
    clipper = GhostClipper(model, 1.0)
    for number in (0, 1):
        part = batch.rows([number])
        losses = LOSSES[case.spec.task](model(**part.inputs).logits, part.labels)
        if number == 0:
            clipper.hold(losses * float("nan"))
        else:
            result = clipper.backward(losses, torch.zeros(1, dtype=torch.long))
    clipper.remove()
    assert result.factors.tolist() == [0.0]
    assert not released(model).any()


@pytest.mark.parametrize("index", [[0, 1], [0, -1], [1, 1]])
def test_rows_of_others_are_refused(index):
    """The pass that completes a held unit has its rows alone: others would be clipped together with them."""
    case = Case("llama")
    model, batch = build_model(case), make_batch(case.spec, num_rows=3)
    clipper = GhostClipper(model, 1.0)
    clipper.hold(LOSSES[case.spec.task](model(**batch.rows([0]).inputs).logits, batch.rows([0]).labels))
    rest = batch.rows([1, 2])
    losses = LOSSES[case.spec.task](model(**rest.inputs).logits, rest.labels)
    with pytest.raises(GhostError, match="first rows of a unit"):
        clipper.backward(losses, torch.tensor(index))
    clipper.remove()
