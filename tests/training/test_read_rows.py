"""Each row is read separately, and parts of a Trainer that private steps would ignore are refused."""

import random
from operator import itemgetter

import pytest
import torch
from datasets import DatasetDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from dpllm import DPTrainer
from dpllm.config import ConfigError
from dpllm.data.lengths import row_lengths
from dpllm.data.rows import DataError, RowCollator
from dpllm.training import trainer_setup
from dpllm.training.trainer_setup import refuse_changed_rows
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.training.test_trainer import arguments, privacy, rows, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), pad_token="a")


@pytest.mark.parametrize("late", [False, True], ids=["before", "after the trainer was made"])
def test_a_transform_is_given_one_row_at_a_time(late, tmp_path):
    """`datasets` would hand it all rows that are read together, and it could mix them."""
    seen, dataset = [], rows()

    def transform(batch):
        seen.append(len(batch["input_ids"]))
        return {"input_ids": [ids[:2] + batch["input_ids"][-1] for ids in batch["input_ids"]]}

    if not late:
        dataset.set_transform(transform)
    run = trainer(tmp_path, dataset=dataset)
    if late:
        dataset.set_transform(transform)
    seen.clear()  # lengths were counted over many rows
    run.train()
    assert seen and set(seen) == {1}


def test_a_replaced_data_set_is_refused(tmp_path):
    """Steps would be taken over the first one, and the report would describe the second."""
    run = trainer(tmp_path)
    run.train_dataset = rows(32)
    with pytest.raises(ConfigError, match="train_dataset"):
        run.train()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (rows().to_iterable_dataset(), "of type IterableDataset, whose rows cannot be read by number"),
        (None, "train_dataset is missing: pass rows with input_ids, or with texts and a tokenizer"),
        (
            torch.utils.data.TensorDataset(torch.ones(64, 4)),
            "Row 0 of train_dataset is of type tuple. Pass rows that are dict",
        ),
        (
            {"input_ids": [[5, 6]]},
            "of type dict, with the keys input_ids",
        ),
        (rows().to_pandas(), r"of type DataFrame, a table whose rows cannot be read by number: pass datasets\.Dataset"),
        (DatasetDict({"train": rows()}), "of type DatasetDict, with the keys train"),
    ],
)
def test_a_data_set_of_another_kind_is_refused(dataset, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        DPTrainer(torch.nn.Linear(1, 1), arguments(tmp_path), privacy(), dataset)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (None, "give exactly one of model and model_init, got neither"),
        ("org/model", "the model 'org/model' cannot be loaded .*Give a local folder, or a Hub name"),
        ("./nomodel", r"the model '\./nomodel' cannot be loaded: there is no such folder"),
        (7, "model is of type int: pass the model itself, as from_pretrained returns it"),
    ],
)
def test_what_is_no_model_is_refused(model, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        DPTrainer(model, arguments(tmp_path), privacy(), [])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("get_train_dataloader", "the plan's sampler draws"),
        ("_get_train_sampler", "the plan's sampler draws"),
        ("compute_loss", "Pass compute_loss_func"),
    ],
)
def test_an_override_that_would_be_ignored_is_refused(name, says, tmp_path):
    """The rows of a step are the plan's draw, and another loss would be trained."""
    own = type("Own", (DPTrainer,), {name: lambda self, *args: None})
    with pytest.raises(ConfigError, match=f"Own overrides {name}.*{says}"):
        own(None, arguments(tmp_path), privacy(), None)


class Augmented(torch.utils.data.Dataset):
    """Drops tokens by random numbers."""

    def __init__(self, source):
        self.rows, self.source, self.seed = rows().to_list(), source, 3

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        ids = self.rows[number]["input_ids"]
        return {"input_ids": [token for token in ids if self.source.random() < 0.8] or ids}


def test_a_data_set_with_a_generator_of_its_own_is_refused(tmp_path):
    """Its numbers are public, and those of one row shift when another is removed; the global ones are secret."""
    with pytest.raises(ConfigError, match="Random"):
        trainer(tmp_path / "own", dataset=Augmented(random.Random(42))).train()
    run = trainer(tmp_path / "global", dataset=Augmented(random))
    run.train()
    assert run.ledger.num_steps == 4


class Unbounded(torch.utils.data.Dataset):
    """Rows of tensors, which answer to any number: only the length says how many there are."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {name: torch.tensor(values[number % 64]) for name, values in self.columns.items()}


@pytest.mark.parametrize("level", ["rows", "users"])
def test_rows_are_read_by_number_and_ids_may_be_tensors(level, tmp_path):
    """Data sets of PyTorch need raise no IndexError, and an id in a tensor is the number that it holds."""
    if level == "rows":
        dataset, config = Unbounded(input_ids=rows()["input_ids"]), privacy()
    else:
        dataset = Unbounded(input_ids=rows()["input_ids"], user=[number // 2 for number in range(64)])
        config = privacy(unit="user", max_rows_per_unit=2, expected_batch_size=8)
    run = trainer(tmp_path, dataset=dataset, config=config, args=arguments(tmp_path, max_steps=1))
    assert run.units.num_units == {"rows": 64, "users": 32}[level]
    run.train()


@pytest.mark.parametrize("form", ["pandas", "arrow"])
def test_rows_that_come_out_as_tables_are_refused(form, tmp_path):
    """They are no dictionaries, and the first step would fail."""
    with pytest.raises(ConfigError, match=rf"the format '{form}'.*pass train_dataset\.with_format\(None\)"):
        trainer(tmp_path, dataset=rows().with_format(form))


@pytest.mark.parametrize("removed", [True, False])
def test_a_collator_of_transformers_is_given_the_columns_that_the_model_takes(removed, tmp_path):
    """It makes a tensor of each: the user's id as text, which has to be there, would end the run before it begins."""
    config = privacy(unit="user", max_rows_per_unit=2, expected_batch_size=8)

    def train():
        trainer(
            tmp_path,
            LlamaForCausalLM(tiny_llama_config(pad_token_id=0)),
            rows(user=[f"u{number // 2}" for number in range(64)]).remove_columns("labels"),
            config,
            arguments(tmp_path, max_steps=1, remove_unused_columns=removed),
            data_collator=DataCollatorForLanguageModeling(TOKENIZER, mlm=False),
        ).train()

    if removed:
        train()
        return
    with pytest.raises(ValueError, match="`user` in this case"):
        train()


@pytest.mark.parametrize("pad", ["end", "pad"])
def test_a_collator_that_pads_with_the_end_of_texts_is_named(pad, tmp_path, caplog):
    """It takes padding out of the loss, and the end of each text with it, so that the model would not learn to stop."""
    words = Tokenizer(WordLevel({"end": 0, "pad": 1, "word": 2}, unk_token="word"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token=pad)
    model = LlamaForCausalLM(tiny_llama_config(pad_token_id=tokenizer.pad_token_id))
    trainer_setup.logger.warning_once.cache_clear()
    trainer(tmp_path, model, rows(), data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    assert ("does not learn to stop" in caplog.text) == (pad == "end")


def test_any_other_collator_is_given_all_columns(tmp_path):
    seen = set()

    def collate(given):
        seen.update(*given)
        return trainer(tmp_path / "other").data_collator([{"input_ids": row["input_ids"]} for row in given])

    run = trainer(tmp_path, dataset=rows(weight=[1.0] * 64), data_collator=collate)
    run._prepared.rows.collate(run._prepared.rows.fetch(torch.arange(2).numpy()))
    assert seen == {"input_ids", "labels", "weight"}


def test_classes_as_text_are_refused_unless_a_collator_of_ones_own_numbers_them(tmp_path):
    """A collator of transformers, or of dpllm, would end in an error about tensors or about an int."""
    dataset = rows(label=["yes", "no"] * 32).remove_columns("labels")
    inner = RowCollator(pad_token_id=0)

    def numbered(given):
        return {**inner([{"input_ids": row["input_ids"]} for row in given]), "is_yes": [row["label"] for row in given]}

    run = trainer(tmp_path, dataset=dataset, data_collator=numbered)
    assert run._prepared.rows.collate(run._prepared.rows.fetch(torch.arange(2).numpy()))["is_yes"] == ["yes", "no"]
    with pytest.raises(DataError, match="loss needs"):
        trainer(tmp_path, dataset=dataset, data_collator=DataCollatorWithPadding(TOKENIZER))
    with pytest.raises(DataError, match="loss needs"):
        RowCollator(pad_token_id=0, task="sequence_classification")(dataset.to_list())
    assert not list(tmp_path.iterdir())


BY_AUTHOR = privacy(unit="author", max_rows_per_unit=4, expected_batch_size=8)
LEVELS = {"users": ("author", BY_AUTHOR), "records": ("record", privacy(expected_batch_size=8)), "rows": (None, None)}
MOVES = {
    "shuffled": random.Random(1).shuffle,
    "sorted": lambda own: own.sort(key=itemgetter("input_ids")),
    "filtered": lambda own: own.pop(9),
    "extended": lambda own: own.append(own[0]),
}


def owned(column=None):
    """Return rows as a list, four of each unit."""
    names = [f"u{number // 4}" if column == "author" else number // 4 for number in range(64)]
    return rows(**({} if column is None else {column: names})).to_list()


class Lazy(torch.utils.data.Dataset):
    """Reads its rows when they are asked for."""

    def __init__(self, own):
        self.own, self.hidden = own, ()

    def __len__(self):
        return len(self.own)

    def __getitem__(self, number):
        return {name: value for name, value in self.own[number].items() if name not in self.hidden}


@kills(
    "rows may move between the plan and the training",
    "dpllm/training/trainer_setup.py",
    "    prepared.processes.together(lambda: refuse_moved(dataset, len(prepared.rows.lengths), prepared.units))\n",
    "",
)
@pytest.mark.parametrize("made", [list, Lazy])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("level", LEVELS)
def test_rows_that_moved_before_the_training_are_refused(level, move, made, tmp_path):
    """Units would be mixtures of people, or N another number; nothing is written. Rows that are units may be moved."""
    column, config = LEVELS[level]
    own = owned(column)
    run = trainer(tmp_path, dataset=own if made is list else Lazy(own), config=config)
    MOVES[move](own)
    if level == "rows" and move in ("shuffled", "sorted"):
        refuse_changed_rows(run._prepared, run.train_dataset)
        return
    says = rf"has a different id in the column '{column}'" if move in ("shuffled", "sorted") else "rows, but had 64"
    with pytest.raises(ConfigError, match=says) as error:
        run.train()
    assert "\n" not in str(error.value) and "u1" not in str(error.value)
    assert run.ledger is None and not list(tmp_path.iterdir())


@kills(
    "rows may move during the training",
    "dpllm/data/single_rows.py",
    "        self._compare_units(numbers, rows)\n",
    "",
)
def test_rows_that_move_during_the_training_end_it(tmp_path):
    """A callback that shuffles a list at each epoch, as loops without a sampler do."""
    own = owned("author")

    class Shuffle(TrainerCallback):
        def on_step_end(self, *args, **more):
            random.Random(1).shuffle(own)

    run = trainer(tmp_path, dataset=own, config=BY_AUTHOR, callbacks=[Shuffle()])
    with pytest.raises(ConfigError, match="has a different id in the column 'author'"):
        run.train()
    assert run.ledger.num_steps <= 2


def test_rows_must_show_their_unit_unless_a_table_has_it(tmp_path):
    """A transform may leave the column out, as those for images do: the table below it cannot be moved in place."""
    lazy = Lazy(owned("author"))
    run = trainer(tmp_path / "lazy", dataset=lazy, config=BY_AUTHOR)
    fetch = run._prepared.rows.fetch
    assert len(fetch(torch.arange(3).numpy())) == 3
    lazy.hidden = ("author",)
    with pytest.raises(ConfigError, match="Row 2 of train_dataset has no column 'author' any more"):
        fetch(torch.tensor([2, 0]).numpy())
    table = rows(author=[f"u{number // 4}" for number in range(64)])
    run = trainer(tmp_path / "table", dataset=table, config=BY_AUTHOR, args=arguments(tmp_path / "table", max_steps=1))
    table.set_transform(lambda batch: {"input_ids": batch["input_ids"], "labels": batch["labels"]})
    run.train()
    assert run.ledger.num_steps == 1


def test_a_transform_that_gives_rows_to_other_people_is_refused(tmp_path):
    """Set after the trainer was made; found before anything is charged."""
    table = rows(author=[f"u{number // 4}" for number in range(64)])
    run = trainer(tmp_path, dataset=table, config=BY_AUTHOR)
    table.set_transform(lambda batch: {**batch, "author": ["u7"] * len(batch["author"])})
    with pytest.raises(ConfigError, match="has a different id in the column 'author'"):
        run.train()
    assert run.ledger is None and not (tmp_path / "privacy_ledger.jsonl").exists()


@pytest.mark.parametrize("form", ["torch", "numpy", None])
def test_a_table_in_any_format_is_read(form, tmp_path):
    """Ids come out as tensors, or not at all."""
    table = rows(author=[number // 4 for number in range(64)])
    run = trainer(tmp_path, dataset=table, config=BY_AUTHOR, args=arguments(tmp_path, max_steps=1))
    table.set_format(form, columns=["input_ids", "labels"] if form == "torch" else None)
    run.train()
    assert run.ledger.num_steps == 1


@pytest.mark.parametrize(
    ("one", "other"), [(30, 37.5), (1, True), ("30", 30), ([1, 2], [1, 2.5]), ({"a": True}, {"a": 0.5})]
)
def test_rows_of_a_list_have_one_kind_of_value_in_a_column(one, other, tmp_path):
    """In a batch, one row's fraction would make fractions of the others' whole numbers; nothing has no kind."""
    own = [{"input_ids": [5, 6, 7], "age": value} for value in (one, None, one)]
    assert len(row_lengths(own, None)) == 3
    for dataset in ([*own, {"input_ids": [5, 6, 7], "age": other}], [{"input_ids": [5, 6], "age": other}, *own]):
        with pytest.raises(DataError, match=r"The column 'age' .* holds .* in row 0 and .* in row [13]\."):
            trainer(tmp_path, dataset=dataset, config=privacy(expected_batch_size=2))
