"""How different two results of a row may be, in units of its contribution to the sum."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, PrivateRun
from dpllm.mechanism.clipping import AutomaticClipping, FlatClipping, GroupClipping, PerLayerClipping, QuantileClipping
from dpllm.training.checks import differences
from dpllm.training.checks.differences import TOLERANCE, Bound, Precision, Seen, compare, counting_norm, finding_of
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.row_sample import Company
from tests.mutations import kills
from tests.training.checks.test_independence import DEPENDS, llama, lm_loss, rows_of, steps, unequal
from tests.training.test_run import plan_of


@pytest.mark.parametrize(
    ("clipping", "half"),
    [
        (FlatClipping(1e-5), 5e-6),
        (PerLayerClipping(2.0), 1.0),
        (GroupClipping(2.0, {"a": "0.*", "b": "*"}), 1.0),
        (AutomaticClipping(1.0), 0.01),
        (AutomaticClipping(1.0, 1e-9), 1e-9),
        (QuantileClipping(1.0, start=1e-3), 5e-4),
    ],
)
def test_the_least_norm_that_counts_is_that_of_half_a_contribution(clipping, half):
    clipper = GhostClipper(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), clipping=clipping)
    assert 0.99 * half <= counting_norm(clipper) <= 1.8 * half
    clipper.remove()


def of(loss, norm, *beside):
    return Seen(row=0, place=0, loss=loss, norm=norm, company=Company((0, *beside), "words"))


FLOAT32, BFLOAT16, FLOAT16 = (("cpu", dtype) for dtype in ("float32", "bfloat16", "float16"))


@kills(
    "in bfloat16, a small loss allows any difference of norms",
    "dpllm/training/checks/differences.py",
    "min(_LOOSEST, _LARGEST / tolerance)",
    "_LOOSEST",
)
@pytest.mark.parametrize(
    ("arithmetic", "loss", "norms", "counting", "is_found"),
    [
        (FLOAT32, 1e-6, (1e-6, 1.2e-6), 1e-6, True),  # a small scale, and C as small: a fifth of C
        (FLOAT32, 1e-6, (1e-6, 1.2e-6), 1.0, False),  # the same beside C = 1: rounding, or a millionth of C
        (FLOAT32, 1e-6, (3.0, 3.1), 1.0, True),
        (FLOAT32, 1e-6, (3.0, 3.02), 1.0, False),  # nearly 0 and clipped: rounding
        (FLOAT32, 1.0, (1e-6, 1.01e-6), 1.0, True),
        (BFLOAT16, 1e-6, (1e-6, 1.4e-6), 1e-6, True),  # two sevenths of C
        (BFLOAT16, 1e-6, (1e-6, 1.4e-6), 1.0, False),  # the same beside C = 1
        (BFLOAT16, 1e-6, (3.0, 3.3), 1.0, False),  # rounding of a clipped gradient at a loss of nearly 0
        (FLOAT16, 1e-6, (1e-6, 1.4e-6), 1e-6, True),
        (FLOAT16, 1e-6, (3.0, 3.3), 1.0, False),
        (("gpu", "bfloat16"), 1e-6, (1e-6, 1.4e-6), 1e-6, True),
        (("gpu", "autocast to bfloat16"), 1e-6, (1e-6, 1.4e-6), 1e-6, True),
    ],
)
def test_a_difference_counts_by_what_it_adds_to_the_sum(arithmetic, loss, norms, counting, is_found):
    """Not by the scale of the loss, which a user chooses together with C; coarse arithmetic hides no coupling.

    A bound that is a multiple of the tolerance would be 15 C in bfloat16: a difference of any size would pass.
    """
    _, worst = compare([of(loss, norms[0]), of(loss, norms[1], 1)], counting, TOLERANCE[arithmetic])
    assert (worst is not None) is is_found


def test_a_coupling_of_small_losses_is_refused_where_the_clip_norm_is_small(tmp_path):
    """As of a regression with small targets: each contribution is about C long, and other rows lengthen it."""

    def scaled(model, inputs):
        loss_B = lm_loss(model, inputs)
        return 1e-7 * loss_B * (1.2 - 0.2 / len(loss_B))

    with pytest.raises(IndependenceError, match=f"The gradient norm {DEPENDS}"):
        steps(tmp_path, llama(), rows_of(unequal(40).to_list()), scaled, clip_norm=1e-6)


def over_all_positions(model, inputs):
    """A mean that takes padding for tokens."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return logits.square().mean((1, 2))


def over_the_batch(model, inputs):
    """A sum over a row's targets that is divided by those of the batch."""
    return lm_loss(model, inputs) / (inputs["labels"] != -100).sum()


def beside_the_mean(model, inputs):
    """A row less the mean of all rows."""
    loss_B = lm_loss(model, inputs)
    return (loss_B - 0.5 * loss_B.detach().mean()).square()


@pytest.mark.parametrize(
    ("loss", "reads_padding"), [(over_all_positions, True), (over_the_batch, False), (beside_the_mean, False)]
)
def test_the_message_names_the_cause_that_was_measured(tmp_path, loss, reads_padding):
    """The row alone, padded as beside the others, tells padding from a loss over the batch."""
    with pytest.raises(IndependenceError, match=DEPENDS) as caught:
        steps(tmp_path, llama(), rows_of(unequal(40).to_list()), loss)
    assert ("reads padding" in str(caught.value)) is reads_padding
    assert ("batch's number" in str(caught.value)) is not reads_padding


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("dtype", "weights", "name"),
    [
        (torch.float64, torch.float64, "float32"),
        (torch.float32, torch.float32, "float32"),
        (torch.bfloat16, torch.bfloat16, "bfloat16"),
        (torch.bfloat16, torch.float32, "autocast to bfloat16"),
        (torch.float16, torch.float16, "float16"),
        (torch.float16, torch.float32, "autocast to float16"),
    ],
)
def test_the_tolerance_is_that_of_device_and_arithmetic(dtype, weights, name, on_gpu, rounds, monkeypatch):
    """One row of the table each; a GPU has at least the room of a CPU."""
    monkeypatch.setattr(differences, "_rounds_products", lambda: rounds)
    precision = Precision(dtype, weights, on_gpu)
    if on_gpu and rounds and dtype == torch.float32:
        name = "TF32"
    assert precision.arithmetic == name
    assert precision.bound() == TOLERANCE["gpu" if on_gpu else "cpu", name]
    assert TOLERANCE["gpu", name].relative >= TOLERANCE.get(("cpu", name), Bound(0.0)).relative


@pytest.mark.parametrize(("targets", "is_found"), [(1, False), (2, False), (20, True), (0, True)])
def test_a_step_of_a_logit_is_room_for_rows_with_few_targets(targets, is_found):
    """In bfloat16 on a GPU: one step moves the loss of a row with one target by 2^-3, and that of 20 by little."""
    seen = [replace(of(2.0, 3.0, *beside), loss=loss, targets=targets) for loss, beside in ((2.0, ()), (2.12, (1,)))]
    found, worst = compare(seen, 1.0, Bound(4e-2, step=2**-3))
    assert (worst is not None) is is_found and (found.loss > found.tolerance) is is_found


@pytest.mark.parametrize(("weights", "autocast", "name"), [("float32", True, "autocast to "), ("bfloat16", False, "")])
def test_what_was_measured_is_open_to_programs(weights, autocast, name, tmp_path):
    """`PrivateRun.row_differences`, by which a table for a device can be made."""
    model = llama().to(getattr(torch, weights))
    rows = rows_of(unequal(40).to_list())
    plan = plan_of(num_steps=2)
    run = PrivateRun.start(tmp_path, plan, rows)
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_of(model, inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return lm_loss(model, inputs)

    assert run.row_differences is None
    run.step(next(run.draws(1)), loss_of)
    found = run.row_differences
    assert found.tolerance == TOLERANCE["cpu", f"{name}bfloat16"].relative
    assert 0 <= found.loss <= found.tolerance and 0 <= found.norm <= found.tolerance
    run.detach()
    assert run.row_differences is None


def test_a_finding_for_the_report_holds_no_number():
    found = finding_of((of(2.123, 1.0), of(2.456, 1.0, 1)), 1e-3), finding_of((of(2.0, 1.0), of(2.0, 1.5, 1)), 1e-3)
    assert "the loss of a row" in found[0] and "the gradient norm of a row" in found[1]
    assert not any(character.isdigit() for text in found for character in text)
