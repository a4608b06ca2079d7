"""A PATE run: a unit changes one teacher, every label is charged and noisy, and the student sees only labels."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging

from dpllm.config import ConfigError
from dpllm.config.recipe_file import load_query_recipe
from dpllm.methods.attacks.answers import run_trials
from dpllm.methods.attacks.probes import label_probe
from dpllm.methods.pate import teach as teaching
from dpllm.methods.pate.prepare import prepare
from dpllm.methods.pate.votes import NO_LABEL, VOTE_CHANGE, Ballots
from dpllm.methods.queries.run import Randomness, begin_from
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.verify import verify
from tests.methods.pate.school import TEACHERS, write_recipe
from tests.mutations import kills
from tests.small_model import WORDS


def _quiet(*_):
    pass


class _Run:
    """A run that draws the division from a fixed seed, for two neighbours."""

    def __init__(self, folder):
        self.private_folder, self.randomness = folder, self

    def generator(self):
        return np.random.default_rng(5)


def _votes(folder, monkeypatch, records):
    """Return the votes of each teacher, (k, n), for these records, with one division and one seed for all trainings."""
    votes = []
    monkeypatch.setattr(teaching, "fresh_seed", lambda: 1)
    add = Ballots.add
    monkeypatch.setattr(Ballots, "add", lambda self, classes_N: (votes.append(classes_N), add(self, classes_N)))
    train = {"num_train_epochs": 20, "per_device_train_batch_size": 3, "learning_rate": 0.05}
    path = write_recipe(folder, records=records, teach={"train": train})
    prepared = prepare(load_query_recipe(path, (), "teach"))
    classroom = teaching.Classroom(prepared)
    with torch.no_grad():  # the new head is the same in both
        for parameter in classroom.base.model.score.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    classroom.base = teaching.OneBase(classroom.base.model)
    ballots = teaching.count_votes(classroom, classroom.private_rows(), _Run(folder), _quiet)
    monkeypatch.setattr(Ballots, "add", add)
    return np.array(votes), ballots.counts_NC


def test_another_unit_changes_the_votes_of_one_teacher(tmp_path, monkeypatch):
    """Two neighbours through the whole counting: the counts of a text move by at most √2."""
    records = [{"text": f"{WORDS[n % 7]} {WORDS[n]} small man", "label": n % 2} for n in range(12)]
    other = [dict(record) for record in records]
    other[3] = {"text": "seven clouds", "label": 1 - other[3]["label"]}
    before, counts = _votes(tmp_path, monkeypatch, records)
    after, others = _votes(tmp_path, monkeypatch, other)
    assert before.shape == (TEACHERS, 6) and len(set(map(bytes, before))) > 1  # teachers differ, so the test can fail
    assert (before != after).any(axis=1).sum() == 1
    assert np.linalg.norm((counts - others).astype(float), axis=1).max() <= VOTE_CHANGE


@kills(
    "a teacher goes on where the one before ended",
    "dpllm/methods/pate/teach.py",
    "tensor.copy_(values[name])",
    "pass",
)
def test_a_teacher_starts_where_every_teacher_starts(school, tmp_path):
    """Whatever was trained before: otherwise later teachers would have seen earlier units."""
    classroom = teaching.Classroom(school(model={"adapter": {"r": 2, "target_modules": "all-linear"}}))
    model = classroom.base.begin()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    section = classroom.prepared.options.train
    trained = teaching.train_without_privacy(model, classroom.private_rows(), classroom.collator, section, tmp_path)
    assert any(not torch.equal(value, start[name]) for name, value in trained.state_dict().items())
    again = classroom.base.begin().state_dict()
    assert again.keys() == start.keys() and all(torch.equal(value, start[name]) for name, value in again.items())


def test_scores_that_are_not_finite_are_still_one_vote(school):
    """A teacher whose training failed names a class like any other."""
    classroom = teaching.Classroom(school())
    with torch.no_grad():
        classroom.base.model.score.weight.fill_(torch.nan)
    classes = teaching.classes_of(classroom.base.model, classroom.prompts(), classroom.collator)
    assert classes.dtype == np.int64 and set(classes) <= {0, 1}


@kills(
    "one label of all is charged",
    "dpllm/methods/pate/votes.py",
    "run.charge(vote.answers, vote.most_labels)",
    "run.charge(vote.answers)",
)
@pytest.mark.parametrize("confident", [False, True])
def test_labels_are_charged_before_they_are_drawn_with_the_planned_noise(school, monkeypatch, confident):
    """All texts, or all checks and the planned labels; noise of σ on every count, and of σ₁ on every check."""
    prepared = school(teach={"threshold": 0.0, "max_answers": 3, "check_noise": 5.0} if confident else {})
    drawn = []

    def gaussian(self, shape, stddev):
        drawn.append((shape, stddev, {name: run.left(name) for name in charges}))
        return np.random.default_rng(len(drawn)).normal(0, stddev, shape)

    monkeypatch.setattr(Randomness, "gaussian", gaussian)
    charges = [charge.name for charge in prepared.plan.charges]
    ballots = Ballots(6, 2)
    with begin_from(prepared.recipe, prepared.plan) as run:
        with pytest.raises(ValueError, match="4 teachers"):
            teaching.released_labels(prepared.vote, TEACHERS, run, ballots)
        for _ in range(TEACHERS):
            ballots.add(np.zeros(6, dtype=np.int64))
        labels = teaching.released_labels(prepared.vote, TEACHERS, run, ballots)
    nothing_left = dict.fromkeys(charges, 0)
    assert drawn == [((6, 2), 2 * 2**0.5, nothing_left), ((6,), 2 * 2**0.5 * (5 if confident else 3), nothing_left)]
    assert (labels != NO_LABEL).sum() == (3 if confident else 6)
    charged = read_ledger(Path(prepared.recipe.output_dir) / LEDGER_FILE).history
    assert epsilon(charged, 1e-3) == prepared.plan.epsilon


def test_a_run_releases_labels_and_a_student_and_verifies(school, tmp_path, capsys):
    """Nothing of the teachers is written or shown; the labels are JSON lines in the private records' columns."""
    held_out = tmp_path / "dev.jsonl"
    held_out.write_text(json.dumps({"text": "the dog", "label": 1}) + "\n")
    prepared = school(
        data={
            "eval": {"path": str(held_out), "public": True},
        }
    )
    taught = teaching.teach(prepared, _quiet, _quiet)
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    assert taught.num_texts == len(lines) == 6 and list(taught.figures.values()) in ([0.0], [1.0])
    assert [line["text"] for line in lines] == [row["text"] for row in prepared.prompts]
    assert {line["label"] for line in lines} <= {0, 1}
    assert (folder / "student" / "config.json").exists()
    kept = folder / "not_for_release"
    assert not kept.exists() or [path.name for path in kept.iterdir()] in ([], ["writer.json"])
    assert "loss" not in capsys.readouterr().out
    assert verify(folder).ok
    (folder / "labels.jsonl").write_text(json.dumps({"text": "the dog", "label": 1}) + "\n")
    assert not verify(folder).ok


def test_without_a_label_there_is_no_student(school, tmp_path, monkeypatch):
    """No text passed the check: the run is charged, and says so."""
    monkeypatch.setattr(teaching, "released_labels", lambda vote, num_teachers, run, ballots: np.full(6, NO_LABEL))
    taught = teaching.teach(school(teach={"threshold": 4.0, "max_answers": 2}), _quiet, _quiet)
    assert taught.num_texts == 0 and not taught.figures
    assert (tmp_path / "run" / "labels.jsonl").read_text() == "" and not (tmp_path / "run" / "student").exists()


def test_the_number_of_rows_of_a_teacher_is_not_logged(school, tmp_path, caplog):
    """Of users it is private, and no ε covers it: “Num examples”, with TRANSFORMERS_VERBOSITY=info."""
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_propagation()
    try:
        with caplog.at_level("INFO"):
            teaching.teach(school(teach={"student": False}), _quiet, _quiet)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.disable_propagation()
        logging.set_verbosity(before)
    assert "Num examples" not in caplog.text
    # Labels alone are a release; nothing of the teachers stays in the folder.
    assert not (tmp_path / "run" / "student").exists() and not list((tmp_path / "run").rglob("*.safetensors"))
    with pytest.raises(ConfigError, match=r"train\.log_level"):
        school(teach={"train": {"log_level": "info"}})


@pytest.mark.parametrize("name", ["labels.jsonl", "student"])
def test_a_file_in_the_place_of_a_result_is_refused_before_a_teacher_is_trained(school, tmp_path, name):
    """A file named student: the run ended with exit code 0 and saved no student."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("my own")
    with pytest.raises(ValueError, match=f"{name} exists already, and it is not replaced"):
        teaching.teach(school(), _quiet, _quiet)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]


def test_held_out_private_records_are_counted_as_disclosures(school, tmp_path):
    """The student's accuracy on them is not covered."""
    taught = teaching.teach(school(data={"eval": 0.25}), _quiet, _quiet)
    assert list(taught.figures) == ["accuracy of the student on the held-out records"]
    assert "The ledger records no such result" not in (tmp_path / "run" / "privacy_report.md").read_text()


@pytest.mark.parametrize("confident", [False, True])
def test_the_audit_reads_the_vote_from_the_plan(school, confident):
    """A trial charges all that the plan charges, with its noise."""
    plan = school(teach={"threshold": 1.0, "max_answers": 3, "check_noise": 5.0} if confident else {}).plan
    found = run_trials(plan, label_probe(plan), 10)
    assert found.history == [(charge.event, charge.count) for charge in plan.charges]
