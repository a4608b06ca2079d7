"""What one unit can change: the neighbour property through the public API, for every loss, with real collation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from dpllm import GhostClipper
from dpllm.data.rows import RowCollator
from tests.reference.oracle import LOSSES, Clipped, clipped_sum, relative_error, released, trainable
from tests.reference.zoo import (
    CHECKPOINTING,
    DTYPES,
    FAMILIES,
    NUM_LABELS,
    Batch,
    Case,
    Family,
    build_model,
    enable_checkpointing,
    forward_context,
    make_batch,
)

UNIT_OF_ROW = [0, 1, 1, 2, 3, 3, 3, 4]  # units of one, two and three rows
ROW_LENGTHS = [7, 9, 14, 8, 6, 10, 5, 11]  # unit 1 holds the longest row: the padding shrinks when it leaves
RARE_TOKEN = 60
EVERY_LOSS = [
    Case("gpt2-without-dropout", tied=True),
    Case("llama", mode="lora-all-linear"),
    Case("t5", tied=True),
    Case("t5", mode="lora-all-linear"),
    Case("bert"),
    Case("roberta", mode="lora-all-linear"),
]


def make_records(family: Family) -> list[dict]:
    """Tokenized rows with masked labels, a class, or labels of a length of their own. None contains `RARE_TOKEN`."""
    generator = torch.Generator().manual_seed(5)

    def tokens(length: int) -> list[int]:
        return torch.randint(4, RARE_TOKEN, (length,), generator=generator).tolist()

    records = []
    for unit, length in zip(UNIT_OF_ROW, ROW_LENGTHS, strict=True):
        input_ids = tokens(length)
        labels = {
            "causal_lm": [-100, -100, *input_ids[2:]],
            "seq2seq_lm": tokens(length // 2 + 1),
            "sequence_classification": length % NUM_LABELS,
        }
        records.append({"input_ids": input_ids, "labels": labels[family.task], "unit": unit})
    return records


def collate(model: nn.Module, family: Family, records: list[dict]) -> Batch:
    """Pads with the library's collator, to the longest of these records."""
    inputs = RowCollator(pad_token_id=family.pad_token_id, task=family.task)(records)
    labels = inputs.pop("labels")
    if family.task == "seq2seq_lm":
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    return Batch(inputs, labels)


def sum_of(model: nn.Module, case: Case, records: list[dict], clip_norm: float) -> Clipped:
    """The clipped sum over the units of these records, renumbered from 0."""
    present = sorted({record["unit"] for record in records})
    unit_index = torch.tensor([present.index(record["unit"]) for record in records])
    return clipped_sum(model, case, collate(model, case.spec, records), clip_norm, unit_index)


def poisoned(model: nn.Module, value: float) -> nn.Module:
    """Makes the rare token's embedding non-finite."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_embedding = any(f"{word}." in name for word in ("embed_tokens", "shared", "wte", "word_embeddings"))
            if is_embedding and name.endswith("weight"):
                parameter[RARE_TOKEN] = value
    return model


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", EVERY_LOSS, ids=str)
def test_leaving_a_unit_out_moves_the_sum_by_at_most_the_clip_norm(case, dtype):
    """Neighbours differ by min(norm, C) of the unit that left, however the padding changed with it."""
    case = case.but(dtype=dtype)
    model, records = build_model(case), make_records(case.spec)
    norms = sum_of(model, case, records, 1.0).norms
    clip_norm = float(norms.median())
    total = sum_of(model, case, records, clip_norm).total
    rounding = 1e-6 if dtype == "float64" else 1e-5
    moved = []
    for unit, norm in enumerate(norms.tolist()):
        without = sum_of(model, case, [record for record in records if record["unit"] != unit], clip_norm).total
        moved.append(float((total - without).norm()))
        assert moved[-1] <= clip_norm * (1 + rounding)
        assert moved[-1] == pytest.approx(min(norm, clip_norm), rel=1e-3)
    assert min(moved) < 0.99 * clip_norm < max(moved)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", tied=True),
        Case("llama", tied=True),
        Case("llama", mode="lora-all-linear"),
        Case("gemma3", tied=True),
        Case("t5"),
        Case("bert"),
    ],
    ids=str,
)
def test_an_update_moves_the_parameters_by_at_most_lr_clip_norm_batch(case, dtype, checkpointing):
    """With a tiny C and SGD, two microbatches of B units together move the parameters by at most lr * C * B.

    The learning rate is so large that the rounding of parameters counts for little beside it.
    """
    case = case.but(dtype=dtype, checkpointing=checkpointing)
    model, batch = build_model(case), make_batch(case.spec)
    enable_checkpointing(model, checkpointing)
    clip_norm, learning_rate = 1e-6, 1e10
    clipper = GhostClipper(model, clip_norm=clip_norm)
    before = [parameter.detach().double() for parameter in trainable(model).values()]
    torch.manual_seed(0)
    for rows in ([0, 1, 2], [3, 4]):
        part = batch.rows(rows)
        with forward_context(case):
            logits = model(**part.inputs).logits
        clipper.backward(LOSSES[case.spec.task](logits, part.labels))
    clipper.remove()
    torch.optim.SGD(trainable(model).values(), lr=learning_rate).step()
    after = [parameter.detach().double() for parameter in trainable(model).values()]
    moved = math.sqrt(sum(float((b - a).square().sum()) for a, b in zip(before, after, strict=True)))
    bound = learning_rate * clip_norm * batch.num_rows
    assert 0.1 * bound <= moved <= bound * (1 + 2**-8)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2-without-dropout"),
        Case("llama"),
        Case("llama", mode="lora-all-linear"),
        Case("llama", mode="lora-embedding"),
        Case("opt"),
        Case("bert"),
        Case("t5"),
    ],
    ids=str,
)
def test_a_unit_with_a_nonfinite_gradient_contributes_nothing(case, dtype, value):
    """Its factor is 0, nothing of it reaches the sum, and the other units' shares are what they were."""
    case = case.but(dtype=dtype)
    model, records = poisoned(build_model(case), value), make_records(case.spec)
    healthy = [record for record in records if record["unit"] != 3]
    clip_norm = float(sum_of(model, case, healthy, 1.0).norms.median())
    expected = sum_of(model, case, healthy, clip_norm)
    sick = next(record for record in records if record["unit"] == 3)  # one row of its three
    sick["input_ids"][2] = RARE_TOKEN
    result = sum_of(model, case, records, clip_norm)
    assert float(result.factors[3]) == 0
    assert not math.isfinite(float(result.norms[3]))
    others = torch.cat([result.factors[:3], result.factors[4:]])
    assert bool(torch.isfinite(result.total).all())
    rounding = {"float64": 1e-6, "float32": 2e-5, "bfloat16": 2e-2}[dtype]
    torch.testing.assert_close(others, expected.factors, rtol=rounding, atol=0)
    assert relative_error(result.total, expected.total) <= rounding


def _scaled_sum(model: nn.Module, case: Case, batch: Batch, clip_norm: float, scale: list[float]) -> Clipped:
    """The clipped sum of losses multiplied by `scale`."""
    model.zero_grad(set_to_none=True)
    clipper = GhostClipper(model, clip_norm=clip_norm)
    try:
        losses = LOSSES[case.spec.task](model(**batch.inputs).logits, batch.labels)
        result = clipper.backward(losses * torch.tensor(scale, dtype=losses.dtype))
    finally:
        clipper.remove()
    return Clipped(result.norms, result.factors, released(model))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "case", [Case("gpt2-without-dropout", tied=True), Case("llama", mode="lora-all-linear")], ids=str
)
@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_a_loss_scaled_to_a_nonfinite_one_contributes_nothing(case, dtype, scale):
    """A row whose loss was multiplied by infinity or NaN leaves the sum of the other rows."""
    case = case.but(dtype=dtype)
    model, batch = build_model(case), make_batch(case.spec)
    clip_norm = float(clipped_sum(model, case, batch, 1.0).norms.median())
    expected = clipped_sum(model, case, batch.rows([0, 2, 3, 4]), clip_norm)
    result = _scaled_sum(model, case, batch, clip_norm, [1.0, scale, 1.0, 1.0, 1.0])
    assert float(result.factors[1]) == 0
    assert relative_error(result.total, expected.total) <= (1e-6 if dtype == "float64" else 2e-5)


@pytest.mark.parametrize(
    "case", [Case("gpt2-without-dropout", tied=True), Case("llama", mode="lora-all-linear")], ids=str
)
@pytest.mark.parametrize("exponent", [10, 15, 18, 20, 25, 30, 36])
def test_a_gradient_near_the_end_of_float32_is_bounded(case, exponent):
    """A gradient whose square overflows float32, itself finite or not, contributes at most C and nothing non-finite."""
    case = case.but(dtype="float32")
    model, batch = build_model(case), make_batch(case.spec)
    clip_norm = float(clipped_sum(model, case, batch, 1.0).norms.median())
    expected = clipped_sum(model, case, batch.rows([0, 2, 3, 4]), clip_norm)
    result = _scaled_sum(model, case, batch, clip_norm, [1.0, 10.0**exponent, 1.0, 1.0, 1.0])
    assert bool(torch.isfinite(result.total).all())
    assert float((result.total - expected.total).norm()) <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("exponent", [-8, -15, -20, -25, -30])
def test_a_gradient_near_zero_is_bounded(exponent):
    """A gradient whose square underflows float32 still contributes at most C, for C as small as that gradient."""
    case = Case("llama", dtype="float32")
    model, batch = build_model(case), make_batch(case.spec).rows([1])
    scale = 10.0**exponent
    clip_norm = 0.5 * scale * float(clipped_sum(model, case, batch, 1.0).norms)
    result = _scaled_sum(model, case, batch, clip_norm, [scale])
    assert float(result.total.norm()) <= clip_norm * (1 + 1e-6)


def released_over_clip_norm_of_sum(module: nn.Module, inputs: Tensor, grads: Tensor, unit_index: Tensor) -> float:
    """Norm over C of what one unit releases, for a module with output gradient `grads` and C at half the true norm."""
    true = module.weight.detach().double().requires_grad_()
    output = torch.func.functional_call(copy.deepcopy(module).double(), {"weight": true}, _as_double(inputs))
    (gradient,) = torch.autograd.grad((output * grads.double()).sum(), true)
    clip_norm = 0.5 * float(gradient.norm())
    clipper = GhostClipper(module, clip_norm=clip_norm)
    clipper.backward((module(inputs) * grads).flatten(1).sum(1), unit_index)
    clipper.remove()
    return float(released(module).norm()) / clip_norm


def _as_double(inputs: Tensor) -> Tensor:
    return inputs.double() if inputs.is_floating_point() else inputs


def _nearly_cancelling(shape: tuple[int, ...], dim: int, remainder: float, generator: torch.Generator) -> Tensor:
    """Entries that add up to almost nothing over `dim`: their sum is smaller than they are by about `remainder`."""
    noise = torch.randn(shape, generator=generator)
    return noise - noise.mean(dim, keepdim=True) + remainder * torch.randn(shape, generator=generator)


@pytest.mark.parametrize("remainder", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("width", [16, 256])
def test_tokens_that_cancel_release_no_more_than_the_clip_norm(width, remainder):
    """A matrix's gradient whose tokens nearly cancel has a norm that rounds badly; C bounds it all the same."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        module = nn.Linear(width, width, bias=False)
        inputs = 1 + remainder * torch.randn(1, 64, width, generator=generator)
        grads = _nearly_cancelling((1, 64, width), 1, remainder, generator)
        assert released_over_clip_norm_of_sum(module, inputs, grads, torch.tensor([0])) <= 1


@pytest.mark.parametrize("remainder", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("entries", [8, 4000])
def test_lookups_that_cancel_release_no_more_than_the_clip_norm(entries, remainder):
    """The same for a table in which the token looked up is one and the same."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        module = nn.Embedding(entries, 32)
        grads = _nearly_cancelling((1, 64, 32), 1, remainder, generator)
        index = torch.full((1, 64), 3)
        assert released_over_clip_norm_of_sum(module, index, grads, torch.tensor([0])) <= 1


@pytest.mark.parametrize("remainder", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("width", [16, 256])
@pytest.mark.parametrize("table", [False, True])
def test_rows_of_a_unit_that_cancel_release_no_more_than_the_clip_norm(table, width, remainder):
    """A unit whose rows nearly cancel one another: the rounding of each row's share counts against C as well."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        grads = torch.randn(1, 24, width, generator=generator).repeat(2, 1, 1)
        grads[1] = -grads[1] * (1 + remainder * torch.randn(24, width, generator=generator))
        if table:
            module = nn.Embedding(8 if width == 16 else 4000, width)
            inputs = torch.arange(24)[None].expand(2, -1) % 8
        else:
            module = nn.Linear(width, width, bias=False)
            inputs = torch.randn(1, 24, width, generator=generator).repeat(2, 1, 1)
        assert released_over_clip_norm_of_sum(module, inputs, grads, torch.tensor([0, 0])) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EVERY_LOSS, ids=str)
def test_padding_rows_contribute_nothing(case, dtype):
    """Rows of unit -1 leave the sum as it is: copies of real rows, masked rows, and non-finite ones."""
    case = case.but(dtype=dtype)
    model, records = build_model(case), make_records(case.spec)
    if not case.tied:
        poisoned(model, math.inf)
    clip_norm = float(sum_of(model, case, records, 1.0).norms.median())
    expected = sum_of(model, case, records, clip_norm)
    masked, sick = dict(records[1]), dict(records[5])
    if isinstance(masked["labels"], list):
        masked["labels"] = [-100] * len(masked["labels"])
    if not case.tied:
        sick["input_ids"] = [RARE_TOKEN, *sick["input_ids"][1:]]
    rows = [records[2], *records, masked, sick]
    unit_index = torch.tensor([-1, *UNIT_OF_ROW, -1, -1])
    result = clipped_sum(model, case, collate(model, case.spec, rows), clip_norm, unit_index)
    rounding = {"float64": 1e-6, "float32": 2e-5}.get(dtype, 2e-2)
    assert result.factors.shape == expected.factors.shape
    torch.testing.assert_close(result.factors, expected.factors, rtol=rounding, atol=0)
    assert relative_error(result.total, expected.total) <= rounding


@pytest.mark.parametrize("case", EVERY_LOSS, ids=str)
def test_a_batch_of_padding_rows_alone_has_a_sum_of_zero(case):
    """An empty draw is a step like any other: no unit, and a gradient of exact zeros for every parameter."""
    model, records = build_model(case), make_records(case.spec)
    unit_index = torch.full((len(records),), -1)
    result = clipped_sum(model, case, collate(model, case.spec, records), 1.0, unit_index)
    assert result.norms.shape == result.factors.shape == (0,)
    assert not bool(result.total.any())


def test_every_loss_has_a_neighbour_test():
    """The cases above cover each of the library's losses."""
    assert {FAMILIES[case.family].task for case in EVERY_LOSS} == set(LOSSES)


def test_a_row_alone_gives_the_same_loss_as_in_a_batch():
    """Each loss is normalised within its row: padding and other rows don't enter."""
    for case in EVERY_LOSS:
        model, records = build_model(case), make_records(case.spec)
        with torch.no_grad():
            alone: list[Tensor] = []
            for record in records:
                batch = collate(model, case.spec, [record])
                alone.append(LOSSES[case.spec.task](model(**batch.inputs).logits, batch.labels))
            batch = collate(model, case.spec, records)
            together = LOSSES[case.spec.task](model(**batch.inputs).logits, batch.labels)
        assert together.shape == (len(records),)
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-6, atol=1e-7)
