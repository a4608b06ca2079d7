"""privacy.gradients=auto, and privacy.unused_parameters=freeze: both decide on rows that are made up."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForCausalLM

from dpllm import GhostError, PrivacyConfig, PrivateRun
from dpllm.config import ConfigError
from dpllm.data.units import UnitIndex
from dpllm.ghost import PerUnitClipper
from dpllm.training.choose_clipper import GHOST, PER_UNIT, NotMadeUp, made_up
from dpllm.training.rows import TrainingRows
from tests.training.test_per_unit import Coupled, Experts, begun, gradients_of
from tests.training.test_run import FEATURES, ledger_of, loss_of, network, plan_of, rows_of
from tests.training.test_trainer import arguments, small_trainer


class Pooled(nn.Module):
    """Has a part that takes no part in the loss."""

    def __init__(self):
        super().__init__()
        self.body, self.pooler = network(), nn.Linear(FEATURES, 2)

    def forward(self, x):
        return self.body(x)


def run_of(folder, rows=None):
    plan = plan_of(noise_multiplier=0.0)
    return PrivateRun(plan, rows or rows_of(), ledger_of(folder, plan))


def attached(folder, model, loss=loss_of, **options):
    run = run_of(folder, rows_of(max_rows=1))
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.3), gradients="auto", loss_of=loss, **options)
    return run


@pytest.mark.parametrize(("make", "one_unit"), [(network, False), (Coupled, True), (Experts, True)])
def test_auto_takes_one_unit_at_a_time_only_where_a_part_has_no_rule(make, one_unit, tmp_path, caplog):
    """It says so in one line, with the part and the cost; the report names the method."""
    model = make()
    run = attached(tmp_path, model)
    assert isinstance(run._attached.clipper, PerUnitClipper) == one_unit
    said = [record.getMessage() for record in caplog.records if "privacy.gradients=auto" in record.getMessage()]
    assert len(said) == int(one_unit)
    if one_unit:
        # Not the mean length of the private rows, which no guarantee covers.
        assert "times the time that 4 rows of at most 256 tokens" in said[0] and "\n" not in said[0]
        assert ("block.scale" in said[0]) == (make is Coupled) and "per_unit" not in said[0].split("block")[-1][:40]
    run.step(run.choose(np.arange(12)), loss_of)
    run.finish()
    facts = json.loads((tmp_path / "privacy_report.json").read_text())["definition"]["facts"]
    assert {"name": "gradients of units", "values": [PER_UNIT if one_unit else GHOST]} in facts


def test_auto_decides_nothing_by_the_private_rows(tmp_path):
    """The loss sees made-up rows only, until the first step."""
    seen = []
    private = {tuple(row.tolist()) for row in rows_of().fetch(np.arange(20))}

    def loss(model, inputs):
        seen.extend(tuple(row.tolist()) for row in inputs["rows"])
        return loss_of(model, inputs)

    attached(tmp_path, Coupled(), loss).detach()
    assert seen and not private & set(seen)


def test_a_coupled_loss_is_not_run_one_unit_at_a_time_unasked(tmp_path):
    """A loss over the rows of a batch would then mean something else."""

    def loss(model, inputs):
        loss_B = loss_of(model, inputs)
        return loss_B - loss_B.mean()

    run = attached(tmp_path, network(), loss)
    assert not run._attached.clipper.one_unit
    run.detach()


def test_auto_keeps_to_the_modules_where_no_loss_is_given(tmp_path):
    run = attached(tmp_path / "one", nn.Sequential(network(), nn.Linear(1, 1)), None)
    assert not run._attached.clipper.one_unit
    run.detach()
    model = nn.ModuleDict({"a": network()})
    with pytest.raises(ConfigError, match="gradients must"):
        begun(tmp_path / "two", model, "both")


def test_what_keeps_statistics_is_refused_by_auto_too(tmp_path):
    with pytest.raises(GhostError, match="couples the rows"):
        attached(tmp_path, nn.Sequential(nn.Linear(FEATURES, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))


def test_unused_parameters_are_frozen_by_name_before_the_optimizer_is_made(tmp_path):
    """The report lists them; without it they are an error that names this remedy."""
    model = Pooled()
    run, optimizer = begun(tmp_path / "error", model, "ghost")
    with pytest.raises(GhostError, match=r"pooler\.weight"):
        gradients_of(run, optimizer, model, [[0, 1]])
    run.detach()
    run = run_of(tmp_path / "freeze")
    assert run.freeze_unused(model, loss_of) == ["pooler.weight", "pooler.bias"]
    assert not model.pooler.weight.requires_grad and model.body[0].weight.requires_grad
    run.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    run.step(run.choose(np.array([0, 1])), loss_of)
    run.finish()
    facts = json.loads((tmp_path / "freeze" / "privacy_report.json").read_text())["definition"]["facts"]
    names = [fact["values"] for fact in facts if "no loss reaches" in fact["name"]]
    assert names == [["pooler.weight, pooler.bias"]]


def test_an_expert_that_only_some_rows_use_is_not_frozen(tmp_path):
    """Whether a row uses it depends on the row, so it is not decided by private rows."""
    model, run = Experts(), run_of(tmp_path)
    assert run.freeze_unused(model, loss_of) == []
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients="per_unit")
    with pytest.raises(ConfigError, match="already attached"):
        run.freeze_unused(model, loss_of)
    run.detach()


def test_a_model_whose_losses_reach_nothing_is_refused(tmp_path):
    run = run_of(tmp_path)
    with pytest.raises(ConfigError, match="reach no trainable"):
        run.freeze_unused(network(), lambda model, inputs: loss_of(model, inputs).detach())


def test_rows_are_made_up_from_the_form_of_a_row_only():
    """Columns of tokens share their numbers, labels are those of any task; no number of the private row is kept."""
    row = {"input_ids": [7] * 30, "answer_ids": [7] * 30, "labels": [7] * 30, "attention_mask": [1] * 30}
    row |= {"label": 5, "name": "Ada"}
    units, lengths = UnitIndex.one_row_per_unit(1), np.array([30])
    rows = TrainingRows(units, lengths, lambda numbers: [row], lambda rows: {"rows": rows}, 2)
    short, long = made_up(rows, nn.Embedding(97, 2), (4, 99))["rows"]
    assert len(short["input_ids"]) == 4 and len(long["input_ids"]) == 30
    assert long["answer_ids"] == long["input_ids"] and len(set(long["input_ids"])) > 5
    assert set(long["labels"]) == {0}  # of a head for tokens with two classes, 7 would be out of range
    assert set(long["attention_mask"]) == {1} and long["label"] == 0 and long["name"] == ""
    assert made_up(rows, nn.Embedding(97, 2), (4, 99))["rows"] == [short, long]
    row["input_ids"] = [[1], [2, 3]]
    with pytest.raises(NotMadeUp, match="different lengths"):
        made_up(rows, nn.Embedding(97, 2), (4,))


class Picture(nn.Module):
    """Uses a part only for rows that have a picture."""

    def __init__(self):
        super().__init__()
        self.text, self.picture = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

    def forward(self, text, picture):
        return self.text(text) if picture is None else self.text(text) + self.picture(picture)


def test_whether_the_first_row_has_a_value_does_not_decide_what_is_frozen(tmp_path):
    """The frozen names are in the report, and would tell it."""
    rows = rows_of()

    def collate(some):
        pictures = [row["picture"] for row in some]
        return {
            "text": torch.stack([row["text"] for row in some]),
            "picture": None if None in pictures else torch.stack(pictures),
        }

    def fetch(numbers):
        return [{"text": row[:FEATURES], "picture": None} for row in rows.fetch(numbers)]

    run = run_of(tmp_path, TrainingRows(rows.units, rows.lengths, fetch, collate, 1))
    with pytest.raises(ConfigError, match="'picture' has no value in the first row"):
        run.freeze_unused(Picture(), lambda model, inputs: model(**inputs).squeeze(1))


@pytest.mark.parametrize("first", [True, False])
def test_whether_the_first_row_has_a_column_does_not_decide_what_is_frozen(first, tmp_path):
    """Rows may be dictionaries with different keys; `auto` does not try rows of either form."""
    rows = rows_of()

    def fetch(numbers):
        found = [{"text": row[:FEATURES]} for row in rows.fetch(numbers)]
        return [
            {**row, "picture": row["text"]} if (n == 0) == first else row for n, row in zip(numbers, found, strict=True)
        ]

    def collate(some):
        pictures = [row["picture"] for row in some if "picture" in row]
        return {
            "text": torch.stack([row["text"] for row in some]),
            "picture": torch.stack(pictures) if len(pictures) == len(some) else None,
        }

    run = run_of(tmp_path, TrainingRows(rows.units, rows.lengths, fetch, collate, 1))
    model, seen = Picture(), []
    with pytest.raises(ConfigError, match="row 1 has different columns than row 0"):
        run.freeze_unused(model, lambda model, inputs: model(**inputs).squeeze(1))
    run.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.3), gradients="auto",
        loss_of=lambda model, inputs: seen.append(inputs) or model(**inputs).squeeze(1),
    )  # fmt: skip
    assert not seen and not run._attached.clipper.one_unit
    run.detach()


def test_a_decoder_used_alone_trains_with_one_switch(tmp_path):
    """Bart's decoder by itself has a cross attention that no loss reaches."""

    def bart():
        torch.manual_seed(0)
        config = BartConfig(
            vocab_size=61, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, is_decoder=True,
            max_position_embeddings=32, dropout=0.0, attention_dropout=0.0, is_encoder_decoder=False, pad_token_id=0,
            add_cross_attention=True, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16,
        )  # fmt: skip
        return BartForCausalLM(config)

    common = {"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 4}
    with pytest.raises(GhostError, match="gradient reached"):
        run = small_trainer(tmp_path / "error", model=bart(), config=PrivacyConfig(**common))
        run.train()
    model = bart()
    privacy = PrivacyConfig(**common, unused_parameters="freeze")
    run = small_trainer(tmp_path / "freeze", model=model, config=privacy, args=arguments(tmp_path / "freeze"))
    run.train()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert any("encoder_attn" in name for name in frozen) and not any("self_attn" in name for name in frozen)
    facts = {fact["name"]: fact["values"] for fact in run.privacy_report()["definition"]["facts"]}
    assert facts["trainable parameters that no loss reaches, and that were frozen"] == [", ".join(frozen)]
