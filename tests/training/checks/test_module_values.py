"""What modules of libraries choose by the rows of earlier calls is refused where it acts; caches are nothing."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import ReformerConfig, ReformerModelWithLMHead

from dpllm import PrivateRun, per_sequence_loss
from dpllm.data.units import UnitIndex
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.module_values import ModuleValues
from dpllm.training.rows import TrainingRows
from tests.training.test_run import ledger_of, plan_of

LENGTHS = np.array([8 + 4 * (7 * number % 13) for number in range(40)])


class OfLibrary(nn.Module):
    """Scales its rows by what it kept, in a way that a search of the user's own classes passes over."""

    __module__ = "transformers.models.kept"

    def __init__(self, where):
        super().__init__()
        self.table, self.head = nn.Embedding(60, 8), nn.Linear(8, 60)
        self.where, self.size, self.cache = where, None, {}
        self.config = ReformerConfig(num_buckets=None)

    def forward(self, ids):
        length, scale = ids.shape[1], 1.0
        if self.where == "first row":
            self.size = self.size or length
            scale = self.size / 10
        elif self.where == "config":
            self.config.num_buckets = self.config.num_buckets or length
            scale = self.config.num_buckets / 10
        elif self.where == "longest row":
            self.cache["longest"] = max(length, self.cache.get("longest", 0))
            scale = 1 + (self.cache["longest"] > length)
        elif self.where == "evaluation" and not self.training:
            self.size = length
        elif self.where == "evaluation":
            scale = 1 + (self.size or 0)
        elif self.where == "cache":  # a function of the row
            scale = self.cache.setdefault(length, 1 + 1 / length)
            self.size = length
        return self.head(torch.tanh(self.table(ids) * scale))


def rows_of(max_rows):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 60, (int(length),), generator=generator) for length in LENGTHS]

    def collate(some):
        labels = torch.full((len(some), max(map(len, some))), -100)
        for place, row in enumerate(some):
            labels[place, : len(row)] = row
        return {"ids": labels.clamp(min=0), "labels": labels}

    return TrainingRows(
        UnitIndex.from_ids(list(range(40))), LENGTHS, lambda ns: [rows[int(n)] for n in ns], collate, max_rows
    )


def loss_of(model, inputs):
    found = model(inputs["ids"])
    return per_sequence_loss(getattr(found, "logits", found), inputs["labels"])


def run_of(folder, model, gradients, max_rows=1):
    plan = plan_of(noise_multiplier=0.0)
    run = PrivateRun(plan, rows_of(max_rows), ledger_of(folder, plan))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run.attach(model, optimizer, gradients=gradients)
    return run, optimizer


def two_steps(run, optimizer, between=lambda: None):
    for units in ([1, 2, 5], [3, 4]):
        run.step(run.choose(np.array(units)), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        between()


@pytest.mark.parametrize("gradients", ["per_unit", "ghost"])
@pytest.mark.parametrize(
    ("where", "name"), [("first row", "model.size"), ("config", r"model.config.num_buckets"), ("longest row", "")]
)
def test_what_the_first_rows_chose_is_refused_in_the_first_step(where, name, gradients, tmp_path):
    """Each row has the same value every time that a check asks for it, and follows the first row for good."""
    model = OfLibrary(where)
    run, optimizer = run_of(tmp_path, model, gradients)
    with pytest.raises(IndependenceError, match=name or "after (another|the longest) row|model.cache"):
        two_steps(run, optimizer)
    run.detach()


def test_what_an_evaluation_left_is_refused_by_the_next_check(tmp_path):
    """As the capacity of NLLB-MoE's experts."""
    model = OfLibrary("evaluation")
    run, optimizer = run_of(tmp_path, model, "per_unit")

    def evaluate():
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 5, dtype=torch.long))
        model.train()

    with pytest.raises(IndependenceError, match=r"model\.size.*callback nor an evaluation"):
        two_steps(run, optimizer, evaluate)
    run.detach()


@pytest.mark.parametrize("max_rows", [1, 4])
def test_caches_of_functions_of_a_row_are_nothing(max_rows, tmp_path):
    model = OfLibrary("cache") if max_rows == 1 else OfLibrary("none")
    run, optimizer = run_of(tmp_path, model, "per_unit" if max_rows == 1 else "ghost", max_rows)
    two_steps(run, optimizer)
    run.finish()
    assert model.size == (None if max_rows > 1 else LENGTHS[4])  # of the last row: nothing stays put back


def test_reformer_chooses_its_buckets_by_the_first_row_and_is_refused(tmp_path):
    """The choice would be saved in config.json, too."""
    torch.manual_seed(0)
    config = ReformerConfig(
        vocab_size=60, hidden_size=16, num_attention_heads=2, attention_head_size=8, feed_forward_size=16,
        attn_layers=["lsh"], axial_pos_embds=False, max_position_embeddings=256, num_buckets=None,
        lsh_attn_chunk_length=4, is_decoder=True, hidden_dropout_prob=0.0,
    )  # fmt: skip
    model = ReformerModelWithLMHead(config).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head"))
    run, optimizer = run_of(tmp_path, model, "per_unit")
    with pytest.raises(IndependenceError, match=r"num_buckets"):
        two_steps(run, optimizer)
    run.detach()


def test_values_are_put_back_and_restored():
    """Also those that are new, and entries of containers; buffers are left out."""
    model = nn.Sequential(OfLibrary("none"))
    module = model[0]
    module.register_buffer("late", None)
    before = ModuleValues(model)
    module.size, module.cache["a"], module.new, module.late = 3, 1, [1], torch.ones(2)
    module.config.num_buckets = 8
    now = ModuleValues(model)
    left = now.differing(before)
    assert sorted(left) == ["0.cache", "0.config.num_buckets", "0.new", "0.size"]
    with now.at(before):
        assert module.size is None and module.cache == {} and not hasattr(module, "new")
        assert module.config.num_buckets is None and module.late is not None
        module.size, module.cache["b"] = 5, 2
    assert (module.size, module.cache, module.new, module.config.num_buckets) == (3, {"a": 1}, [1], 8)
    assert ModuleValues(model).differing(now) == []
