"""No microbatch makes the host wait, and the stand-in device computes what the CPU does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from dpllm import GhostClipper, PrivacyConfig, PrivateRun, TrainingRows, make_plan, per_sequence_loss
from dpllm.data import transfer
from dpllm.data.units import UnitIndex
from tests import host_waits
from tests.mutations import kills


@pytest.mark.parametrize("name", host_waits.CASES)
def test_no_microbatch_makes_the_host_wait(name):
    """In the steady state: each microbatch beyond the first few reads nothing from the device."""
    ours, _ = host_waits.per_microbatch(host_waits.CASES[name])
    assert not ours


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.repeat_interleave(x, (x > 0).long()),
        lambda x: torch.ones(3).to(x.device),
    ],
)
def test_a_wait_is_counted(wait):
    """Each of these waits on a GPU."""
    x = host_waits.OnDevice(torch.tensor([1.0, -2.0, 3.0]))
    with host_waits.Waits() as waits:
        wait(x)
    assert (waits.of_dpllm + waits.of_others).total() >= 1


def test_what_does_not_wait_is_not_counted():
    """Arithmetic, indices on the device, and copies that are not waited for."""
    x = host_waits.OnDevice(torch.tensor([1.0, -2.0, 3.0]))
    with host_waits.Waits() as waits:
        order = x.argsort()
        y = (x[order] * 2).masked_fill(x > 0, 0) + torch.ones(3).to(x.device, non_blocking=True)
        torch.repeat_interleave(y, torch.ones_like(order), output_size=3)
    assert not waits.of_dpllm + waits.of_others
    with host_waits.Waits(), pytest.raises(RuntimeError, match="of the CPU"):
        x + torch.ones(3)


@kills(
    "rows that are not finite are not zeroed on a device",
    "dpllm/ghost/sums.py",
    "value.masked_fill(zero.view(-1, *[1] * (value.ndim - 1)), 0)",
    "value",
)
@pytest.mark.parametrize("name", ["full", "LoRA", "several rows a unit", "packed rows", "two passes"])
def test_a_unit_that_is_not_finite_contributes_nothing_on_the_device(name):
    """The device zeroes rows that the CPU leaves out; the other units' norms and sum are the same."""
    case, found = host_waits.CASES[name], []
    (microbatch,) = host_waits.batch_of(case, 1)
    infinite_B = torch.ones(host_waits.ROWS).index_fill(0, torch.tensor([host_waits.ROWS - 1]), float("inf"))
    for device in (torch.device("cpu"), host_waits.DEVICE):
        model = host_waits.build(case)
        model = model if device.type == "cpu" else host_waits.moved(model)
        clipper = GhostClipper(model, 0.3, case.norm_method)
        with host_waits.Waits(), host_waits.stand_in(), host_waits.attention(model, case):
            weights_B = infinite_B.to(device)
            loss_of = host_waits.loss_of(model, case.packed, device)
            clipper.check_rows(lambda: loss_of(microbatch.inputs), microbatch.unit_index)  # noqa: B023
            losses = loss_of(microbatch.inputs) * weights_B
            result = clipper.backward(losses, microbatch.unit_index)
            norms, gradients = result.norms.cpu(), [p.grad.cpu() for p in clipper.parameters.values()]
        assert result.num_nonfinite == 1
        found.append((norms[:-1], torch.cat([one.flatten() for one in gradients])))
        clipper.remove()
    (norms, total), (norms_on_device, total_on_device) = found
    assert bool(total.isfinite().all()) and float(total.norm()) > 0.1
    torch.testing.assert_close(norms_on_device, norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(total_on_device, total, rtol=1e-4, atol=1e-6)


def test_inputs_are_sent_in_their_own_class_and_nothing_of_the_collator_changes():
    """A BatchEncoding stays one, nested tensors are sent too, and other values are passed on."""
    ids, nested = torch.arange(6).view(2, 3), torch.ones(2)
    given = BatchEncoding({"input_ids": ids, "images": [nested], "max_length_q": 3, "names": ["a", "b"]})
    with host_waits.Waits() as waits:
        sent = transfer.send(given, host_waits.DEVICE)
    assert not waits.of_dpllm and type(sent) is BatchEncoding
    assert sent["input_ids"].device == sent["images"][0].device == host_waits.DEVICE
    assert given["input_ids"] is ids and given["images"][0] is nested
    assert sent["max_length_q"] == 3 and sent["names"] == ["a", "b"]
    assert transfer.send(given, torch.device("cpu")) is given


@kills(
    "packed lengths that were changed after they were sent are taken from the host",
    "dpllm/data/transfer.py",
    " or version != x._version",
    "",
)
def test_what_the_host_knows_is_not_read_back_unless_it_was_changed():
    """The loss may move the inputs again; a tensor that was written to has other values."""
    with host_waits.Waits() as waits:
        sent = transfer.send({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, host_waits.DEVICE)["cu_seq_lens_q"]
        assert transfer.host_values(sent.to(host_waits.DEVICE)).tolist() == [0, 2, 5]
    assert not waits.of_dpllm
    with host_waits.Waits() as waits:
        sent.add_(1)
        assert transfer.host_values(sent).tolist() == [1, 3, 6]
    assert waits.of_dpllm


@pytest.mark.parametrize("name", ["full", "LoRA"])
def test_a_whole_run_on_the_device_is_that_of_the_cpu(name, tmp_path):
    """Checks, sums, updates and the end of a run; the loss leaves its inputs where the step has put them."""
    case, found = host_waits.CASES[name], []
    rows = TrainingRows(
        units=UnitIndex.one_row_per_unit(len(IDS)),
        lengths=np.array([len(row) for row in IDS]),
        fetch=lambda numbers: [IDS[int(number)] for number in numbers],
        collate=collate,
        max_rows=4,
    )
    privacy = PrivacyConfig(noise_multiplier=0.0, clip_norm=0.5, expected_batch_size=8)
    for device in (torch.device("cpu"), host_waits.DEVICE):
        model = host_waits.build(case)
        model = model if device.type == "cpu" else host_waits.moved(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with host_waits.stand_in(), host_waits.Waits():
            run = PrivateRun.start(tmp_path / device.type, make_plan(privacy, len(IDS), 3), rows)
            run.attach(model, optimizer, start_is_independent=True, schedule_is_independent=True)
            for _ in range(3):
                run.step(run.choose(np.arange(len(IDS))), losses)
                optimizer.step()
                optimizer.zero_grad()
            run.finish()
            found.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters() if p.requires_grad]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


GENERATOR = torch.Generator().manual_seed(0)
IDS = [torch.randint(3, host_waits.VOCABULARY, (12 - number % 3,), generator=GENERATOR) for number in range(10)]


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def losses(model, inputs):
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    return per_sequence_loss(model(**inputs).logits, labels)
