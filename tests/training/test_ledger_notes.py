"""What only people know about a run is asked, and strings of its data are compared before a publication."""

import json
import logging
import stat

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from dpllm import DPDPOTrainer, DPSFTTrainer, DPTrainer, per_sequence_loss
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.private_folder import PRIVATE_FOLDER
from dpllm.report.disclosures import EVALUATION_OUTSIDE
from dpllm.report.model_card import add_notes, settle
from dpllm.report.publishing import PublishError, published_files, require_publishable
from dpllm.report.verify import verify
from tests.conftest import tiny_llama_config
from tests.small_model import WORDS, save_small_model
from tests.training.test_trainer import rows

pytestmark = pytest.mark.usefixtures("rows_not_compared")

TEXTS = [" ".join(WORDS[number % 7 : number % 7 + 4]) for number in range(24)]
RARE = "Creutzfeldt-Jakob (Anna K.)"
PRIVACY = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 8, "delta": 1e-3, "dataset": "words"}
USERS = {"unit": "patient", "max_rows_per_unit": 4, "expected_batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16))


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def options(folder, **changes):
    settings = {"max_steps": 1, "per_device_train_batch_size": 8, "report_to": "none", "use_cpu": True}
    settings |= {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "learning_rate": 0.1}
    return TrainingArguments(output_dir=str(folder / "run"), **{**settings, **changes})


def trained(folder, model, dataset, kind=DPTrainer, args=None, privacy=(), **more):
    run = kind(model, args or options(folder), {**PRIVACY, **dict(privacy)}, dataset, **more)
    run.train()
    return run


def asked(run):
    """The question about the time before the run; None: it is not asked."""
    points = [point for point in run.privacy_report()["open_points"] if "before the run" in point]
    return points[0] if points else None


def bert(kind=BertForSequenceClassification, **values):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes, **values))


def labelled(labels):
    ids = [[2 + (number + place) % 60 for place in range(5)] for number in range(len(labels))]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def mean_loss(outputs, labels):
    return per_sequence_loss(outputs.logits, labels) / 3.7


def padded(examples):
    width = max(len(one["input_ids"]) for one in examples)
    ids = torch.tensor([one["input_ids"] + [0] * (width - len(one["input_ids"])) for one in examples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.where(ids == 0, -100, ids)}


NAMES = {"id2label": {0: "lupus", 1: "gout"}, "label2id": {"lupus": 0, "gout": 1}}
ASKED = {
    "classes by number": (lambda: bert(num_labels=2), [0, 1] * 12, {}, "class weights"),
    "named classes": (lambda: bert(**NAMES), [0, 1] * 12, {}, "names of the classes in config.json"),
    "tags": (lambda: bert(BertForTokenClassification, num_labels=3), [[0, 1, 2, 0, 1]] * 24, {}, "class weights"),
    "several classes": (
        lambda: bert(num_labels=2, problem_type="multi_label_classification"),
        [[0.0, 1.0]] * 24,
        {},
        "class weights",
    ),
    "a regression": (lambda: bert(num_labels=1, problem_type="regression"), [0.5, -1.0] * 12, {}, "the targets"),
    "an own loss": (None, None, {"compute_loss_func": mean_loss}, "the loss mean_loss"),
    "an own collator": (None, None, {"data_collator": padded}, "the collator padded"),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_was_computed_before_the_run_is_asked_where_the_run_has_a_place_for_it(tmp_path, name):
    """One open point that names what applies; one note clears it, and the report shows the answer."""
    make, labels, more, words = ASKED[name]
    model = LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1)) if make is None else make()
    run = trained(tmp_path, model, rows(24) if labels is None else labelled(labels), **more)
    assert words in asked(run)
    assert ("names of the classes" in asked(run)) == (name == "named classes")
    report = add_notes(tmp_path / "run", {"preprocessing": "none"})
    assert not any("before the run" in point for point in report.open_points)
    assert "before the run: none" in (tmp_path / "run" / "privacy_report.md").read_text(encoding="utf-8")


def test_plain_texts_and_chats_with_the_tokenizer_of_the_base_are_not_asked(tmp_path, folder, tokenizer):
    """By the model's name, by the model and its tokenizer, with a collator of transformers, and by SFT."""
    base = LlamaForCausalLM.from_pretrained(folder)
    data = Dataset.from_dict({"text": TEXTS})
    assert asked(trained(tmp_path / "name", folder, data)) is None
    assert asked(trained(tmp_path / "model", base, data, processing_class=tokenizer)) is None
    tokens = [{"input_ids": ids, "labels": ids} for ids in tokenizer(TEXTS)["input_ids"]]
    more = {"processing_class": tokenizer, "data_collator": DataCollatorForLanguageModeling(tokenizer, mlm=False)}
    assert asked(trained(tmp_path / "own", folder, [{"input_ids": one["input_ids"]} for one in tokens], **more)) is None
    from trl import SFTConfig

    args = SFTConfig(**{**options(tmp_path / "sft").to_dict(), "bf16": False, "max_length": 16, "eos_token": None})
    assert asked(trained(tmp_path / "sft", folder, data, DPSFTTrainer, args)) is None


def test_rows_padded_to_one_length_are_no_blocks(tmp_path, folder):
    """Their masks name the padding; rows without any may be blocks."""

    def doubted(name, masks):
        data = [{"input_ids": [2 + number, 3, 4, 5, 6, 7], "attention_mask": mask} for number, mask in enumerate(masks)]
        return [p for p in trained(tmp_path / name, folder, data).privacy_report()["open_points"] if "blocks" in p]

    assert not doubted("padded", [[1] * length + [0] * (6 - length) for length in (3, 4, 5, 6) * 6])
    assert doubted("blocks", [[1] * 6] * 24)


def test_a_tokenizer_of_other_tokens_than_the_base_is_asked(tmp_path, folder, tokenizer):
    """Trained in the program, or with tokens that were added."""
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer.add_tokens(["zebrafish"])
    model.resize_token_embeddings(len(tokenizer))
    data = Dataset.from_dict({"text": TEXTS})
    assert "added to the tokenizer" in asked(trained(tmp_path / "added", model, data, processing_class=tokenizer))
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Tokenizer(models.WordLevel({"<unk>": 0, **{word: n for n, word in enumerate(WORDS, 1)}}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", pad_token="<unk>", eos_token="<unk>")
    other = LlamaForCausalLM.from_pretrained(folder)
    assert "vocabulary" in asked(trained(tmp_path / "own", other, data, processing_class=fast))


def pushed(run, folder):
    """Try to publish; return why not."""
    run.save_model()
    try:
        require_publishable(folder / "run", force_open_points=True)
    except PublishError as error:
        return str(error)
    return None


@pytest.mark.parametrize("given", ["text", "tokens", "class_label"])
def test_a_rare_label_in_the_configuration_is_not_published(tmp_path, folder, tokenizer, given):
    """Names of classes that were collected from the labels; declared ones are public."""
    labels = ["healthy"] * 23 + [RARE]
    names = sorted(set(labels))
    model = LlamaForSequenceClassification.from_pretrained(
        folder, id2label=dict(enumerate(names)), label2id={name: n for n, name in enumerate(names)}, pad_token_id=0
    )
    data = Dataset.from_dict({"text": TEXTS, "label": labels})
    if given == "class_label":
        data = data.cast(Features({"text": Value("string"), "label": ClassLabel(names=names)}))
    if given == "tokens":
        data = labelled(labels)
    run = trained(tmp_path, model, data, processing_class=tokenizer)
    words = pushed(run, tmp_path)
    assert "config.json (id2label)" in words and "Anna" not in words
    assert not verify(tmp_path / "run").ok
    add_notes(tmp_path / "run", {"preprocessing": f"{RARE} is a class of the public code book"})
    assert pushed(run, tmp_path) is None


def test_declared_names_of_classes_are_public(tmp_path, folder):
    """They are no finding, however rare, and the definition says that they are public."""
    data = Dataset.from_dict({"text": TEXTS, "label": ["gout"] * 23 + ["lupus"]})
    model = {"name": folder, "task": "sequence_classification"}
    run = trained(tmp_path, model, data, data={"class_names": ["gout", "lupus"]})
    assert pushed(run, tmp_path) is None
    assert any("classes" in line for line in run.privacy_report()["definition"]["public"])
    assert "names of the classes in config.json" not in asked(run)


def test_the_id_of_a_user_in_the_tokenizer_is_not_published(tmp_path, folder, tokenizer):
    """Speakers as tokens are usual in fine-tuning of dialogues."""
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer.add_tokens(["<marie.curie>"])
    model.resize_token_embeddings(len(tokenizer))
    data = Dataset.from_dict({"text": TEXTS, "patient": ["marie.curie", "l.meitner", "e.noether"] * 8})
    run = trained(tmp_path, model, data, privacy=USERS, processing_class=tokenizer)
    words = pushed(run, tmp_path)
    assert "token" in words and "marie" not in words


def test_an_ordinary_run_is_published_and_all_its_texts_are_compared(tmp_path, folder):
    """No word of the files is that of an id or a label by chance, and each text file is read."""
    who = [f"user_{number % 12}" for number in range(24)]
    data = Dataset.from_dict({"text": TEXTS, "patient": who, "label": ["positive", "negative"] * 12})
    run = trained(tmp_path, folder, data, privacy=USERS, data={"format": "text"})
    assert pushed(run, tmp_path) is None
    check = next(one for one in verify(tmp_path / "run").checks if "unit id" in one.what)
    assert check.passed
    for name in published_files(tmp_path / "run"):
        path = tmp_path / "run" / name
        if path.suffix in (".safetensors",) or path.name in ("vocab.json", "merges.txt"):
            continue
        if path.name == "check_epsilon.py":  # a text of dpllm alone, which is held to its hash
            continue
        before = path.read_bytes()
        path.write_bytes(before + b' user_7"')
        found = [one for one in verify(tmp_path / "run").checks if "unit id" in one.what and not one.ok]
        assert found and name in found[0].detail
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("column", "ids"),
    [
        ("patient_id", ["a", "b"] * 12),
        ("PatientID", list(range(12)) * 2),
        ("Customer No", [f"{n % 12:03d}-45-6789" if n < 12 else f"{n % 12:03d}456789" for n in range(24)]),
        ("author", ["José", "Jose", *(f"x{n}" for n in range(22))]),
        ("ssn", [f"12345678{n % 9}" for n in range(24)]),
        ("subject", [f"sub-{n % 12:02d}" for n in range(24)]),  # of a study
        ("user_id", [None, *(float(n % 9) for n in range(23))]),  # as pandas writes numbers beside a missing one
        ("author", ["Maria del Carmen Lopez", "Gabriel García Márquez"] * 12),
    ],
)
def test_records_of_one_person_are_an_open_point_where_units_are_records(tmp_path, folder, column, ids):
    """The words of the report would mislead; a statement settles it, or user-level units."""
    data = Dataset.from_dict({"text": TEXTS, column: ids})
    report = trained(tmp_path, folder, data).privacy_report()
    points = [point for point in report["open_points"] if "one by one" in point]
    assert len(points) == 1 and f"'{column}'" in points[0]
    settled = settle(tmp_path / "run", {points[0]: "single records are meant"}, "A. Meyer")
    assert not any("one by one" in point for point in settled.open_points)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("patient_id", list(range(24))),  # each once
        ("customer", ["yes", "no"] * 12),  # a flag
        ("user", ["What is the weather in the town where you live, and how will it be tomorrow and on Sunday?"] * 24),
        ("message_id", [1, 2] * 12),
        ("subject", ["Re: your order", "Meeting tomorrow"] * 12),  # of e-mails
        ("Subject", ["biology", "high_school_physics"] * 12),  # of lessons
        ("user", ["ok", "Hi", *(f"Can you tell me what the weather is in {n}?" for n in range(21)), "hi"]),  # of a chat
        ("customer", [None, None, *range(22)]),
        ("score", [1, 2] * 12),
    ],
)
def test_other_columns_are_no_people(tmp_path, folder, column, values):
    """Ids that never repeat, flags, texts of a user, and columns of other things."""
    run = trained(tmp_path, folder, Dataset.from_dict({"text": TEXTS, column: values}))
    assert not any("one by one" in point for point in run.privacy_report()["open_points"])


def test_user_level_units_need_no_such_point(tmp_path, folder):
    """All records of a person are one unit there."""
    data = Dataset.from_dict({"text": TEXTS, "patient": ["a", "b", "c", "d"] * 6})
    run = trained(tmp_path, folder, data, privacy=USERS)
    assert not any("one by one" in point for point in run.privacy_report()["open_points"])


def test_pairs_chosen_by_scores_are_asked(tmp_path, folder, tokenizer):
    """Thresholds of rewards may be of all pairs; pairs without scores are not asked."""
    from trl import DPOConfig

    pairs = {"prompt": TEXTS, "chosen": [" the dog"] * 24, "rejected": [" a cat"] * 24}
    for name, more, words in (("plain", {}, None), ("scored", {"score_chosen": [0.5] * 24}, "'score_chosen'")):
        args = DPOConfig(**{**options(tmp_path / name).to_dict(), "bf16": False, "max_length": 16})
        run = trained(tmp_path / name, folder, Dataset.from_dict({**pairs, **more}), DPDPOTrainer, args)
        assert (asked(run) is None) if words is None else (words in asked(run))


def test_nothing_private_is_printed_or_left_readable(tmp_path, folder, caplog):
    """At user level the number of rows is private; the folder for private files is the owner's."""
    data = Dataset.from_dict({"text": TEXTS, "patient": ["a", "b", "c"] * 8})
    logging.getLogger("transformers").propagate = True
    args = options(tmp_path, log_level="info")
    with caplog.at_level("INFO"):
        trained(tmp_path, folder, data, privacy=USERS, args=args)
    lines = [line for line in caplog.text.splitlines() if "Num examples" in line]
    assert lines and not any("24" in line for line in lines)
    assert stat.S_IMODE((tmp_path / "run" / PRIVATE_FOLDER).stat().st_mode) == 0o700


def test_an_evaluation_loop_that_a_program_calls_is_counted(tmp_path, folder):
    """Once, as an evaluation that it is; those within evaluate() and predict() count once as well."""
    data = Dataset.from_dict({"text": TEXTS})
    run = trained(tmp_path, folder, data, eval_dataset=data)
    run.evaluation_loop(run.get_eval_dataloader(), "mine")
    assert read_ledger(run.ledger.path).disclosures[EVALUATION_OUTSIDE] == 1
    run.evaluate()
    assert read_ledger(run.ledger.path).disclosures[EVALUATION_OUTSIDE] == 2
    run.predict(data)
    assert read_ledger(run.ledger.path).disclosures[EVALUATION_OUTSIDE] == 2


def test_missing_labels_leave_no_trace_in_published_files(tmp_path):
    """A label that is NaN is a row without a finite gradient: no file to publish and no open point says so."""
    told = []
    for labels in ([0.5] * 24, [float("nan"), *([0.5] * 23)]):
        place = tmp_path / str(len(told))
        model = bert(num_labels=1, problem_type="regression")
        run = trained(place, model, labelled(labels), privacy={"expected_batch_size": 24})
        run.save_model()
        kinds = [json.loads(line)["kind"] for line in (place / "run" / "privacy_ledger.jsonl").read_text().splitlines()]
        told.append((kinds, run.privacy_report()["open_points"]))
    assert told[0] == told[1]
