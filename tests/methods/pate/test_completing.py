"""A PATE run on tokens: a unit changes one teacher's votes, and only the voted texts are released."""

import json

import numpy as np
import pytest
import torch

from dpllm.config import ConfigError
from dpllm.config.recipe_file import load_query_recipe
from dpllm.methods.pate import teach as teaching
from dpllm.methods.pate.prepare import prepare
from dpllm.methods.pate.votes import TOKENS, VOTE_CHANGE, Ballots
from dpllm.methods.queries.run import Randomness, begin_from
from dpllm.report.verify import verify
from tests.methods.pate.school import TEACHERS, write_token_recipe
from tests.small_model import WORDS

PLACES, TEXTS = 5, 3


def _quiet(*_):
    pass


def _course(folder, monkeypatch, records):
    """Return the votes (places, k, texts), the counts and the completions of a run in float64.

    The division, the seeds and the noise are those of every call. The noise is so large that it decides alone: both
    neighbours then write the same texts, and their votes on the same texts can be compared.
    """
    votes, counts, draws = [], [], []
    with monkeypatch.context() as patch:
        patch.setattr(teaching, "fresh_seed", lambda: 1)
        patch.setattr(Randomness, "generator", lambda self: np.random.default_rng(5))

        def gaussian(self, shape, stddev):
            draws.append(stddev)
            return np.random.default_rng(len(draws)).normal(0, 1e9, shape)

        def add(self, classes_N):
            votes.append(classes_N)
            kept(self, classes_N)
            if self.num_voters == TEACHERS:
                counts.append(self.counts_NC.copy())

        kept = Ballots.add
        patch.setattr(Randomness, "gaussian", gaussian)
        patch.setattr(Ballots, "add", add)
        train = {"num_train_epochs": 10, "per_device_train_batch_size": 3, "learning_rate": 0.05}
        teach = {"train": train, "candidates": None}
        path = write_token_recipe(folder, records=records, teach=teach, model={"adapter": None})
        prepared = prepare(load_query_recipe(path, (), "teach"))
        torch.manual_seed(0)
        classroom = teaching.Classroom(prepared)
        classroom.base = teaching.OneBase(classroom.base.model.double())
        with begin_from(prepared.recipe, prepared.plan) as run:
            texts = teaching.completed_texts(classroom, classroom.private_rows(), run, _quiet, _quiet)
    return np.array(votes).reshape(PLACES, TEACHERS, TEXTS), np.array(counts), texts.to_list()


def test_another_unit_changes_the_votes_of_one_teacher_at_each_place(tmp_path, monkeypatch):
    """Two neighbours through training and writing: the counts of a place move by at most √2."""
    records = [{"text": f"{WORDS[n % 7]} {WORDS[n]} small man {WORDS[n // 2]}"} for n in range(12)]
    other = [dict(record) for record in records]
    other[3] = {"text": "seven clouds under one old bridge"}
    folders = [tmp_path / "with", tmp_path / "without"]
    for folder in folders:
        folder.mkdir()
    before, counts, texts = _course(folders[0], monkeypatch, records)
    after, others, same = _course(folders[1], monkeypatch, other)
    assert texts == same and len(set(map(bytes, before.swapaxes(0, 1)))) == TEACHERS
    changed_PK = (before != after).any(axis=2)
    assert changed_PK.any(axis=0).sum() == 1
    assert np.linalg.norm((counts - others).astype(float), axis=2).max() == pytest.approx(VOTE_CHANGE)


def test_a_run_releases_texts_and_a_student_and_verifies(writing_school, tmp_path, capsys):
    """Nothing of the teachers is written or shown; each text begins as its public text."""
    held_out = tmp_path / "dev.jsonl"
    held_out.write_text(json.dumps({"text": "the old dog walks"}) + "\n")
    prepared = writing_school(
        data={
            "eval": {"path": str(held_out), "public": True},
        }
    )
    taught = teaching.teach(prepared, _quiet, _quiet)
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    assert taught.num_texts == len(lines) <= TEXTS
    starts = [row["text"] for row in prepared.prompts]
    assert all(any(line["text"].startswith(start) for start in starts) for line in lines)
    assert [name.split(" on ")[0] for name in taught.figures] == [
        "perplexity of the public model",
        "perplexity of the student",
    ]
    assert (folder / "student" / "adapter_config.json").exists()
    kept = folder / "not_for_release"
    assert not kept.exists() or [path.name for path in kept.iterdir()] in ([], ["writer.json"])
    assert "loss" not in capsys.readouterr().out
    report = (folder / "privacy_report.md").read_text()
    assert "continued public texts token by token" in report and "charged all 15 planned" in report
    assert verify(folder).ok
    with open(folder / "texts.jsonl", "a") as file:
        file.write(json.dumps({"text": "the dog"}) + "\n")
    assert not verify(folder).ok


def test_completions_are_in_the_columns_of_the_records(writing_school, tmp_path):
    """Of records with prompt and completion, the public texts are prompts."""
    records = [{"prompt": f"{WORDS[n]}:", "completion": f" {WORDS[n % 5]} man"} for n in range(12)]
    prompts = [{"prompt": "seven dogs:"}, {"prompt": "red house:"}]
    prepared = writing_school(records=records, prompts=prompts, data={"format": "prompt_completion"})
    classroom = teaching.Classroom(prepared)
    new = classroom.tokenizer(" small dog", add_special_tokens=False)["input_ids"]
    completed = classroom.completed([new, []])
    assert completed.to_list() == [{"prompt": "seven dogs:", "completion": " small dog"}]
    row = [*classroom.encoded_prompts()[0], *new, classroom.tokenizer.eos_token_id]
    assert classroom.rows(completed)[0]["input_ids"] == row  # teachers read such rows, and write their begin


def test_a_text_without_room_is_refused_before_anything_is_charged(writing_school, tmp_path):
    """The student's row would be cut, or the model sees no more."""
    with pytest.raises(ConfigError, match="shorten"):
        teaching.teach(writing_school(teach={"max_new_tokens": 30}), _quiet, _quiet)
    assert not (tmp_path / "run").exists()


def test_texts_after_the_last_planned_token_are_not_written(writing_school, tmp_path):
    """One text side by side: the second is cut, and the third has no token."""
    prepared = writing_school(teach={"max_answers": 7, "rows_per_pass": 1, "student": False})
    taught = teaching.teach(prepared, _quiet, _quiet)
    assert prepared.plan.charge(TOKENS).count == 7 and 1 <= taught.num_texts <= TEXTS
    assert not (tmp_path / "run" / "student").exists()
