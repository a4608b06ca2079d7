"""The ways into DPTrainer that people know from Trainer and TRL: names, raw columns, adapters, metrics."""

import copy
import functools

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import BOFTConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainingArguments,
)

from dpllm import DPTrainer, PrivacyConfig
from dpllm.config import ConfigError, DataConfig
from dpllm.data.raw_rows import RowMaker
from dpllm.data.records import DataError
from dpllm.data.rows import tokenize_records
from dpllm.privacy.ledger import read_ledger
from dpllm.training.checks.watch import WatchError
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.small_model import WORDS, save_small_model

pytestmark = pytest.mark.usefixtures("rows_not_compared")

TEXTS = [" ".join(WORDS[start : start + length]) for start, length in [(0, 4), (3, 7), (5, 3), (8, 9), (2, 5), (9, 6)]]
TEMPLATE = "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
LORA = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights="gaussian")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16))


@pytest.fixture(scope="module")
def tokenizer(folder):
    found = AutoTokenizer.from_pretrained(folder)
    found.chat_template = TEMPLATE
    return found


def options(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**settings, **changes})


PRIVACY = {"noise_multiplier": 0.0, "clip_norm": 0.01, "expected_batch_size": 6, "delta": 1e-3}


def made(path, model, rows, **more):
    more = {**more, "peft_config": copy.deepcopy(more.get("peft_config"))}  # PEFT writes the model's place into it
    return DPTrainer(model, **{"args": options(path), "privacy": PRIVACY, "train_dataset": rows, **more})


def texts(*, replaced=None):
    rows = [{"text": text} for text in TEXTS]
    return Dataset.from_list(rows if replaced is None else [{"text": replaced}, *rows[1:]])


def weights(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def test_a_name_and_raw_texts_are_a_run(tmp_path, folder):
    """As TRL's quickstart: model, data, privacy. The model is saved with its tokenizer, and ε is reported."""
    config = {**PRIVACY, "noise_multiplier": 1.0}
    run = made(tmp_path, folder, texts(), privacy=config, peft_config=LORA)
    assert isinstance(run.model, PeftModel) and run.privacy == PrivacyConfig(**config)
    run.train()
    run.save_model()
    assert run.epsilon > 0 and (tmp_path / "tokenizer.json").exists() and (tmp_path / "adapter_config.json").exists()
    assert len(read_ledger(tmp_path / "privacy_ledger.jsonl").history) == 1


CASES = {
    "text": ({"text": text} for text in TEXTS),
    "prompt_completion": ({"prompt": text, "completion": " a red house"} for text in TEXTS),
    "chat": (
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "the dog"}]} for text in TEXTS
    ),
}
CASES = {name: list(rows) for name, rows in CASES.items()}


@pytest.mark.parametrize("form", CASES)
def test_rows_of_raw_columns_are_those_of_a_recipe(tmp_path, folder, tokenizer, form):
    """The same function makes them, from a table, from a list and from rows that are computed as they are read."""

    class Computed(torch.utils.data.Dataset):
        def __len__(self):
            return len(CASES[form])

        def __getitem__(self, number):
            return CASES[form][number]

    records = Dataset.from_list(CASES[form])
    wanted = tokenize_records(records, tokenizer, DataConfig(path="x", max_length=64, format=form))
    for number, rows in enumerate((records, CASES[form], Computed())):
        run = made(tmp_path / str(number), folder, rows, processing_class=tokenizer, eval_dataset={"a": rows})
        assert run.train_dataset.to_list() == wanted.to_list() == run.eval_dataset["a"].to_list()
        assert run.plan.num_units == len(TEXTS)


def longer(row):
    """Another record: every text in it is longer than those of all other rows."""
    if isinstance(row, str):
        return "seven clouds over the old bridge and one man " * 3
    if isinstance(row, dict):
        return {key: value if key in ("role", "label") else longer(value) for key, value in row.items()}
    return [longer(one) for one in row]


def head(folder):
    config = tiny_llama_config(vocab_size=320, num_labels=2, num_hidden_layers=1, pad_token_id=None)
    model = LlamaForSequenceClassification(config)
    model.config.pad_token_id = 0
    return model


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("text", {}),
        ("chat", {}),
        ("prompt_completion", {"peft_config": LORA}),
        ("text", {"model_init": LlamaForCausalLM.from_pretrained}),
        ("classes", {}),
    ],
    ids=["text", "chat", "peft_config", "model_init", "string labels"],
)
def test_neighbours_move_the_sum_by_at_most_2_c(tmp_path, folder, tokenizer, form, more):
    """One record is replaced by a longer one. q = 1, no noise, SGD with lr 1: the weights move by the sum over b."""
    rows = CASES[form] if form in CASES else [{"text": t, "label": ("no", "yes")[n % 2]} for n, t in enumerate(TEXTS)]
    if "model_init" in more:
        more = {"model_init": functools.partial(more["model_init"], folder)}
    torch.manual_seed(0)
    state = head(folder).state_dict() if form == "classes" else None
    ends = []
    for name, first in (("a", rows[0]), ("b", longer(rows[0]))):
        model = None if "model_init" in more else folder
        data = None
        if state is not None:
            model, data = head(folder), {"class_names": ["no", "yes"]}
            model.load_state_dict(state)
        run = made(tmp_path / name, model, [first, *rows[1:]], processing_class=tokenizer, data=data, **more)
        start = weights(run.model)
        run.train()
        assert 0 < float((weights(run.model) - start).norm()) <= 0.01 * (1 + 1e-5)
        ends.append((start, weights(run.model)))
    assert torch.equal(ends[0][0], ends[1][0])  # the seed of the arguments makes new weights
    assert 0 < float((ends[0][1] - ends[1][1]).norm()) <= 2 * 0.01 / 6 * (1 + 1e-4)


@kills(
    "the ids of users are lost when raw columns become rows",
    "dpllm/training/trainer.py",
    'keep = [privacy.unit] if privacy.protects == "user" and privacy.unit else []',
    "keep = []",
)
def test_users_of_raw_rows_are_units(tmp_path, folder):
    """Their ids travel with the rows; a long record that is cut is one unit."""
    rows = texts().add_column("who", [1, 1, 2, 2, 3, 3])
    config = {**PRIVACY, "unit": "who", "max_rows_per_unit": 2, "expected_batch_size": 2}
    run = made(tmp_path, folder, rows, privacy={**config, "delta": 1e-2})
    assert run.plan.num_units == 3 and run.train_dataset["who"] == [1, 1, 2, 2, 3, 3]
    split = {"max_length": 4, "long_records": "split"}
    cut = made(tmp_path, folder, texts(), data=split)
    assert cut.plan.num_units == 6 < len(cut.train_dataset)
    with pytest.raises(ConfigError, match="makes several"):
        made(tmp_path, folder, rows, privacy={**config, "delta": 1e-2, "sampling": "example"}, data=split)
    own = Dataset.from_list([{"text": text, "record": 0} for text in TEXTS])
    assert made(tmp_path, folder, own).plan.num_units == 6  # a column of the user's own, and not the number of a record


def test_rows_that_a_function_makes_are_read_as_it_makes_them(tmp_path, folder):
    """Not as they are stored."""
    rows = texts()
    rows.set_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    upper = made(tmp_path, folder, [{"text": text.upper()} for text in TEXTS]).train_dataset
    assert made(tmp_path, folder, rows).train_dataset.to_list() == upper.to_list()


def test_a_private_run_is_no_public_start_by_its_name(tmp_path, folder):
    """Its ledger is found in the folder, also by the tokenizer's way in."""
    run = made(tmp_path / "first", folder, texts())
    run.train()
    run.save_model()
    with pytest.raises(ConfigError, match="run does"):
        made(tmp_path / "second", str(tmp_path / "first"), texts())


def test_a_search_for_hyperparameters_is_refused(tmp_path, folder):
    """Each of its trainings costs privacy."""
    with pytest.raises(ConfigError, match="trains many"):
        made(tmp_path, folder, texts()).hyperparameter_search(n_trials=2)


def test_own_names_of_columns(tmp_path, folder):
    """The keys of a recipe's section data, with its errors."""
    rows = texts().rename_column("text", "note")
    run = made(tmp_path, folder, rows, data={"columns": {"text": "note"}, "max_length": 5})
    assert max(len(ids) for ids in run.train_dataset["input_ids"]) == 5
    with pytest.raises(ConfigError, match="causal_lm learns"):
        made(tmp_path, folder, rows)
    with pytest.raises(ConfigError, match=r"columns\.txt'; did you mean 'text'"):
        made(tmp_path, folder, rows, data={"columns": {"txt": "note"}})
    with pytest.raises(ConfigError, match=r"pass PrivacyConfig\(unit"):
        made(tmp_path, folder, rows, data={"columns": {"text": "note", "unit": "who"}})
    with pytest.raises(ConfigError, match="key 'path"):
        made(tmp_path, folder, rows, data={"path": "notes.jsonl"})
    by_user = {**PRIVACY, "unit": "nte", "max_rows_per_unit": 2}
    with pytest.raises(DataError, match=r"note'\?"):
        made(tmp_path, folder, rows.add_column("who", ["a"] * 6), privacy=by_user, data={"columns": {"text": "note"}})
    with pytest.raises(ConfigError, match="type str"):
        made(tmp_path, folder, rows, data="note")
    both = rows.add_column("messages", [CASES["chat"][0]["messages"]] * 6)
    with pytest.raises(ConfigError, match=r"data=\{'format"):
        made(tmp_path, folder, both, data={"columns": {"text": "note"}})
    with pytest.raises(ValueError, match="column 'messages"):  # and not that there is no record
        made(tmp_path, folder, rows, data={"format": "chat"})
    tokenized = made(tmp_path, folder, rows, data={"columns": {"text": "note"}}).train_dataset
    with pytest.raises(ConfigError, match="train_dataset"):
        made(tmp_path, folder, tokenized, data={"columns": {"text": "note"}})


MISTAKES = {
    "no tokenizer": ({"processing_class": None}, "columns text but no 'input_ids'"),
    "tokenizer as a name": ({"processing_class": "gpt2"}, r"processing_class is the string 'gpt2': pass the tokenizer"),
    "processor": ({"processing_class": object()}, "processing_class is of type object"),
    "no arguments": ({"args": None}, r"args is missing: pass transformers\.TrainingArguments\(output_dir="),
    "arguments as a dictionary": ({"args": {"output_dir": "x"}}, "args is of type dict"),
    "no privacy": ({"privacy": None}, r"privacy is missing: pass dpllm\.PrivacyConfig\(epsilon="),
    "no guarantee": ({"privacy": 8}, "privacy is of type int"),
    "misspelt": (
        {"privacy": {**PRIVACY, "epsilom": 8}},
        "unknown key 'privacy.epsilom'; did you mean 'privacy.epsilon'",
    ),
    "missing": ({"privacy": {"clip_norm": 1.0}}, "give epsilon or noise_multiplier"),
    "value": ({"privacy": {**PRIVACY, "clip_norm": -1}}, r"privacy\.clip_norm must be at least 1e-12, got -1"),
    "no data": ({"train_dataset": None}, "train_dataset is missing: pass rows"),
    "texts": (
        {"train_dataset": TEXTS},
        r"Row 0 of train_dataset is a string, .* \[\{'text': text\} for text in texts\]",
    ),
    "evaluation texts": ({"eval_dataset": TEXTS}, "Row 0 of eval_dataset is a string"),
    "stream": (
        {"train_dataset": Dataset.from_list(CASES["text"]).to_iterable_dataset()},
        r"of type IterableDataset.* draw from all N units at random.*Dataset\.from_list\(list\(stream\)\)",
    ),
    "columns differ": (
        {"train_dataset": [{"text": "a dog"}, {"note": "b"}]},
        "row 1 has no column 'text', only note",
    ),
    "kinds differ": (
        {"train_dataset": [{"text": "a dog"}, {"text": 7}]},
        "'text' .* holds text in row 0 and a whole number in",
    ),
    "pairs": (
        {"train_dataset": [{"prompt": "a", "chosen": "dog", "rejected": "man"}]},
        "two answers for each prompt. Use dpllm.DPDPOTrainer",
    ),
    "no text": ({"train_dataset": [{"text": 7}]}, "train_dataset: column 'text' holds int64"),
    "collator": ({"data_collator": list}, "raw columns, .* but a data_collator"),
    "two models": ({"model_init": list}, "give exactly one of model and model_init, got both"),
    "adapter": ({"peft_config": {"r": 2}}, r"peft_config is of type dict: pass .*LoraConfig"),
    "module": ({"peft_config": LoraConfig(target_modules=["query"])}, "peft_config: target_modules names 'query'"),
    "from data": (
        {"peft_config": LoraConfig(target_modules=["q_proj"], init_lora_weights="corda", corda_config=CordaConfig())},
        "peft_config: init_lora_weights='corda' starts from statistics of the private data",
    ),
    "names without classes": ({"data": {"class_names": ["a", "b"]}}, "names classes, but a LlamaForCausalLM has none"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_have_a_remedy(tmp_path, folder, name):
    """One line, before anything is trained or written."""
    changes, says = MISTAKES[name]
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with pytest.raises((ConfigError, DataError), match=says) as error:
        made(tmp_path / "run", model, **{"rows": texts(), "processing_class": tokenizer, **renamed(changes)})
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def renamed(changes):
    return {"rows" if key == "train_dataset" else key: value for key, value in changes.items()}


def test_a_second_adapter_is_refused(tmp_path, folder):
    """PEFT would stack them."""
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder), copy.deepcopy(LORA))
    with pytest.raises(ConfigError, match="peft_config"):
        made(tmp_path, model, texts(), peft_config=LORA)
    with pytest.raises(ConfigError, match="peft_config"):
        made(tmp_path, {"name": folder, "adapter": {"r": 2}}, texts(), peft_config=LORA)


def test_a_model_is_loaded_for_a_task(tmp_path, folder):
    """That it was saved for, or another one that is named; classes are named, never counted."""
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(TEXTS)]
    with pytest.raises(ConfigError, match="public facts"):
        made(tmp_path, {"name": folder, "task": "sequence_classification"}, rows)
    model = {"name": folder, "task": "sequence_classification"}
    run = made(tmp_path, model, rows, data={"class_names": ["no", "yes"]})
    assert type(run.model) is LlamaForSequenceClassification and run.model.config.id2label == {0: "no", 1: "yes"}
    assert run.model.config.label2id == {"no": 0, "yes": 1} and run.train_dataset["labels"] == [0, 1] * 3
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=320, **sizes)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="BertForMaskedLM"):
        made(tmp_path, str(tmp_path / "bert"), rows)


def test_string_labels_have_the_numbers_of_their_names(tmp_path, folder, tokenizer):
    """Names of the caller or of the model; without names they are refused, never collected from the rows."""
    words = [("no", "yes")[n % 2] for n in range(6)]
    raw = [{"text": text, "label": word} for text, word in zip(TEXTS, words, strict=True)]
    ids = [{"input_ids": tokenizer(text)["input_ids"], "label": word} for text, word in zip(TEXTS, words, strict=True)]
    named = head(folder)
    named.config.id2label, named.config.label2id = {0: "yes", 1: "no"}, {"yes": 0, "no": 1}
    for rows in (raw, ids, Dataset.from_list(raw), Dataset.from_list(ids)):
        column = "labels" if "text" in rows[0] else "label"
        run = made(tmp_path, head(folder), rows, processing_class=tokenizer, data={"class_names": ["no", "yes"]})
        assert [row[column] for row in run.train_dataset] == [0, 1] * 3
        run = made(tmp_path, named, rows, processing_class=tokenizer)
        assert [row[column] for row in run.train_dataset] == [1, 0] * 3
        with pytest.raises(DataError, match=r"is text|is not a number"):
            made(tmp_path, head(folder), rows, processing_class=tokenizer).train()
        with pytest.raises(ConfigError, match="LABEL_0"):
            made(tmp_path, head(folder), rows, data={"class_names": ["a", "b", "c"]}, processing_class=tokenizer)
        with pytest.raises(DataError, match=r"data\.class_names"):
            made(tmp_path, head(folder), rows, data={"class_names": ["a", "no"]}, processing_class=tokenizer)


@kills(
    "the function that makes the model may read the private rows",
    "dpllm/models/model_argument.py",
    "if any(_is_one_of(value, private) for value in _read_by(model_init)):",
    "if False:",
)
def test_model_init_is_called_once_and_may_not_read_the_data(tmp_path, folder):
    """Its weights would depend on rows; and a second call would make another model than the checked one."""
    calls, rows = [], texts()

    def init():
        calls.append(1)
        return LlamaForCausalLM.from_pretrained(folder)

    run = made(tmp_path / "a", None, rows, model_init=init, processing_class=AutoTokenizer.from_pretrained(folder))
    run.train()
    assert calls == [1]
    run.model_init = init
    with pytest.raises(ConfigError, match="model_init"):
        run.train()

    def helper():
        return [len(row["text"]) for number in range(1) for row in rows]

    def reads():
        return helper() and LlamaForCausalLM.from_pretrained(folder)

    readers = [
        reads,
        lambda: next(LlamaForCausalLM.from_pretrained(folder) for row in rows),
        lambda own=rows: LlamaForCausalLM.from_pretrained(folder),
        functools.partial(lambda own: LlamaForCausalLM.from_pretrained(folder), rows),
    ]
    for reader in readers:
        with pytest.raises(ConfigError, match="model_init"):
            made(tmp_path / "b", None, rows, model_init=reader)
    with pytest.raises(ConfigError, match="model_init"):
        made(tmp_path / "b", None, rows, model_init=lambda trial: init())
    with pytest.raises(ConfigError, match="model_init"):
        made(tmp_path / "b", None, rows, model_init=lambda: None)
    with pytest.raises(ConfigError, match="model_init"):
        made(tmp_path / "b", None, rows, model_init=7)


def accuracy(prediction):
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != -100].mean())}


@kills(
    "functions for metrics that see private rows within training are not an open point",
    "dpllm/training/trainer_outputs.py",
    "for name in own_metrics(self):",
    "for name in ():",
)
@pytest.mark.parametrize("public", [False, True])
def test_metrics_are_computed_and_counted(tmp_path, folder, public):
    """On private rows each evaluation is a disclosure; on rows that are declared public none is."""
    seen = []

    def best(logits, labels):
        seen.append(logits.shape)
        return logits.argmax(-1)

    run = made(
        tmp_path,
        folder,
        texts(),
        args=options(tmp_path, eval_strategy="steps", eval_steps=1, logging_strategy="no"),
        eval_dataset=[{"text": "the red house sees a dog"}] * 2,
        eval_is_public=public,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best,
    )
    run.train()
    assert 0 <= run.evaluate()["eval_accuracy"] <= 1 and seen[0][-1] == run.model.config.vocab_size
    assert run.predict([{"text": "a dog"}]).metrics["test_accuracy"] >= 0
    counted = read_ledger(run.ledger.path).disclosures
    assert counted.get("evaluation during training", 0) == (not public)
    assert counted.get("evaluation on private rows, before or after training", 0) == (not public)
    assert counted["predictions on private rows"] == 1
    points = [point for point in run.privacy_report()["open_points"] if "computes metrics during training" in point]
    assert [point.split()[2] for point in points] == ([] if public else ["accuracy", best.__qualname__])


@pytest.mark.parametrize("name", ["compute_metrics", "preprocess_logits_for_metrics"])
def test_functions_for_metrics_cannot_change_the_weights(tmp_path, folder, name):
    """They have seen exact outputs of private rows."""

    def changes(*outputs):
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(0.01)
        return outputs[0] if name != "compute_metrics" else {"one": 1.0}

    args = options(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    functions = {"compute_metrics": lambda prediction: {"one": 1.0}, name: changes}
    run = made(tmp_path, folder, texts(), args=args, eval_dataset=texts(), **functions)
    with pytest.raises(WatchError, match="written between"):
        run.train()


@pytest.mark.parametrize(
    "name", ["compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "data_collator"]
)
def test_a_word_in_the_place_of_a_function_is_refused_by_the_constructor(tmp_path, folder, name):
    """And not by the first evaluation, after the steps were charged."""
    with pytest.raises(ConfigError, match=f"{name} is 'accuracy', which cannot be called: pass a function"):
        made(tmp_path, folder, texts(), **{name: "accuracy"})


def test_metrics_steer_nothing_on_private_rows(tmp_path, folder):
    """The best checkpoint by a metric on private rows is a choice that no ε covers."""
    args = options(
        tmp_path, save_strategy="best", metric_for_best_model="accuracy", eval_strategy="steps", eval_steps=1
    )
    with pytest.raises(ConfigError, match="follows exact"):
        made(tmp_path, folder, texts(), args=args, eval_dataset=texts(), compute_metrics=accuracy)


@kills(
    "raw rows that are set later are not compared with the private rows",
    "dpllm/training/trainer.py",
    "        self._make_later_rows()\n",
    "",
)
def test_raw_rows_of_the_training_are_not_declared_public(tmp_path, folder):
    """They are compared as rows, also where they are set later."""
    raw = texts()
    with pytest.raises(DataError, match="train_dataset"):
        made(tmp_path, folder, raw, eval_dataset=texts(), eval_is_public=True)
    run = made(tmp_path, folder, raw, eval_dataset=[{"text": "seven clouds"}], eval_is_public=True)
    for later in (raw, texts(), list(raw)):
        run.eval_dataset = later
        with pytest.raises(DataError, match="train_dataset"):
            run.train()


def test_evaluation_streams_and_other_rows_pass_unchanged(tmp_path, folder):
    """As `Trainer` evaluates them."""
    stream = made(tmp_path, folder, texts()).train_dataset.to_iterable_dataset()
    run = made(tmp_path, folder, texts(), eval_dataset=stream)
    assert run.eval_dataset is stream and np.isfinite(run.evaluate()["eval_loss"])


def test_a_list_of_labels_that_are_whole_numbers_here_and_fractions_there_is_refused(folder):
    """A table would write 1 as 1.0; in a file of JSON, each record's value is read by itself."""
    own = [{"text": "a dog", "label": 1}, {"text": "a man", "label": 0.5}]
    maker = RowMaker(AutoTokenizer.from_pretrained(folder), "regression", num_labels=1)
    with pytest.raises(DataError, match="'label' of train_dataset holds a whole number in row 0 and a fraction in row"):
        maker.rows(own, "train_dataset")
    own[0]["label"] = 1.0
    assert maker.rows(own, "train_dataset")["labels"][:] == [[1.0], [0.5]]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("tokenizer", "processing_class"),
        ("formatting_func", "train_dataset.map"),
        ("max_seq_length", "max_length"),
        ("packing", "pack_rows"),
        ("learning_rate", "TrainingArguments"),
        ("data_colator", "data_collator"),
        ("dataset", "no argument"),
    ],
)
def test_an_argument_of_another_trainer_is_refused_with_its_place_here(option, says, folder, tmp_path):
    """TypeError, as Python's, and where the argument belongs."""
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True)
    with pytest.raises(TypeError, match=says) as caught:
        DPTrainer(
            folder,
            args,
            PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=4),
            Dataset.from_dict({"text": TEXTS}),
            **{option: 1},
        )
    assert option in str(caught.value)


def train_a_step(model, tokenizer, folder):
    args = TrainingArguments(str(folder), max_steps=1, use_cpu=True, report_to="none")
    privacy = PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=4)
    DPTrainer(model, args, privacy, Dataset.from_dict({"text": TEXTS}), processing_class=tokenizer).train()


def test_a_compiled_model_is_refused_by_its_name(folder, tokenizer, tmp_path):
    """Not by the missing loss of its wrapper, and not by an assertion of the compiler."""
    model = torch.compile(LlamaForCausalLM.from_pretrained(folder), backend="eager")
    with pytest.raises(ValueError, match=r"torch\.compile"):
        train_a_step(model, tokenizer, tmp_path)


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft_n_butterfly_factor")
def test_an_adapter_of_any_class_trains(folder, tokenizer, tmp_path):
    """BOFT once ended in an error of a matrix product; its layers run row by row."""
    adapter = BOFTConfig(boft_block_size=4, target_modules=["q_proj"])
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder), adapter)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    train_a_step(model, tokenizer, tmp_path)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
