"""DPSFTTrainer: private steps over TRL's data shapes; what would couple rows or be ignored is refused."""

import copy

import pytest

trl = pytest.importorskip("trl")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, PeftModel  # noqa: E402
from transformers import LlamaForCausalLM, TrainingArguments  # noqa: E402

from dpllm import DPSFTTrainer  # noqa: E402
from dpllm.config import ConfigError  # noqa: E402
from dpllm.data.records import DataError  # noqa: E402
from tests import trl_data  # noqa: E402
from tests.mutations import kills  # noqa: E402

pytestmark = pytest.mark.usefixtures("rows_not_compared")  # unless a test is marked otherwise
SHAPES = trl_data.shapes(8)
C = 1e-2


def sft(folder, dataset=None, model=None, config=None, privacy=None, **more):
    dataset = SHAPES["messages"] if dataset is None else dataset
    return DPSFTTrainer(
        model or trl_data.model(),
        trl_data.arguments(trl.SFTConfig, folder, **(config or {})),
        privacy or trl_data.privacy(len(dataset)),
        dataset,
        processing_class=more.pop("processing_class", None) or trl_data.tokenizer(),
        **more,
    )


def loss_of(row):
    """The mean over a row's own targets, as transformers computes it for a single row."""
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
    return lambda model: model(input_ids=ids, labels=labels).loss


@pytest.mark.parametrize("options", [{"assistant_only_loss": True}, {}], ids=["assistant", "all"])
@pytest.mark.parametrize("pack_rows", [False, True], ids=["padded", "packed"])
def test_the_sum_is_that_of_single_rows_in_float64(options, pack_rows, tmp_path):
    """Each row's loss is divided by its own targets, not by those of the batch."""
    run = sft(tmp_path, model=trl_data.model().double(), config=options, pack_rows=pack_rows)
    wanted, factors = trl_data.one_by_one(run.model, map(loss_of, run.train_dataset), C)
    assert max(factors) < 1  # every row is clipped
    assert trl_data.distance(trl_data.clipped_sum(run), wanted) < 1e-8


def test_leaving_out_an_example_moves_the_sum_by_the_bound_at_most(tmp_path):
    """Neighbours through the public API, from raw conversations to the optimizer; the last example is longest."""
    model, whole = trl_data.model(), SHAPES["messages"]
    whole = Dataset.from_list(
        [*whole, {"messages": trl_data.says("user", "the") + trl_data.says("assistant", "a " * 20)}]
    )
    sums = []
    for number, rows in enumerate((whole, whole.select(range(8)))):
        run = sft(tmp_path / str(number), rows, copy.deepcopy(model), privacy=trl_data.privacy(len(rows)))
        sums.append(trl_data.clipped_sum(run))
    assert 0.99 * C < trl_data.distance(*sums) <= C * (1 + 1e-5)


@kills(
    "the column of users is lost when examples are prepared",
    "dpllm/training/trl_trainers.py",
    "keep = [privacy.unit] if privacy.unit else []",
    "keep = []",
)
def test_users_are_units_and_the_model_may_be_a_folder_with_an_adapter(tmp_path):
    """The column of users comes through the preparation; a name, and peft_config, as in TRL."""
    trl_data.model().save_pretrained(tmp_path / "base")
    people = SHAPES["prompt_completion"].add_column("person", list("aabbccdd"))
    run = sft(
        tmp_path / "run",
        people,
        str(tmp_path / "base"),
        {"model_init_kwargs": {"dtype": "float64"}},
        trl_data.privacy(4, unit="person", max_rows_per_unit=2),
        peft_config=LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"),
    )
    assert run.plan.num_units == 4 and isinstance(run.model, PeftModel) and run.model.dtype == torch.float64
    run.train()
    run.save_model()
    assert "user" in str(run.privacy_report()["statement"])
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    PeftModel.from_pretrained(loaded, str(tmp_path / "run"))


def test_evaluation_prepares_its_examples(tmp_path):
    """Those of the constructor, and those of a call."""
    run = sft(tmp_path, eval_dataset={"held": SHAPES["text"]}, eval_is_public=True)
    run.train()
    assert {"eval_held_loss"} <= set(run.evaluate())
    assert run.evaluate(SHAPES["text"])["eval_loss"] == pytest.approx(run.evaluate()["eval_held_loss"])
    assert len(run.predict(SHAPES["text"]).predictions) == 8


def test_token_ids_may_be_taken_as_they_are(tmp_path):
    """skip_prepare_dataset: nothing is cut or masked."""
    ids = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 4, "labels": [[5, 6, 7]] * 4})
    config = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": 2}
    assert sft(tmp_path, ids, config=config).train_dataset is ids
    with pytest.raises(ConfigError, match="add_special_tokens"):
        sft(tmp_path, ids, config={"dataset_kwargs": {"add_special_tokens": False}})


@kills(
    "the mark that a tokenizer cut long texts is lost when rows are prepared",
    "dpllm/data/examples.py",
    "for name in MARKS_OF_UNITS if",
    "for name in MARKS_OF_UNITS[:1] if",
)
def test_pieces_of_longer_texts_need_the_number_of_their_text(tmp_path):
    """Each piece would be a unit; the mark of a tokenizer comes through the preparation."""
    pieces = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 4, "overflow_to_sample_mapping": [0, 0, 1, 2]})
    with pytest.raises(DataError, match="overflow_to_sample_mapping"):
        sft(tmp_path, pieces)
    run = sft(tmp_path, pieces.add_column("record", [0, 0, 1, 2]), privacy=trl_data.privacy(3))
    assert run.plan.num_units == 3


@kills(
    "options of TRL that couple rows are accepted",
    "dpllm/training/argument_table.py",
    "if entry.kind == REFUSED and hasattr(args, name):",
    "if False:",
)
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"loss_type": "dft"}, r"loss_type='dft' cannot be used in private training.*tokens of the batch"),
        ({"packing": True}, r"packing=True.*Pass pack_rows=True"),
        ({"padding_free": True}, r"padding_free=True.*Pass pack_rows=True"),
        ({"eval_packing": True}, "eval_packing=True"),
        ({"activation_offloading": True}, r"activation_offloading=True.*gradient_checkpointing=True"),
        ({"router_aux_loss_coef": 0.1}, r"router_aux_loss_coef=0.1.*tokens of all rows"),
        ({"chat_template_path": "nowhere"}, r"chat_template_path='nowhere'.*trl\.clone_chat_template"),
        ({"eos_token": "nothing"}, "eos_token='nothing'"),
        ({"max_length": "5"}, "max_length must be a whole number"),
        ({"max_length": -1}, "max_length must be at least 2"),
        ({"truncation_mode": "keep_middle"}, "truncation_mode must be one of 'keep_start', 'keep_end'"),
        ({"dataset_kwargs": {"skip_prepare_dataset": "no"}}, "must be true or false"),
        ({"dataset_kwargs": ["skip_prepare_dataset"]}, "dataset_kwargs must be a dictionary"),
        ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps=2"),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "are for a model that is given by its name"),
        ({"neftune_noise_alpha": 5.0}, "NEFTune scales its noise by the padded length"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*neftune.*")
def test_options_are_refused_before_data_are_read(config, says, tmp_path):
    """Each with the reason and the remedy."""
    with pytest.raises(ConfigError, match=says):
        sft(tmp_path, trl_data.Unread(), config=config, privacy=trl_data.privacy(8))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"compute_loss_func": print}, "DPSFTTrainer does not take compute_loss_func"),
        ({"data_collator": print}, "DPSFTTrainer does not take data_collator"),
        ({"peft_config": {"r": 2}}, "peft_config is of type dict"),
        ({"processing_class": "gpt2"}, r"processing_class is of type str"),
        ({"model": torch.nn.Linear(2, 2)}, r"trains causal language models, but this is a Linear"),
        ({"model": 3}, "model is of type int"),
    ],
)
def test_arguments_that_it_sets_itself_or_cannot_use_are_refused(more, says, tmp_path):
    """They would be ignored."""
    with pytest.raises(ConfigError, match=says):
        sft(tmp_path, trl_data.Unread(), privacy=trl_data.privacy(8), **more)


def test_plain_arguments_are_refused(tmp_path):
    """They do not say how rows are made; and an unknown keyword is no option of anything."""
    args = trl_data.arguments(TrainingArguments, tmp_path)
    with pytest.raises(ConfigError, match=r"trl\.SFTConfig"):
        DPSFTTrainer(trl_data.model(), args, trl_data.privacy(8), SHAPES["text"])
    with pytest.raises(TypeError, match="formatting_func"):
        sft(tmp_path, formatting_func=print)


def test_tokens_and_templates_of_the_arguments_are_those_of_tokenizer_and_model(tmp_path):
    """As in TRL."""
    (tmp_path / "own.jinja").write_text("{% for one in messages %}{{ one['content'] }} {% endfor %}{{ eos_token }}")
    config = {"chat_template_path": str(tmp_path / "own.jinja"), "eos_token": "<pad>"}
    run = sft(tmp_path / "run", config=config)
    assert run.model.config.eos_token_id == run.processing_class.eos_token_id == run.processing_class.pad_token_id
    assert run.model.generation_config.eos_token_id[0] == run.processing_class.eos_token_id
    text = " ".join(one["content"] for one in SHAPES["messages"][0]["messages"])
    assert run.processing_class.decode(run.train_dataset[0]["input_ids"]) == f"{text} <pad>"


def test_a_template_in_another_encoding_is_named(tmp_path):
    """The file is public, so its name may be in the message."""
    (tmp_path / "latin.jinja").write_bytes(b"{# \xe9 #}")
    with pytest.raises(ConfigError, match=r"latin\.jinja"):
        config = {"chat_template_path": str(tmp_path / "latin.jinja")}
        sft(tmp_path, trl_data.Unread(), config=config, privacy=trl_data.privacy(8))


def test_a_template_that_does_not_mark_the_assistant_is_replaced_or_refused(tmp_path):
    """TRL has marking versions of well-known templates only."""
    marked, private = {"assistant_only_loss": True}, trl_data.privacy(8)
    plain = trl_data.TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ConfigError, match=r"does\. Put"):
        sft(tmp_path, trl_data.Unread(), config=marked, processing_class=trl_data.tokenizer(plain), privacy=private)
    with pytest.raises(ConfigError, match="chat_template_path"):
        sft(tmp_path, trl_data.Unread(), config=marked, processing_class=trl_data.tokenizer(None), privacy=private)
