"""DPDPOTrainer: a pair is a row, its reference is computed once, and what couples pairs is refused."""

import json

import pytest

trl = pytest.importorskip("trl")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, PeftModel  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from dpllm import DPDPOTrainer, DPSFTTrainer, DPTrainer  # noqa: E402
from dpllm.config import ConfigError  # noqa: E402
from dpllm.data.records import DataError  # noqa: E402
from dpllm.models.preference import SIDES, pair_log_probs  # noqa: E402
from dpllm.privacy.ledger import read_ledger  # noqa: E402
from dpllm.report.disclosures import own_methods  # noqa: E402
from dpllm.report.verify import verify  # noqa: E402
from dpllm.training.checks.independence import IndependenceError  # noqa: E402
from dpllm.training.trl_trainers import (  # noqa: E402
    GIVEN_REFERENCE,
    LOSS_FACT,
    REFERENCE_FACT,
    SHARED_PROMPTS,
    PairLosses,
)
from tests import trl_data  # noqa: E402
from tests.mutations import kills  # noqa: E402
from tests.tiers import deep_case  # noqa: E402

C = 1e-3
pytestmark = pytest.mark.usefixtures("rows_not_compared")  # unless a test is marked otherwise
SHAPES = trl_data.preferences(8)


def dpo(folder, dataset=None, model=None, config=None, privacy=None, **more):
    dataset = SHAPES["prompt"] if dataset is None else dataset
    return DPDPOTrainer(
        model or trl_data.model(),
        trl_data.arguments(trl.DPOConfig, folder, **(config or {})),
        privacy or trl_data.privacy(len(dataset), clip_norm=C),
        dataset,
        processing_class=more.pop("processing_class", None) or trl_data.tokenizer(),
        **more,
    )


def losses_of(run):
    """The loss of each pair, by itself and by plain sums of log-softmax."""
    rows = list(run.train_dataset)

    def of(row):
        def loss(model):
            found = []
            for side in SIDES:
                ids, labels = torch.tensor(row[f"{side}_input_ids"]), torch.tensor(row[f"{side}_labels"])
                log_prob = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
                own = log_prob.gather(1, ids[1:, None])[:, 0]
                found.append(own[labels[1:] != -100].sum())
            reference = torch.from_numpy(run.data_collator.reference[row["pair"]])
            ratio = torch.stack(found) - reference
            return -torch.nn.functional.logsigmoid(0.1 * (ratio[0] - ratio[1]))

        return loss

    return [of(row) for row in rows]


@pytest.mark.parametrize(
    ("lora", "gradients", "config"),
    [
        (False, "ghost", {}),
        (False, "per_unit", {}),
        (True, "ghost", {"gradient_checkpointing": True}),  # TRL's default
        deep_case(False, "ghost", {"gradient_checkpointing": True}),
        deep_case(True, "per_unit", {}),
    ],
)
def test_the_sum_is_that_of_single_pairs_in_float64(lora, gradients, config, tmp_path):
    """Both calls of the model, and the products between them, are in each pair's norm."""
    model, reference = trl_data.model_and_reference()
    adapter = (
        {"peft_config": LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False)} if lora else {}
    )
    private = trl_data.privacy(8, clip_norm=C, gradients=gradients)
    run = dpo(tmp_path, model=model.double(), ref_model=reference.double(), privacy=private, config=config, **adapter)
    wanted, factors = trl_data.one_by_one(run.model, losses_of(run), C)
    assert max(factors) < 1  # every pair is clipped
    assert trl_data.distance(trl_data.clipped_sum(run), wanted) < 1e-8


def test_pairs_of_one_user_are_clipped_together(tmp_path):
    """Also those that share a prompt."""
    model, reference = trl_data.model_and_reference()
    people = SHAPES["chat"].add_column("person", list("aaabbbcc"))
    private = trl_data.privacy(3, clip_norm=C, unit="person", max_rows_per_unit=3)
    run = dpo(tmp_path, people, model.double(), privacy=private, ref_model=reference.double())
    one = losses_of(run)
    users = [
        lambda model, own=own: torch.stack([loss(model) for loss in own]).sum() for own in (one[:3], one[3:6], one[6:])
    ]
    wanted, _ = trl_data.one_by_one(run.model, users, C)
    assert run.plan.num_units == 3
    assert trl_data.distance(trl_data.clipped_sum(run), wanted) < 1e-8


def test_leaving_out_a_pair_moves_the_sum_by_the_bound_at_most(tmp_path):
    """Neighbours through the public API, from raw examples: its reference and its padding change no other pair."""
    model, reference = trl_data.model_and_reference()
    long = {"prompt": "the ", "chosen": "a red house and " * 4, "rejected": "dog"}
    whole = Dataset.from_list([*SHAPES["prompt"], long])
    sums = []
    for number, rows in enumerate((whole, whole.select(range(8)))):
        own = trl_data.model()
        own.load_state_dict(model.state_dict())
        private = trl_data.privacy(len(rows), clip_norm=C)
        sums.append(trl_data.clipped_sum(dpo(tmp_path / str(number), rows, own, privacy=private, ref_model=reference)))
    assert 0.99 * C < trl_data.distance(*sums) <= C * (1 + 1e-4)


@pytest.mark.compares_rows
@pytest.mark.parametrize("couples", [False, True], ids=["own", "coupled"])
def test_the_comparison_of_rows_finds_a_loss_that_follows_other_pairs(couples, tmp_path, monkeypatch):
    """Through the value: a weight that is detached has no gradient in other pairs."""
    run = dpo(tmp_path, model=trl_data.model_and_reference()[0], ref_model=trl_data.model_and_reference()[1])
    if not couples:
        run.train()
        return
    alone = PairLosses.__call__
    monkeypatch.setattr(
        PairLosses, "__call__", lambda self, *args: (one := alone(self, *args)) * (1 + one.detach().mean())
    )
    with pytest.raises(IndependenceError, match="loss"):
        run.train()


@kills(
    "a reference that came with the data raises no question",
    "dpllm/training/trl_trainers.py",
    "self._reference_points = [GIVEN_REFERENCE]",
    "pass",
)
def test_the_reference_is_the_model_at_the_start_or_another_one_or_given(tmp_path):
    """Each number is computed of its pair alone; with an adapter the start is the base under it."""
    model, other = trl_data.model_and_reference()
    pairs = dpo(tmp_path / "pairs").train_dataset
    alone = [pair_log_probs(model, dpo(tmp_path / "a", model=model).data_collator([row])) for row in pairs]
    start = dpo(tmp_path / "b", model=model).data_collator.reference
    assert np.array_equal(start, torch.cat(alone).double().detach().numpy())
    lora = dpo(tmp_path / "c", model=model, peft_config=LoraConfig(target_modules=["q_proj"]))
    assert np.array_equal(lora.data_collator.reference, start) and isinstance(lora.model, PeftModel)
    assert not np.array_equal(dpo(tmp_path / "d", ref_model=other).data_collator.reference, start)
    given = SHAPES["prompt"].add_column("ref_chosen_logps", [-1.0] * 8).add_column("ref_rejected_logps", [-2.0] * 8)
    run = dpo(tmp_path / "e", given)
    assert run.data_collator.reference.tolist() == [[-1, -2]] * 8
    run.train()
    assert GIVEN_REFERENCE in run.privacy_report()["open_points"]


@kills(
    "a reference of a private run needs no declaration",
    "dpllm/training/trl_trainers.py",
    "self._reference_points += check_start(ref_model, args.output_dir, independent)",
    "pass",
)
def test_a_reference_that_was_trained_privately_is_refused_unless_declared(tmp_path):
    """Its ledger may be of these pairs: it would bring them into every loss."""
    first = dpo(tmp_path / "first", privacy=trl_data.privacy(4, noise_multiplier=1.0, seed=None))
    first.train()
    first.save_model()
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "first")
    with pytest.raises(ConfigError, match="run does"):
        dpo(tmp_path / "second", ref_model=trained)
    run = dpo(tmp_path / "third", ref_model=trained, start_is_independent=True)
    run.train()
    assert any("Declared independent" in point for point in run.privacy_report()["open_points"])


def test_a_run_leaves_a_report_that_names_the_loss_and_verifies(tmp_path):
    """And nothing of the rewards of training pairs is written."""
    run = dpo(
        tmp_path,
        config={"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "max_steps": 2, "learning_rate": 1e-3},
        privacy=trl_data.privacy(4, noise_multiplier=1.0, seed=None, delta=1e-3),
        model=trl_data.model(),
    )
    run.train()
    run.save_model()
    ledger = read_ledger(tmp_path / "privacy_ledger.jsonl")
    assert ledger.notes.facts[LOSS_FACT] == ["sigmoid + 0.5 × ipo, β = 0.1"]
    assert not any("reward" in key for entry in run.state.log_history for key in entry)
    assert ledger.notes.facts[REFERENCE_FACT] == ["the model before the first step"] and verify(tmp_path).ok
    assert SHARED_PROMPTS not in json.loads((tmp_path / "privacy_report.json").read_text())["open_points"]


@kills(
    "prompts that pairs share raise no question",
    "dpllm/training/trl_trainers.py",
    "*([SHARED_PROMPTS] if self._shares_prompts else [])",
    "",
)
def test_prompts_that_pairs_share_are_an_open_point_unless_users_are_units(tmp_path):
    """A prompt in k pairs is protected k times less."""
    twice = SHAPES["prompt"].select([0, 0, 1, 2])
    run = dpo(tmp_path / "pairs", twice)
    run.train()
    assert SHARED_PROMPTS in run.privacy_report()["open_points"]
    private = trl_data.privacy(3, unit="asked", max_rows_per_unit=2)
    run = dpo(tmp_path / "users", twice.add_column("asked", [0, 0, 1, 2]), privacy=private)
    run.train()
    assert SHARED_PROMPTS not in run.privacy_report()["open_points"]


def test_private_pairs_that_are_declared_public_are_refused(tmp_path):
    """A schedule could follow exact losses."""
    private = trl_data.preferences(4)["prompt"]
    with pytest.raises(DataError, match="train_dataset"):
        dpo(tmp_path, private, eval_dataset=private.select([3, 2, 1, 0]), eval_is_public=True)


def test_an_evaluation_has_rewards_and_is_counted(tmp_path):
    """On pairs whose reference is known; at the start all rewards are 0."""
    run = dpo(tmp_path, eval_dataset={"held": SHAPES["chat"]})
    first = run.evaluate()
    assert first["eval_held_rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert first["eval_held_loss"] == pytest.approx(np.log(2), abs=1e-5)
    run.train()
    found = run.evaluate()
    assert {"eval_held_rewards/accuracies", "eval_held_rewards/chosen"} <= set(found)
    assert any("evaluation" in name for name in read_ledger(tmp_path / "privacy_ledger.jsonl").disclosures)
    assert run.predict(run.eval_dataset["held"]).predictions.shape == (8, 2)
    with pytest.raises(ConfigError, match="their reference"):
        run.evaluate(SHAPES["prompt"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"loss_type": ["aot"]}, "loss_type='aot' cannot be used in private training: it sorts the log-ratios of all"),
        ({"loss_type": ["aot_unpaired"]}, "loss_type='aot_unpaired' cannot"),
        ({"loss_type": ["sigmoid", "sft"]}, r"loss_type='sft' cannot be used.*train on these with DPSFTTrainer"),
        ({"sync_ref_model": True}, "sync_ref_model=True cannot"),
        ({"padding_free": True}, "padding_free=True cannot"),
        ({"use_weighting": True}, "use_weighting=True cannot"),
        ({"activation_offloading": True}, "activation_offloading=True"),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"include_for_metrics": ["inputs"]}, "the figures of an evaluation are computed of its rewards"),
        ({"loss_type": None}, "loss_type names no loss"),
        ({"batch_eval_metrics": True}, "the rewards of all pairs of an evaluation are averaged at once"),
    ],
)
def test_options_are_refused_before_data_are_read(config, says, tmp_path):
    """Each with the reason and the remedy."""
    with pytest.raises(ConfigError, match=says):
        dpo(tmp_path, trl_data.Unread(), config=config, privacy=trl_data.privacy(8))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"compute_loss_func": print}, r"does not take compute_loss_func: args\.loss_type"),
        ({"data_collator": print}, "does not take data_collator"),
        ({"pack_rows": True}, "does not take pack_rows"),
        ({"ref_model": "gpt2"}, "ref_model is of type str"),
        ({"eval_dataset": {"train_dataset": None}}, "eval_dataset has a data set named 'train_dataset'"),
    ],
)
def test_arguments_that_it_sets_itself_or_cannot_use_are_refused(more, says, tmp_path):
    """They would be ignored."""
    with pytest.raises(ConfigError, match=says):
        dpo(tmp_path, trl_data.Unread(), privacy=trl_data.privacy(8), **more)
    model = trl_data.model()
    with pytest.raises(ConfigError, match="ref_model"):
        dpo(tmp_path, trl_data.Unread(), model, privacy=trl_data.privacy(8), ref_model=model)


def test_dropout_is_off_as_in_trl_unless_it_is_asked_for(tmp_path):
    """With dropout, the starting model would differ from its reference."""
    described = {"target_modules": ["q_proj"], "lora_dropout": 0.5}
    run = dpo(tmp_path / "off", peft_config=LoraConfig(**described))
    assert not any(getattr(module, "p", 0) for module in run.model.modules())
    run = dpo(tmp_path / "on", config={"disable_dropout": False}, peft_config=LoraConfig(**described))
    assert any(getattr(module, "p", 0) == 0.5 for module in run.model.modules())


@pytest.mark.parametrize("kind", [DPDPOTrainer, DPSFTTrainer])
def test_no_method_of_it_is_taken_for_the_users_own(kind):
    """The report would have an open point for each."""
    assert own_methods(kind.__new__(kind)) == [] and issubclass(kind, DPTrainer)
