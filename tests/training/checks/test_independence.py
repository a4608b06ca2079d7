"""Rows are independent by value: code that couples them is refused, in the first step and later; sound runs pass.

Through the public API: `DPTrainer`, and `PrivateRun` with a custom loop.
"""

import copy
import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from dpllm import (
    DPTrainer,
    GhostClipper,
    PrivacyConfig,
    PrivateRun,
    TrainingRows,
    make_plan,
    packed_sequence_loss,
    per_sequence_loss,
)
from dpllm.config import ConfigError
from dpllm.data.rows import PackedCollator, RowCollator
from dpllm.data.single_rows import RowByRow, same_values
from dpllm.data.units import UnitIndex
from dpllm.engines.processes import Processes
from dpllm.ghost.refusals import GhostError
from dpllm.models.load import align_padding
from dpllm.models.losses import classification_loss, seq2seq_loss
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.repeatable import Repeatable, same_randomness
from dpllm.training.checks.row_sample import RowMaker, Sample
from dpllm.training.shared_ledger import SharedLedger
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.small_model import rows_by_number
from tests.training.test_run import plan_of
from tests.training.test_trainer import arguments, privacy

DEPENDS = r"of a row depends on other rows: \S+ alone.*, \S+ in a batch with .* \(dropout off"
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 64, "bos_token_id": 1}


def unequal(count=40, classes=False, shortest=3, longest=20, **more):
    """Rows of 3 to 20 tokens."""
    rng = np.random.default_rng(2)
    ids = [rng.integers(4, 61, int(n)).tolist() for n in rng.integers(shortest, longest + 1, count)]
    labels = [int(n) for n in rng.integers(0, 2, count)] if classes else ids
    return Dataset.from_dict({"input_ids": ids, "labels": labels, **more})


def plain(**sizes):
    """The same without labels, which the collator makes."""
    return [{"input_ids": row["input_ids"]} for row in unequal(**sizes).to_list()]


def trainer(folder, model, dataset=None, steps=1, batch=8, config=None, **more):
    classes = "SequenceClassification" in type(model).__name__
    return DPTrainer(
        model=model,
        args=arguments(folder, max_steps=steps, per_device_train_batch_size=batch, logging_strategy="no"),
        privacy=config or privacy(expected_batch_size=8),
        train_dataset=dataset if dataset is not None else unequal(classes=classes),
        **more,
    )


def llama(**changes):
    return LlamaForCausalLM(tiny_llama_config(**changes))


def padded_with(token, task="sequence_classification"):
    """A collator that does not expose its padding token."""
    collator = RowCollator(pad_token_id=token, task=task)
    return lambda rows: collator(rows)


def left_padded(rows):
    batch = RowCollator(pad_token_id=0)(rows)
    for number, row in enumerate(rows):
        shift = batch["input_ids"].shape[1] - len(row["input_ids"])
        for value in batch.values():
            value[number] = value[number].roll(shift)
    return batch


def sorted_by_length(rows):
    return RowCollator(pad_token_id=0)(sorted(rows, key=lambda row: -len(row["input_ids"])))


def mixed(rows):
    """A collator that puts the next row's first token first in each row."""
    first = [row["input_ids"][0] for row in rows]
    changed = [{**row, "input_ids": [first[(n + 1) % len(rows)], *row["input_ids"][1:]]} for n, row in enumerate(rows)]
    return RowCollator(pad_token_id=0)(changed)


def head_only(model):
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    return model


def over_all_targets(outputs, labels):
    count_B = (labels != -100).sum(1)
    return per_sequence_loss(outputs.logits, labels) * count_B / count_B.sum()


def sorted_losses(outputs, labels):
    return per_sequence_loss(outputs.logits, labels).sort().values


def over_detached_mean(outputs, labels):
    loss_B = per_sequence_loss(outputs.logits, labels)
    return loss_B * (loss_B / loss_B.mean()).detach()


SMALL = {"vocab_size": 61, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
ONE = {**SMALL, "num_hidden_layers": 1}
CANINE = {**ONE, "vocab_size": 99, "num_hash_buckets": 64}
XL = {"d_model": 16, "n_head": 2, "d_inner": 32}
COUPLED_CLASSIFIERS = {
    "xlnet": AutoConfig.for_model("xlnet", vocab_size=61, n_layer=1, **XL),
    "fnet": AutoConfig.for_model("fnet", vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1),
    "funnel": AutoConfig.for_model("funnel", vocab_size=61, block_sizes=[2, 2], initializer_std=0.3, d_head=8, **XL),
    "yoso": AutoConfig.for_model("yoso", **ONE, use_expectation=True, max_position_embeddings=64),
    "canine": AutoConfig.for_model("canine", **CANINE, downsampling_rate=2, initializer_range=0.1),
    "convbert": AutoConfig.for_model(
        "convbert", **{**ONE, "num_attention_heads": 4}, embedding_size=16, head_ratio=2, initializer_range=0.2
    ),
}


@pytest.mark.parametrize("name", COUPLED_CLASSIFIERS)
def test_a_classifier_that_reads_padding_is_refused_in_the_first_step(name, tmp_path):
    """It pools at, or mixes in, padded positions, whose number other rows decide; no gradient shows it."""
    model = AutoModelForSequenceClassification.from_config(COUPLED_CLASSIFIERS[name])
    if name in ("xlnet", "funnel", "canine"):
        head_only(model)
    run = trainer(tmp_path, model, data_collator=padded_with(0))
    with pytest.raises(IndependenceError, match=DEPENDS) as refused:
        run.train()
    assert "config.pad_token_id" in str(refused.value) and "\n" not in str(refused.value)
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 1
    assert read_ledger(tmp_path / LEDGER_FILE).disclosures["losses of single rows, in an error message"] == 1


def test_a_model_that_takes_a_row_in_company_only_is_refused_in_one_line(tmp_path):
    """CANINE shortens rows by its rate: a row shorter than the rate fails alone, and passes if others pad it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("canine", **CANINE, downsampling_rate=4)
    model = head_only(AutoModelForSequenceClassification.from_config(config))
    with pytest.raises(IndependenceError, match="RuntimeError"):
        trainer(tmp_path, model).train()
    assert read_ledger(tmp_path / LEDGER_FILE).disclosures["losses of single rows, in an error message"] == 1


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (llama, {"compute_loss_func": over_all_targets}, DEPENDS),
        (llama, {"compute_loss_func": over_detached_mean}, DEPENDS),
        (llama, {"compute_loss_func": sorted_losses}, "depends on row . of the batch"),
    ],
    ids=["batch's targets", "detached mean", "sorted losses"],
)
def test_a_coupling_by_the_loss_is_refused(make, options, says, tmp_path):
    run = trainer(tmp_path, make(), **options)
    with pytest.raises(GhostError, match=says):
        run.train()


MIXING = {
    "left padding": left_padded,
    "mixed rows": mixed,
    "sorted rows": sorted_by_length,
    "in some microbatches": lambda rows: mixed(rows) if random.random() < 0.2 else RowCollator(pad_token_id=0)(rows),
}


@kills(
    "a collator is given all rows of a microbatch",
    "dpllm/data/single_rows.py",
    "        return self.batch([self.row(row) for row in rows])\n",
    "        return self.collate(list(rows))\n",
)
@pytest.mark.parametrize("name", MIXING)
def test_a_collator_that_would_mix_rows_is_given_one_and_makes_what_a_plain_one_makes(name, tmp_path):
    """It trains, and a batch is that of dpllm's own collator, to the bit."""
    run = trainer(tmp_path, GPT2LMHeadModel(GPT2Config(**GPT2)), data_collator=MIXING[name])
    rows = unequal(9).to_list()
    assert same_values(dict(RowByRow(MIXING[name])(rows)), RowCollator(pad_token_id=0)(rows))
    run.train()
    assert run.ledger.num_steps == 1


@pytest.mark.parametrize("config", [tiny_llama_config(pad_token_id=2), GPT2Config(**GPT2, pad_token_id=2)])
def test_rows_are_padded_with_the_models_token_whatever_the_collator_pads_with(config, tmp_path):
    """A classifier pools at the token before the padding, which it finds by its own padding token."""
    run = trainer(tmp_path, AutoModelForSequenceClassification.from_config(config), data_collator=padded_with(0))
    run.train()
    batch = run._prepared.rows.collate(unequal(9, classes=True).to_list())
    assert (batch["attention_mask"] == 0).any() and (batch["input_ids"][batch["attention_mask"] == 0] == 2).all()


@kills(
    "the independence of rows is not measured",
    "dpllm/training/checks/independence.py",
    "        if self._steps & (self._steps - 1) and not is_last and not self._has_failed:\n",
    "        if True:\n",
)
@pytest.mark.parametrize(("steps", "found"), [(7, 7), (10, 8)], ids=["before the last step", "by the next check"])
def test_a_coupling_that_starts_later_is_refused(steps, found, tmp_path):
    """Steps 1, 2 and 4 pass. It starts with the 6th; the next check is before the 8th or the last. All stay charged."""
    run = trainer(
        tmp_path,
        llama(),
        steps=steps,
        compute_loss_func=lambda outputs, labels: (
            over_detached_mean if run.state.global_step >= 5 else lambda o, y: per_sequence_loss(o.logits, y)
        )(outputs, labels),
    )
    with pytest.raises(IndependenceError, match=DEPENDS):
        run.train()
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == found


class BatchScaled(nn.Module):
    """A frozen layer in numbers of 8 bits, whose one scale is the largest input of the whole batch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        scale = x.detach().abs().amax() / 127
        rounded = (x / scale).round() * scale
        return self.inner(x + (rounded - x).detach())


def test_scales_chosen_over_all_rows_are_refused(tmp_path):
    """Per-tensor fp8 or int8: a row that is larger than all others changes the results of the others."""
    model = llama(initializer_range=0.2)
    for layer in model.model.layers:
        layer.mlp.down_proj = BatchScaled(layer.mlp.down_proj.requires_grad_(False))
    with pytest.raises(IndependenceError, match=DEPENDS):
        trainer(tmp_path, model).train()


def named(name, module="dpllm.test", **attributes):
    kind = type(name, (nn.Linear,), {"__module__": module})
    made = kind(2, 2)
    for attribute, value in attributes.items():
        setattr(made, attribute, value)
    return made


OUTLIERS = SimpleNamespace(threshold=6.0)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            named("Linear8bitLt", state=OUTLIERS),
            r"llm_int8_threshold=6\.0.*llm_int8_threshold=0\.0",
        ),
        (named("Float8Linear"), "largest activation of the whole batch"),
        (named("LayerNormLinear", "transformer_engine.pytorch"), "largest activation of the whole batch"),
        (named("Linear", neftune_noise_alpha=5.0), "scales its noise by the padded length"),
    ],
)
def test_modules_that_scale_over_the_batch_are_refused_by_name(module, says):
    with pytest.raises(GhostError, match=says):
        GhostClipper(nn.Sequential(nn.Linear(2, 2), module), 1.0)


def cast(granularity, scaling="dynamic"):
    return SimpleNamespace(scaling_granularity=granularity, scaling_type=scaling)


@pytest.mark.parametrize(
    ("of_input", "of_gradient", "accepted"),
    [
        (cast("axiswise"), cast("axiswise"), True),
        (cast("axiswise"), cast("tensorwise", "disabled"), True),
        (cast("tensorwise"), cast("axiswise"), False),
        (cast("axiswise"), cast("tensorwise"), False),
        (cast("tensorwise"), cast("tensorwise"), False),
    ],
)
def test_fp8_is_accepted_with_one_scale_per_token(of_input, of_gradient, accepted):
    """As torchao's recipe "rowwise"; one scale for the tensor, also of the output's gradient, mixes the rows."""
    config = SimpleNamespace(cast_config_input=of_input, cast_config_grad_output=of_gradient)
    model = nn.Sequential(nn.Linear(2, 2), named("Float8Linear", config=config))
    if accepted:
        GhostClipper(model, 1.0).remove()
        return
    with pytest.raises(GhostError, match="largest activation"):
        GhostClipper(model, 1.0)


def test_int8_without_outlier_columns_is_accepted():
    """With threshold 0 every token has its own scale."""
    module = named("Linear8bitLt", state=SimpleNamespace(threshold=0.0))
    GhostClipper(nn.Sequential(module), 1.0).remove()


def test_neftune_is_refused_before_data_is_read(tmp_path):
    with pytest.raises(ConfigError, match="neftune_noise_alpha=5"):
        DPTrainer(llama(), arguments(tmp_path, neftune_noise_alpha=5), privacy(), unequal())


def test_noise_scaled_by_the_padded_length_is_seen_by_value(tmp_path):
    """A custom hook that works like NEFTune: fixed noise, with a scale that depends on the other rows."""
    model = llama()

    def hook(module, args, output):
        if module.training:
            magnitude = 5 / (output.shape[1] * output.shape[2]) ** 0.5
            return output + torch.zeros_like(output).uniform_(-magnitude, magnitude)
        return output

    model.get_input_embeddings().register_forward_hook(hook)
    with pytest.raises(IndependenceError, match=DEPENDS):
        trainer(tmp_path, model).train()


# ------------------------------------------------------------------ padding tokens


def test_the_default_collator_pads_with_the_models_own_token(tmp_path):
    """Without a tokenizer; the classifier then finds the ends of its rows."""
    model = LlamaForSequenceClassification(tiny_llama_config(pad_token_id=2))
    run = trainer(tmp_path, model)
    assert run.data_collator.pad_token_id == 2
    run.train()
    assert run.ledger.num_steps == 1


@pytest.mark.parametrize("collator", ["dpllm", "transformers"])
def test_a_collator_with_another_padding_token_is_refused(collator, tmp_path):
    class Tokenizer:
        pad_token_id, padding_side = 0, "right"

        def pad(self, *args, **kwargs):
            raise AssertionError("nothing is collated")

    made = (
        RowCollator(pad_token_id=0, task="sequence_classification")
        if collator == "dpllm"
        else DataCollatorWithPadding(Tokenizer())
    )
    model = LlamaForSequenceClassification(tiny_llama_config(pad_token_id=2))
    with pytest.raises(ConfigError, match=r"model\.config\.pad_token_id"):
        trainer(tmp_path, model, data_collator=made)


def test_a_recipe_gives_the_model_its_tokenizers_padding_token():
    """Also where the model names another one."""

    class Tokenizer:
        pad_token_id = 5

    model = LlamaForSequenceClassification(tiny_llama_config(pad_token_id=2))
    align_padding(model, Tokenizer())
    assert model.config.pad_token_id == 5


# ------------------------------------------------------------------------ a custom loop


def rows_of(examples, collate=None, units=None, **more):
    return rows_by_number(
        examples,
        collate or RowCollator(pad_token_id=0),
        [len(example["input_ids"]) for example in examples],
        units=units or UnitIndex.from_ids(list(range(len(examples)))),
        **more,
    )


def lm_loss(model, inputs):
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    return per_sequence_loss(model(**inputs).logits, labels)


def steps(folder, model, rows, loss_of=lm_loss, count=4, clip_norm=0.5, after=lambda: None):
    """Take steps; return the number charged, and the check."""
    plan = make_plan(
        PrivacyConfig(
            unit="user",
            max_rows_per_unit=3,
            noise_multiplier=1.0,
            clip_norm=clip_norm,
            expected_batch_size=min(8, rows.units.num_units),
            delta=1e-3 if rows.units.num_units > 2 else 0.05,
        ),
        rows.units.num_units,
        count,
    )
    run = PrivateRun(plan, rows, SharedLedger.create(folder / LEDGER_FILE, plan, Processes()))
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    run.attach(model, optimizer)
    check = run._attached.independence
    try:
        for unit_ids in run.draws(count):
            run.step(unit_ids, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            after()
    finally:
        charged = run.ledger.num_steps
        run.detach()
        run.ledger.close()
    return charged, check


@kills(
    "several rows are fetched at once by a function of the user's",
    "dpllm/data/single_rows.py",
    "if together else [self._row(number) for number in numbers]",
    "if True else []",
)
def test_rows_that_would_be_changed_by_those_fetched_with_them_are_fetched_alone(tmp_path):
    """A fetch that lays the first token of the last row before all of them."""
    examples = unequal(40).to_list()
    rows = rows_of(examples)

    def fetch(numbers):
        first = examples[int(numbers[-1])]["input_ids"][0]
        return [{name: [first, *ids[1:]] for name, ids in examples[int(number)].items()} for number in numbers]

    rows = dataclasses.replace(rows, fetch=fetch)
    assert rows.fetch(np.arange(9)) == examples[:9]
    assert steps(tmp_path, llama(), rows)[0] == 4


def test_a_coupling_that_only_long_rows_reach_is_refused(tmp_path):
    """The shortest row is the same alone and in company; one of the longest is compared alone, too."""

    def loss_of(model, inputs):
        loss_B = lm_loss(model, inputs)
        long_B = inputs["attention_mask"].sum(1) > 16
        return torch.where(long_B, loss_B * (1 + loss_B.mean().detach()), loss_B)

    with pytest.raises(IndependenceError, match=DEPENDS):
        steps(tmp_path, llama(), rows_of(unequal(40).to_list()), loss_of)


def test_contrastive_pairs_that_begin_after_some_steps_are_refused(tmp_path):
    """In-batch negatives couple all rows; they begin in step 6 and are found before the 8th."""
    torch.manual_seed(0)
    examples = [{"input_ids": [0] * (n % 7 + 1), "x": torch.randn(4)} for n in range(40)]
    rows = rows_of(examples, lambda rows: {"x": torch.stack([row["x"] for row in rows])})
    model, done = nn.Linear(4, 3), []

    def loss_of(model, inputs):
        y_BD = model(inputs["x"])
        alone_B = y_BD.square().sum(1)
        return alone_B if len(done) < 5 else alone_B - (y_BD @ y_BD.T.detach()).log_softmax(1).diagonal()

    with pytest.raises(IndependenceError, match=DEPENDS):
        steps(tmp_path, model, rows, loss_of, count=40, after=lambda: done.append(1))
    assert len(done) == 7


def test_packed_rows_whose_loss_counts_all_targets_are_refused(tmp_path):
    """And pass where it does not."""
    from dpllm.models.inputs import attention_by_row

    def packed_loss(model, inputs):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        return packed_sequence_loss(model(**inputs).logits, labels, inputs["cu_seq_lens_q"])

    rows = rows_of(unequal(40).to_list(), PackedCollator(), max_rows=None, max_tokens=64, packed=True)
    model = llama(attention_dropout=0.2)
    with attention_by_row(model):
        charged, check = steps(tmp_path / "sound", model, rows, packed_loss)
        assert charged == 4 and check.last.loss < 2e-6 and check.last.norm < 2e-6
    model = llama(attention_dropout=0.2)
    with attention_by_row(model), pytest.raises(IndependenceError, match=DEPENDS):
        steps(tmp_path / "coupled", model, rows, lambda m, i: packed_loss(m, i) / (i["labels"] != -100).sum().sqrt())


class Noisy(nn.Module):
    """Drops whole rows, drops features by its own mask, and adds noise; each row separately."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.drop = nn.Dropout(0.4)

    def forward(self, input_ids, **kwargs):
        x = self.drop(self.first(input_ids))
        if self.training:
            x = x * (torch.rand(len(x), 1, 1) > 0.2) * (1 - torch.empty_like(x).bernoulli_(0.1))
            x = x + 0.1 * torch.randn_like(x)
        query = x[:, None]
        x = x + nn.functional.scaled_dot_product_attention(query, query, query, None, 0.3, is_causal=True)[:, 0]
        return type("Output", (), {"logits": self.last(x)})()


def test_dropout_and_noise_are_not_taken_for_a_coupling(tmp_path):
    """In training mode, with random numbers of torch's functions and methods."""
    charged, check = steps(tmp_path, Noisy(), rows_of(unequal(40).to_list()))
    assert charged == 4 and check.last.loss < 2e-6 and check.last.norm < 2e-6


def kept_alike(x):
    """Drops numbers, and scales the others by the share that was kept of all rows."""
    mask = torch.empty_like(x).bernoulli_(0.9)
    return x * mask / mask.mean()


def replaced_by_the_mean(x):
    """Replaces some tokens by the mean over all rows."""
    mask = torch.empty_like(x[..., :1]).bernoulli_(0.9)
    return x * mask + x.mean((0, 1)) * (1 - mask)


@pytest.mark.parametrize("couple", [kept_alike, replaced_by_the_mean])
def test_a_coupling_by_a_mask_of_ones_own_is_refused(couple, tmp_path):
    """Such a mask may mean anything: only the dropout of PyTorch is switched off."""

    class Masking(Noisy):
        def forward(self, input_ids, **kwargs):
            return type("Output", (), {"logits": self.last(couple(self.first(input_ids)))})()

    with pytest.raises(GhostError, match=r"of (a row|row \d) depends on"):  # by its value, or by its gradient
        steps(tmp_path, Masking(), rows_of(unequal(40).to_list()), count=1)


def test_randomness_that_cannot_be_switched_off_is_judged_without_it(tmp_path):
    """A custom kernel draws different numbers for different shapes: the rows are compared in evaluation mode."""

    class Own(Noisy):
        def forward(self, input_ids, **kwargs):
            x = self.first(input_ids)
            if self.training:  # nothing that PyTorch could be asked to leave out
                x = x * torch.from_numpy(np.random.rand(*x.shape).astype(np.float32))
            return type("Output", (), {"logits": self.last(x)})()

    model = Own()
    assert steps(tmp_path / "sound", model, rows_of(unequal(40).to_list()))[0] == 4
    assert model.training and model.drop.training

    def coupled(model, inputs):
        return lm_loss(model, inputs) * inputs["labels"].shape[1]

    with pytest.raises(IndependenceError, match=DEPENDS):
        steps(tmp_path / "coupled", Own(), rows_of(unequal(40).to_list()), coupled)


def test_a_check_leaves_no_gradient_and_no_random_state_behind(tmp_path):
    """The check does not change the random numbers of the step."""
    model = Noisy()
    rows = rows_of(unequal(40).to_list())
    plan = plan_of(num_steps=4)
    run = PrivateRun(plan, rows, SharedLedger.create(tmp_path / LEDGER_FILE, plan, Processes()))
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    run._attached.independence.before_step(lambda inputs: lm_loss(model, inputs), None)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[2]
    assert (np.random.get_state()[1] == before[1]).all()
    assert all(p.grad is None for p in model.parameters()) and run.ledger.num_steps == 0
    assert model.training and run.row_differences.norm < 2e-6
    run.detach()


@pytest.mark.parametrize(
    ("examples", "options", "more"),
    [
        (unequal(1), {}, {}),
        (unequal(2), {}, {}),
        (unequal(40), {"max_rows": 1}, {}),
        (unequal(40), {"max_rows": None, "max_tokens": 20}, {}),
        (unequal(40), {"max_rows": None, "max_tokens": 4}, {}),
        (unequal(40, shortest=7, longest=7), {}, {}),
        (unequal(40, shortest=1, longest=2), {}, {}),
        (unequal(40), {"units": UnitIndex.from_ids([n // 3 for n in range(40)])}, {}),
        (unequal(40), {}, {"clip_norm": 1e-6}),
    ],
    ids=["one row", "two", "alone", "few tokens", "too few tokens", "equal", "no target", "users", "small clip norm"],
)
def test_runs_at_the_edges_are_not_refused(examples, options, more, tmp_path):
    charged, check = steps(tmp_path, llama(), rows_of(examples.to_list(), **options), count=3, **more)
    assert charged == 3 and check.last.loss < 2e-6 and check.last.norm < 2e-6


def test_losses_that_are_small_or_not_finite_are_not_refused(tmp_path):
    """Rounding is relative to logits, not to a loss near 0; a unit that overflows does so alone as well."""
    rows = rows_of(unequal(40, classes=True).to_list(), RowCollator(pad_token_id=0, task="sequence_classification"))
    model = LlamaForSequenceClassification(tiny_llama_config(pad_token_id=0))

    def loss_of(model, inputs):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return classification_loss(logits + 12 * nn.functional.one_hot(labels, 2), labels)

    assert steps(tmp_path / "small", model, rows, loss_of)[0] == 4
    overflowing = lambda m, i: loss_of(m, i) / (i["attention_mask"].sum(1) > 3)  # noqa: E731
    other = LlamaForSequenceClassification(tiny_llama_config(pad_token_id=0))
    assert steps(tmp_path / "overflowing", other, rows, overflowing)[0] == 4


def test_rows_drawn_one_by_one_and_bert_pass_through_the_trainer(tmp_path):
    """`sampling: example`, dropout, a classifier that pools at its first token."""
    model = BertForSequenceClassification(BertConfig(**ONE, max_position_embeddings=64))
    config = privacy(expected_batch_size=8, unit="user", max_rows_per_unit=2, sampling="example")
    dataset = unequal(40, classes=True, user=[n // 2 for n in range(40)])
    run = trainer(tmp_path, model, dataset, steps=2, config=config)
    run.train()
    assert run.ledger.num_steps == 2


def test_dropout_is_off_as_well_where_checkpointing_repeats_a_layer(tmp_path):
    """The backward pass of a check runs the layers again, without the dropout that the forward pass left out."""
    args = arguments(tmp_path, max_steps=1, gradient_checkpointing=True)
    model = GPT2LMHeadModel(GPT2Config(**GPT2, resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5))
    run = DPTrainer(model, args, privacy(expected_batch_size=8), unequal())
    run.train()
    assert run.ledger.num_steps == 1


def test_a_fixed_seed_ends_with_its_block(monkeypatch):
    """No seed is kept for a device that begins later; afterwards all generators are where they were."""
    kept = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", kept.append)
    before = torch.get_rng_state(), random.getstate()
    drawn = []
    for seed in (7, 7, 8):
        with same_randomness(seed):
            drawn.append((float(torch.rand(())), random.random(), float(np.random.random_sample())))
    assert drawn[0] == drawn[1] and not set(drawn[0]) & set(drawn[2])
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert bool(kept) == torch.cuda.is_available()


def test_evaluation_of_random_functions_within_a_row():
    """The same numbers in every row, the wanted distribution within it, and other shapes agree where they overlap."""
    with same_randomness(0), Repeatable(packed=False):
        short, long = torch.rand(1, 5, 3), torch.rand(4, 9, 3)
        assert torch.equal(short[0], long[2, :5]) and torch.equal(long[0], long[3])
        wide = torch.randn(2, 4000)
        assert abs(float(wide.mean())) < 0.05 and abs(float(wide.std()) - 1) < 0.05
        kept = torch.bernoulli(torch.full((2, 4000), 0.3))
        assert abs(float(kept.mean()) - 0.3) < 0.02 and kept.dtype == torch.float32
        x = torch.ones(2, 8)
        assert torch.equal(nn.functional.dropout(x, 0.5), 2 * x)  # every number is kept, and scaled
        for own in (torch.empty_like(x).bernoulli_(0.5), torch.dropout(x, 0.5, True)):  # may mean anything
            assert torch.equal(own[0], own[1]) and 0 < float(own.count_nonzero()) < 16
    drawn = copy.deepcopy(torch.get_rng_state())
    with same_randomness(1):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), drawn)


def crowded(most):
    """A loss that couples rows in microbatches of more rows than this."""

    def loss(outputs, labels, num_items_in_batch=None):
        loss_B = per_sequence_loss(outputs.logits, labels)
        return loss_B if len(loss_B) <= most else loss_B + 10 * loss_B.mean().detach()

    return loss


def test_a_coupling_of_whole_microbatches_is_refused_in_the_first_step(tmp_path):
    """A comparison of a few rows would not find it."""
    model, config = llama(), privacy(expected_batch_size=16)
    with pytest.raises(IndependenceError, match="whole microbatch"):
        trainer(tmp_path / "a", model, batch=16, config=config, compute_loss_func=crowded(9)).train()
    trainer(tmp_path / "b", llama(), batch=16, config=config, compute_loss_func=crowded(16)).train()


def shared_by_equals(outputs, labels):
    """A loss weight that is divided by the number of equal rows of the batch."""
    equal_BB = (labels[:, None] == labels[None]).all(-1)
    return per_sequence_loss(outputs.logits, labels) / equal_BB.sum(1)


@pytest.mark.parametrize("batch", [8, 3, 2])
def test_a_loss_that_couples_equal_rows_is_refused_in_the_first_step(batch, tmp_path):
    """Two equal records are ordinary, also where no two rows of this data set are equal."""
    run = trainer(tmp_path, llama(), batch=batch, compute_loss_func=shared_by_equals)
    with pytest.raises(IndependenceError, match=rf"{DEPENDS}.*counts equal rows") as refused:
        run.train()
    assert "identical" in str(refused.value)
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 1


def test_equal_rows_are_units_of_their_own_and_are_made_once():
    """In one pass of the first check, since a data set may not have the same row twice."""
    asked = []

    def fetch(numbers):
        asked.append(numbers.tolist())
        return [torch.zeros(int(number) + 1) for number in numbers]

    lengths = np.arange(3, 43)
    units = UnitIndex.one_row_per_unit(len(lengths))
    for most in (2, 3, 8):
        asked.clear()
        rows = TrainingRows(units, lengths, fetch, collate=lambda taken: {"rows": taken}, max_rows=most)
        sample = Sample.draw(rows, RowMaker(rows, 0), None, 4, True)
        twice = [c for c in sample.companies if len(set(c.numbers)) < len(c.numbers)]
        assert [c.numbers.count(sample.short) for c in twice] == [2]
        assert all(len(numbers) == 1 for numbers in asked) and len(asked) == len({one for (one,) in asked})


class Shaky:
    """Rows that lose their last token now and then, so that a short one often stays as it is."""

    def __init__(self, rows):
        self.rows = rows.to_list()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        ids = self.rows[number]["input_ids"]
        return {"input_ids": ids[: len(ids) - int(len(ids) > 3 and random.random() < 0.5)]}


def test_rows_that_are_read_with_random_numbers_are_not_taken_for_coupled(tmp_path):
    """The results of the shortest row may be equal twice by chance, or always."""
    trainer(tmp_path, llama(), Shaky(unequal()), steps=4).train()


@pytest.mark.parametrize("max_tokens", [7, 8, 30, 60, 90, 200])
def test_which_rows_are_drawn_does_not_decide_how_many_passes_there_are(max_tokens):
    """Each process draws its own rows, and sharded models run all passes together."""
    lengths = np.arange(3, 43)
    rows = TrainingRows(
        units=UnitIndex.one_row_per_unit(len(lengths)),
        lengths=lengths,
        fetch=lambda numbers: [torch.zeros(int(number) + 1) for number in numbers],
        collate=lambda taken: {"rows": taken},
        max_rows=None,
    )
    found = {len(Sample.draw(rows, RowMaker(rows, 0), max_tokens, 4, True, crowd=16).companies) for _ in range(60)}
    assert len(found) == 1


class Spans:
    """Cuts each row at a random place, to learn the second part from the first; may take a token from the next row."""

    def __init__(self, mixes):
        self.mixes = mixes

    def __call__(self, rows):
        made, ids = [], [list(row["input_ids"]) for row in rows]
        for number, own in enumerate(ids):
            cut = np.random.randint(1, len(own))
            if self.mixes:
                own[0] = ids[(number + 1) % len(ids)][0]
            made.append({"input_ids": own, "labels": [-100] * cut + own[cut:]})
        return RowCollator(pad_token_id=0)(made)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_collator_draws_numbers_for_a_row_by_itself(mixes, tmp_path):
    """Masked tokens and spans of a row; there is no other row to take a token from."""
    run = trainer(tmp_path, llama(), plain(), steps=8, data_collator=Spans(mixes))
    run.train()
    assert not [one for one in run.privacy_report()["open_points"] if "random" in one]


def test_a_coupling_is_seen_where_the_collator_draws_numbers(tmp_path):
    """The loss and the model are compared on the rows as they were drawn once."""
    with pytest.raises(IndependenceError, match=DEPENDS):
        trainer(tmp_path, llama(), plain(), data_collator=Spans(False), compute_loss_func=over_detached_mean).train()


class Masked:
    """Masks tokens at random, with targets there; marks only as much of the padding as requested."""

    def __init__(self, lacks="", generator=np.random):
        self.lacks, self.generator = lacks, generator

    def __call__(self, rows):
        made = []
        generator = self.generator() if callable(self.generator) else self.generator
        for row in rows:
            hidden = [generator.random() < 0.4 for _ in row["input_ids"]]
            ids = [4 if one else token for one, token in zip(hidden, row["input_ids"], strict=True)]
            targets = [token if one else -100 for one, token in zip(hidden, row["input_ids"], strict=True)]
            made.append({"input_ids": ids, "labels": targets[:-1] + row["input_ids"][-1:]})
        batch = RowCollator(pad_token_id=0)(made)
        if self.lacks == "a mask":
            del batch["attention_mask"]
        if self.lacks == "a true mask":
            batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        if self.lacks == "masked targets":
            batch["labels"] = RowCollator(pad_token_id=0)(rows)["input_ids"]
        return batch


@pytest.mark.parametrize("lacks", ["", "a mask", "a true mask", "masked targets"])
def test_a_collator_that_draws_numbers_leaves_padding_to_dpllm(lacks, tmp_path):
    """A row by itself has none, so nothing of it can be wrong; a causal model reads none that follows its rows."""
    run = trainer(tmp_path, llama(), plain(), data_collator=Masked(lacks))
    run.train()
    assert run.ledger.num_steps == 1


def test_a_collator_with_a_generator_of_each_call_is_refused(tmp_path):
    """A generator that is made in each call gives fresh numbers, and one that counts calls looks alike."""
    with pytest.raises(IndependenceError, match="draw from the global generators"):
        trainer(tmp_path, llama(), plain(), data_collator=Masked(generator=np.random.default_rng)).train()


def summarised(model, steps=1, **more):
    """A trainer's arguments for an encoder-decoder whose sources are masked at random."""

    def collate(rows):
        batch = Masked()([{"input_ids": row["input_ids"]} for row in rows])
        targets = RowCollator(pad_token_id=0)([{"input_ids": row["labels"]} for row in rows])
        return {**batch, "labels": targets["labels"]}

    sources, targets = unequal().to_list(), unequal(shortest=2, longest=20).to_list()
    dataset = [
        {"input_ids": one["input_ids"], "labels": two["input_ids"]} for one, two in zip(sources, targets, strict=True)
    ]
    return {"model": model, "dataset": dataset, "steps": steps, "data_collator": collate, **more}


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=61, **sizes, decoder_start_token_id=0, pad_token_id=0))


def test_the_targets_of_an_encoder_decoder_are_padded_by_themselves(tmp_path):
    """They have their own lengths; a loss over their padded length is a loss over the longest row's."""

    def over_width(outputs, labels):
        return seq2seq_loss(outputs.logits, labels) * (labels != -100).sum(1) / labels.shape[1]

    trainer(tmp_path / "sound", **summarised(t5(), steps=2)).train()
    with pytest.raises(IndependenceError, match=DEPENDS):
        trainer(tmp_path / "coupled", **summarised(t5(), compute_loss_func=over_width)).train()
