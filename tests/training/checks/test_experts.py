"""Mixtures of experts in a run: sound ones pass every check, and what couples rows is found where no name shows it."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dpllm import GhostError, per_sequence_loss
from dpllm.data.units import UnitIndex
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.watch import WatchError
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun
from tests.reference import zoo
from tests.training.test_run import ledger_of, plan_of


def step_of(model, family, folder):
    """One private step of eight rows, with the check of their independence."""
    batch = zoo.make_batch(zoo.FAMILIES[family], num_rows=8)

    def collate(numbers):
        part = batch.rows([int(number) for number in numbers])
        longest = int(part.inputs["attention_mask"].sum(1).max())
        return {**{k: v[:, :longest] for k, v in part.inputs.items()}, "labels": part.labels[:, :longest]}

    def loss(module, inputs):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        return per_sequence_loss(module(**inputs).logits, labels)

    sizes = {"num_units": 8, "sampling_rate": 1.0, "max_batch_size": 8}
    plan = dataclasses.replace(plan_of(0.0), unit="sequence", unit_column=None, max_rows_per_unit=None, **sizes)
    lengths = batch.inputs["attention_mask"].sum(1).numpy()
    rows = TrainingRows(units=UnitIndex.one_row_per_unit(8), lengths=lengths, fetch=list, collate=collate, max_rows=4)
    run = PrivateRun(plan, rows, ledger_of(folder, plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.attach(model, optimizer)
    run.step(run.choose(np.arange(8)), loss)


@pytest.mark.parametrize("mode", ["full", "lora-experts"])
def test_rows_of_a_mixture_of_experts_are_independent(mode, tmp_path):
    """The check by value is the judge of a routing, and passes the one of each token by itself."""
    step_of(zoo.build_model(zoo.Case("mixtral", mode, dtype="float32")), "mixtral", tmp_path)


class Counting(DeepseekV3TopkRouter):
    """Moves its correction by the loads of the batch, as DeepSeek-V3 was pretrained."""

    def forward(self, hidden_states):
        chosen = super().forward(hidden_states)
        loads = torch.bincount(chosen[2].flatten(), minlength=self.num_experts)
        self.e_score_correction_bias -= 1e-3 * (loads - loads.float().mean()).sign()
        return chosen


class Dropping(MixtralExperts):
    """Experts that take the first tokens only, without an option that says so."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        kept = torch.zeros_like(top_k_weights)
        for expert in range(self.num_experts):
            places = torch.nonzero(top_k_index == expert)[:5]
            kept[places[:, 0], places[:, 1]] = 1
        return super().forward(hidden_states, top_k_index, top_k_weights * kept)


def test_load_statistics_that_move_a_routers_bias_are_refused(tmp_path):
    """The next rows would be routed by exact counts of the rows before them."""
    model = zoo.build_model(zoo.Case("deepseek_v3", "lora-attention", dtype="float32"))
    for module in model.modules():
        if isinstance(module, DeepseekV3TopkRouter):
            module.__class__ = Counting
    with pytest.raises((WatchError, IndependenceError), match=r"e_score_correction_bias|depends on other rows"):
        step_of(model, "deepseek_v3", tmp_path)


def test_a_capacity_that_nothing_names_is_found_by_value(tmp_path):
    """Frozen experts that drop tokens: a row's loss beside others is not its loss alone."""
    model = zoo.build_model(zoo.Case("mixtral", "lora-attention", dtype="float32"))
    for module in model.modules():
        if isinstance(module, MixtralExperts):
            module.__class__ = Dropping
    with pytest.raises((IndependenceError, GhostError), match="depends on"):
        step_of(model, "mixtral", tmp_path)
