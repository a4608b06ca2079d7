"""Tests of dpllm.report.model_card."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from dpllm.config import PrivacyConfig
from dpllm.mechanism.discrete import DiscreteStep
from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.checkpoints import MANIFEST_FILE
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.privacy.rounding import format_epsilon
from dpllm.report.model_card import CARD_FILE, TAGS, add_notes, own_lines, settle, write_model_card
from dpllm.report.models import PrivacyReport, day_in_words
from dpllm.report.statement import JSON_FILE, ReleaseNotes, write_report
from dpllm.report.verify import other_claims, verify

IDS = torch.tensor([[1, 5, 6, 2]])


def evidence(
    folder: Path, notes: ReleaseNotes | None = None, end: str | None = "completed", **change: Any
) -> PrivacyReport:
    """Write plan, ledger and report of a run into a folder, and return the report."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, **change}
    plan = make_plan(PrivacyConfig(**config), num_units=1000, num_steps=20)
    plan.save(folder / PLAN_FILE)
    with Ledger.create(folder / LEDGER_FILE, plan, public=["starting weights: org/base"]) as ledger:
        for number in range(20):
            ledger.append_step(number, plan.event)
        ledger.append_disclosure("training loss", 4)
        ledger.append_diagnostic("units with a non-finite gradient", 3)
        if end:
            ledger.append_end(end)
        return write_report(folder, plan, ledger, notes)


def llama(hidden_size: int = 16) -> LlamaForCausalLM:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, hidden_size=hidden_size, **sizes)).eval()


def bert(num_labels: int) -> BertForSequenceClassification:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=31, hidden_size=16, num_labels=num_labels, max_position_embeddings=16, **sizes)
    return BertForSequenceClassification(config).eval()


def t5() -> T5ForConditionalGeneration:
    config = T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


def logits(model: Any) -> torch.Tensor:
    is_t5 = getattr(model.config, "is_encoder_decoder", False)
    with torch.no_grad():
        return model.eval()(IDS, **({"decoder_input_ids": IDS} if is_t5 else {})).logits


def same(first: Any, second: Any) -> bool:
    """Whether two models compute the same, but for the rounding that memory layout decides."""
    return torch.allclose(logits(first), logits(second), rtol=1e-5, atol=1e-7)


def execute(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the card's code block in its folder, as a reader would, and return its variables."""
    [code] = re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(path.parent)
    variables: dict[str, Any] = {}
    exec(code, variables)
    return variables


def test_statement_and_numbers_are_those_of_the_report(tmp_path: Path) -> None:
    """Every sentence of the guarantee is the report's, ε is rounded up, and the evidence is linked."""
    report = evidence(tmp_path)
    card = ModelCard.load(write_model_card(tmp_path, report, base_model="org/base", task="causal_lm", adapter=False))
    assert report.statement.words in card.text and "NOT PRIVATE" not in card.text
    for line in (report.front.odds, report.front.numbers, *report.open_points, report.definition.unit):
        assert line in card.text
    for item in report.definition.never_covered:
        assert f"- {item.what}: {item.advice}" in card.text
    assert "- training loss: written out 4 times" in card.text
    for name, value in report.statement.epsilon_by_adjacency.items():
        assert f"| {name} | {format_epsilon(value)} |" in card.text
    for name in ("privacy_report.md", "privacy_report.html", "privacy_report.json", PLAN_FILE, LEDGER_FILE):
        assert f"[`{name}`]({name})" in card.text and (tmp_path / name).is_file()
    assert report.checkable.plan_hash in card.text and report.checkable.ledger_sha256 in card.text
    assert report.checkable.recompute_from_the_numbers in card.text
    assert not list(tmp_path.glob("*.tmp"))


def test_metadata(tmp_path: Path) -> None:
    """The Hub's keys, and the guarantee as a block of its own; unknown language and license are left out."""
    report = evidence(tmp_path)
    path = write_model_card(tmp_path, report, base_model="org/base", task="causal_lm", adapter=False)
    data = ModelCard.load(path).data.to_dict()
    privacy = data.pop("differential_privacy")
    assert data == {
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(TAGS),
    }
    epsilon = report.statement.epsilon
    assert privacy["private"] is True and epsilon <= privacy["epsilon"] < epsilon + 1e-4
    assert privacy["epsilon_by_adjacency"]["zero-out"] == privacy["epsilon"] == float(format_epsilon(epsilon))
    assert privacy["epsilon_by_adjacency"]["replace-one"] > privacy["epsilon"]
    assert (privacy["delta"], privacy["unit"], privacy["adjacency"]) == (1e-4, "record", "zero-out")
    assert (privacy["num_steps"], privacy["num_units"], privacy["noise_multiplier"]) == (20, 1000, 2.0)
    path = write_model_card(
        tmp_path,
        report,
        base_model=None,
        task="sequence_classification",
        adapter=True,
        num_labels=3,
        language="en",
        license="mit",
    )
    data = ModelCard.load(path).data
    assert (data.library_name, data.pipeline_tag, data.language) == ("peft", "text-classification", ["en"])
    assert (data.license, data.base_model, data["base_model_relation"]) == ("mit", "org/base", "adapter")


def test_metadata_of_correlated_noise_give_epsilon_again(tmp_path: Path) -> None:
    """ε is that of a few rounds over groups; the numbers of DP-SGD would give another one."""
    report = evidence(tmp_path, noise={"kind": "banded", "bands": 4})
    path = write_model_card(tmp_path, report, base_model=None, task="causal_lm", adapter=False)
    found = ModelCard.load(path).data["differential_privacy"]
    assert (found["bands"], found["rounds"], found["sampling_rate_of_a_round"]) == (4, 5, 0.08)
    one = Step(
        num_units=found["num_units_of_a_round"],
        sampling_rate=found["sampling_rate_of_a_round"],
        max_batch_size=found["max_batch_size"],
        noise_multiplier=found["noise_multiplier"],
    )
    assert float(format_epsilon(epsilon([(one, found["rounds"])], found["delta"]))) == found["epsilon"]
    plain = evidence(tmp_path / "plain")
    path = write_model_card(tmp_path / "plain", plain, base_model=None, task="causal_lm", adapter=False)
    assert not {"bands", "rounds"} & set(ModelCard.load(path).data["differential_privacy"])


def test_metadata_of_discrete_noise_give_epsilon_again(tmp_path: Path) -> None:
    """They name the sensitivity after rounding; Gaussian noise with these numbers would have another ε."""
    report = evidence(tmp_path, randomness="discrete")
    path = write_model_card(tmp_path, report, base_model=None, task="causal_lm", adapter=False)
    found = ModelCard.load(path).data["differential_privacy"]
    assert "discrete Gaussian noise" in found["mechanism"]
    one = DiscreteStep(
        num_units=found["num_units_of_a_round"],
        sampling_rate=found["sampling_rate_of_a_round"],
        max_batch_size=found["max_batch_size"],
        noise_multiplier=found["noise_multiplier"],
        sensitivity=found["discrete_sensitivity"],
    )
    assert float(format_epsilon(epsilon([(one, found["rounds"])], found["delta"]))) == found["epsilon"]


def test_metadata_of_a_resumed_run_with_blt_noise_give_epsilon_again(tmp_path: Path) -> None:
    """Its two starts cost more than one round with the σ of the plan, and the number of the round says so."""
    evidence(tmp_path, end=None, noise={"kind": "blt", "buffers": 1})
    ledger, plan = tmp_path / LEDGER_FILE, PrivacyPlan.load(tmp_path / PLAN_FILE)
    for old in (ledger, tmp_path / JSON_FILE):
        old.unlink()
    for steps in (range(8), range(8, 20)):
        with Ledger.create(ledger, plan) if steps.start == 0 else Ledger.open(ledger, plan) as opened:
            for number in steps:
                opened.append_step(number, plan.event)
            opened.append_end("completed")
    report = write_report(tmp_path, plan, read_ledger(ledger))
    path = write_model_card(tmp_path, report, base_model=None, task="causal_lm", adapter=False)
    found = ModelCard.load(path).data["differential_privacy"]
    one = Step(
        sampling_rate=found["sampling_rate_of_a_round"],
        noise_multiplier=found["noise_multiplier_of_a_round"],
    )
    assert float(format_epsilon(epsilon([(one, found["rounds"])], found["delta"]))) == found["epsilon"]
    assert found["noise_multiplier_of_a_round"] < found["noise_multiplier"]
    assert "sampling_rate" not in found and 0 < found["share_of_units_in_a_step"] < 1  # nothing is sampled


@pytest.mark.parametrize("change", [{"seed": 1}, {"noise_multiplier": 0}])
def test_not_private_is_said_first_thing(tmp_path: Path, change: dict[str, Any]) -> None:
    """Seeded or without noise: the title, the statement, the metadata and the tags say so, and no finite ε is named."""
    report = evidence(tmp_path, **change)
    (tmp_path / "README.md").write_text("---\ntags:\n- differential-privacy\n- lora\n---\n")
    card = ModelCard.load(write_model_card(tmp_path, report, base_model=None, task="causal_lm", adapter=False))
    lines = [line for line in card.text.splitlines() if line]
    assert lines[0].startswith("# NOT PRIVATE") and "WITHOUT a privacy guarantee" in lines[1]
    assert lines[2] == f"> **{report.statement.words}**" and lines[2].startswith("> **NOT PRIVATE")
    assert "satisfies" not in card.text and "| zero-out |" not in card.text
    assert "dpllm verify" in card.text and "dpllm epsilon" not in card.text
    assert card.data.tags == ["dpllm", "lora"]
    privacy = card.data["differential_privacy"]
    assert privacy["private"] is False and privacy["epsilon"] == "infinite"
    assert set(privacy["epsilon_by_adjacency"].values()) == {"infinite"}


def test_user_level(tmp_path: Path) -> None:
    """At user level the unit, its column and its bound are named."""
    report = evidence(tmp_path, unit="sender", max_rows_per_unit=4, adjacency="replace-one")
    card = ModelCard.load(write_model_card(tmp_path, report, base_model=None, task=None, adapter=False))
    privacy = card.data["differential_privacy"]
    assert privacy["unit"] == "user" and privacy["adjacency"] == "replace-one"
    assert privacy["epsilon"] == privacy["epsilon_by_adjacency"]["replace-one"]
    assert "'sender'" in card.text and "every single user" in card.text and card.data.pipeline_tag is None


def test_earlier_metadata_is_kept_where_it_is_harmless(tmp_path: Path) -> None:
    """License, tags and unknown keys stay; results, local paths and an old guarantee go, and so does the text."""
    report = evidence(tmp_path)
    (tmp_path / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: [de]\nthumbnail: https://example.org/a.png\n"
        "tags: [generated_from_trainer, lora, dpllm, 'base_model:adapter:/home/me/base',\n"
        "  'base_model:adapter:org/base']\n"
        "datasets: [org/public, /home/me/patients.csv]\nmetrics: [accuracy]\nbase_model: /home/me/base\n"
        "differential_privacy: {epsilon: 0.001}\nextra: 1\n"
        "model-index:\n- name: m\n  results:\n  - task: {type: text-generation}\n"
        "    dataset: {name: patients, type: patients}\n    metrics: [{type: accuracy, value: 0.987}]\n"
        "---\n# An older card\n"
    )
    path = write_model_card(tmp_path, report, base_model=None, task="causal_lm", adapter=False)
    data = ModelCard.load(path).data.to_dict()
    assert data["license"] == "apache-2.0" and data["language"] == ["de"] and data["extra"] == 1
    assert data["thumbnail"] == "https://example.org/a.png" and data["datasets"] == ["org/public"]
    assert data["tags"] == [*TAGS, "generated_from_trainer", "lora", "base_model:adapter:org/base"]
    assert data["differential_privacy"]["epsilon"] > 0.1
    assert not {"metrics", "model-index", "base_model", "base_model_relation"} & set(data)
    assert not re.search("/home/me|patients|0.987|An older card", path.read_text())
    again = path.read_text()
    write_model_card(tmp_path, report, base_model=None, task="causal_lm", adapter=False)
    assert path.read_text() == again


def test_results_on_private_records_are_not_repeated(tmp_path: Path) -> None:
    """Utility figures and diagnostics depend on private records, and stay in the report."""
    report = evidence(tmp_path, ReleaseNotes(utility={"held-out perplexity": 12.3456}))
    text = write_model_card(tmp_path, report, base_model=None, task="causal_lm", adapter=False).read_text()
    assert "12.3456" not in text and "non-finite gradient" not in text


def test_a_noted_text_cannot_leave_its_line(tmp_path: Path) -> None:
    """An open point with line breaks stays one item of its list: it forges no heading and no guarantee."""
    report = evidence(tmp_path)
    point = "The data came from\n\n## Privacy\n\n| zero-out | 0.0100 |"
    forged = report.model_copy(update={"open_points": [point]})
    text = write_model_card(tmp_path, forged, base_model=None, task="causal_lm", adapter=False).read_text()
    assert "- The data came from ## Privacy | zero-out | 0.0100 |\n" in text
    assert re.findall(r"^## .*", text, flags=re.MULTILINE).count("## Privacy") == 1


def test_checkpoint_of_a_running_run(tmp_path: Path) -> None:
    """A checkpoint's card says that the run has not ended."""
    report = evidence(tmp_path / "checkpoint-20", end=None)
    path = write_model_card(tmp_path / "checkpoint-20", report, base_model=None, task="causal_lm", adapter=False)
    assert "- The run has not ended" in path.read_text()


def test_errors(tmp_path: Path) -> None:
    """Each mistake is named before anything is written."""
    report = evidence(tmp_path / "run")
    common: dict[str, Any] = {"base_model": None, "adapter": True}
    with pytest.raises(ValueError, match="task='causal_ml"):
        write_model_card(tmp_path / "run", report, task="causal_ml", **common)
    with pytest.raises(ValueError, match="num_labels is missing"):
        write_model_card(tmp_path / "run", report, task="sequence_classification", **common)
    with pytest.raises(ValueError, match=r"privacy_report\.md"):
        write_model_card(tmp_path, report, task="causal_lm", **common)
    for text in ("---\ntags: [a\n---\n", "---\n- a\n---\n", "---\n1: a\n---\n"):
        (tmp_path / "run" / "README.md").write_text(text)
        with pytest.raises(ValueError, match=r"README\.md"):
            write_model_card(tmp_path / "run", report, task="causal_lm", **common)
        assert (tmp_path / "run" / "README.md").read_text() == text
    (tmp_path / "run" / "README.md").write_text("only text")
    write_model_card(tmp_path / "run", report, task="causal_lm", **common)


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (llama, "causal_lm"),
        (t5, "seq2seq_lm"),
        (lambda: bert(num_labels=3), "sequence_classification"),
        (lambda: bert(num_labels=3), None),
    ],
)
def test_code_loads_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make, task: str | None) -> None:
    """The card's code, run as it stands, gives back the saved model and tokenizer."""
    model = make()
    model.save_pretrained(tmp_path)
    vocabulary = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(tmp_path)
    path = write_model_card(tmp_path, evidence(tmp_path), base_model="org/base", task=task, adapter=False)
    loaded = execute(path, monkeypatch)
    assert type(loaded["model"]) is type(model) and same(loaded["model"], model)
    assert loaded["tokenizer"]("b")["input_ids"] == [1]


def adapter(model: Any, base: Path, folder: Path, **changes: Any) -> Any:
    """Save a base model, and an adapter of it whose weights are not zero; returns the model with the adapter."""
    model.save_pretrained(base)
    model = type(model).from_pretrained(base)
    tuned = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **changes))
    tuned.save_pretrained(folder)
    return tuned


@pytest.mark.parametrize(
    ("make", "task", "changes"),
    [
        (llama, "causal_lm", {"task_type": "CAUSAL_LM"}),
        (t5, "seq2seq_lm", {"task_type": "SEQ_2_SEQ_LM"}),
        (lambda: bert(num_labels=3), "sequence_classification", {"task_type": "SEQ_CLS"}),
    ],
)
def test_code_loads_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make, task: str, changes) -> None:
    """The code names the base model of the Hub, which a folder of that name stands in for, and loads the adapter."""
    folder = tmp_path / "run"
    tuned = adapter(make(), tmp_path / "base", folder, **changes)
    path = write_model_card(
        folder, evidence(folder), base_model="org/base", task=task, adapter=True, num_labels=3, license="mit"
    )
    data = ModelCard.load(path).data
    assert (data.library_name, data.base_model, data["base_model_relation"]) == ("peft", "org/base", "adapter")
    assert {"lora", "transformers", *TAGS} == set(data.tags)  # PEFT's own tags, without the folder in one of them
    assert str(tmp_path) not in path.read_text()
    (folder / "org").mkdir()
    (folder / "org" / "base").symlink_to(tmp_path / "base")
    loaded = execute(path, monkeypatch)["model"]
    assert isinstance(loaded, PeftModel) and same(loaded, tuned)


def test_adapter_of_a_local_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card does not name the folder, which says much about the machine; its code finds it in PEFT's file."""
    folder, base = tmp_path / "run", tmp_path / "base"
    tuned = adapter(llama(), base, folder, task_type="CAUSAL_LM")
    path = write_model_card(folder, evidence(folder), base_model=str(base), task="causal_lm", adapter=True)
    text = path.read_text()
    assert str(base) not in text and "not on the Hub" in text and "base_model" not in ModelCard(text).data.to_dict()
    assert "replace the argument of the first call with the path of that model" in text
    assert same(execute(path, monkeypatch)["model"], tuned)


@pytest.mark.parametrize("private", [True, False])
def test_base_model_license_and_language_that_people_noted(tmp_path: Path, private: bool) -> None:
    """They are in the metadata as the Hub accepts them; a local base model is named by its name on the Hub."""
    notes = ReleaseNotes(base_model="org/base-2b", license="The Clinic's 1.0", language=("en", "de"))
    report = evidence(tmp_path, notes, **({} if private else {"seed": 1}))
    path = write_model_card(tmp_path, report, base_model=str(tmp_path), task="causal_lm", adapter=True)
    card = ModelCard.load(path)
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("org/base-2b", "adapter")
    assert (data["license"], data["license_name"]) == ("other", "the-clinic-s-1.0")
    assert data["language"] == ["en", "de"]
    assert "[`org/base-2b`](https://huggingface.co/org/base-2b)" in card.text and str(tmp_path) not in card.text
    assert other_claims(path.read_text(), own_lines(report, "org/base-2b")) == []


def test_a_license_that_is_noted_later_reaches_the_card(tmp_path: Path) -> None:
    """`dpllm report --license` rewrites the metadata, and leaves the rest of the card."""
    path = write_model_card(tmp_path, evidence(tmp_path), base_model=None, task="causal_lm", adapter=False)
    path.write_text(path.read_text() + "\nA line of its owner.\n")
    add_notes(tmp_path, {"license": "MIT", "language": ("fr",)})
    card = ModelCard.load(path)
    assert (card.data.license, card.data.language) == ("mit", ["fr"]) and "A line of its owner." in card.text
    assert {check.what for check in verify(tmp_path).checks if not check.ok} == set()
    assert "people edited the rest" in verify(tmp_path).checks[-1].detail


def test_what_people_settled_is_in_the_card(tmp_path: Path) -> None:
    """The ledger has it with its author and its date; a card or a report without it does not verify."""
    report = evidence(tmp_path)
    path = write_model_card(tmp_path, report, base_model=None, task="causal_lm", adapter=False)
    point = next(one for one in report.open_points if "may be outside" in one)
    after = settle(tmp_path, {point: "Only the clinic sees them."}, "A. Meyer, data protection officer")
    (line,) = read_ledger(tmp_path / LEDGER_FILE).notes.settled
    assert line["point"] == point and line["by"] == "A. Meyer, data protection officer"
    assert datetime.fromisoformat(line["at"]).tzinfo is not None
    words = f"Settled: Only the clinic sees them. (settled on {day_in_words(line['at'])} by {line['by']})"
    assert point not in after.open_points and f"- {point} {words}" in path.read_text()
    assert {check.what for check in verify(tmp_path).checks if not check.ok} == set()
    assert add_notes(tmp_path, {"audience": "all"}).settled_points == after.settled_points
    for name in (CARD_FILE, "privacy_report.md", "privacy_report.html", "privacy_report.json", LEDGER_FILE):
        kept = (tmp_path / name).read_text()
        assert "A. Meyer" in kept
        (tmp_path / name).write_text(kept.replace("A. Meyer", "B. Meyer"))
        assert any(not check.ok for check in verify(tmp_path).checks), name
        (tmp_path / name).write_text(kept)


def test_a_statement_needs_an_open_point_an_author_and_words_of_ones_own(tmp_path: Path) -> None:
    """Nothing is written otherwise: the ledger cannot take a line back. A checkpoint's ledger never changes."""
    report = evidence(tmp_path)
    point = next(one for one in report.open_points if "may be outside" in one)
    other = next(one for one in report.open_points if "Not filled in" in one)
    before = (tmp_path / LEDGER_FILE).read_bytes()
    for statements, by, words in (
        ({point: "…"}, "A. Meyer", "the statement is '…'"),
        ({point: "what was checked"}, "A. Meyer", "the statement is 'what was checked'"),
        ({point: "Only we see them."}, "name and role", "the name of the person who checked it is 'name and role'"),
        ({other: "fine"}, "A. Meyer", "no open point of .* that a statement settles"),
        ({"something": "fine"}, "A. Meyer", "'something' is no open point"),
        ({point: " "}, "A. Meyer", "the statement is empty"),
        ({point: "Only we see them."}, "", "the name of the person who checked it is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            settle(tmp_path, statements, by)
    assert (tmp_path / LEDGER_FILE).read_bytes() == before
    (tmp_path / MANIFEST_FILE).write_text("{}")
    with pytest.raises(ValueError, match="ledger never"):
        settle(tmp_path, {point: "Only we see them."}, "A. Meyer")
    with pytest.raises(ValueError, match="ledger never"):
        add_notes(tmp_path, {"audience": "all"})


def test_adapter_of_another_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a known task PEFT's own configuration says which class to load."""
    folder = tmp_path / "run"
    tuned = adapter(llama(), tmp_path / "base", folder, target_modules=["q_proj"])
    path = write_model_card(folder, evidence(folder), base_model=None, task=None, adapter=True)
    assert same(execute(path, monkeypatch)["model"], tuned)
