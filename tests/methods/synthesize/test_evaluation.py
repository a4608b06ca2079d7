"""Tests of dpllm.methods.synthesize: overlap, distances, the classifier, and the evaluation that puts them side by
side."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest

from dpllm.config import ConfigError
from dpllm.methods.synthesize.evaluation import (
    EvaluationSettings,
    LabelledTexts,
    Runs,
    evaluate,
    frechet,
    mauve,
    overlap,
    read_texts,
)

WORDS = {"pub": ["beer", "ale", "bar"], "cafe": ["tea", "cake", "coffee"]}
PLAIN = EvaluationSettings(with_mauve=False, with_classifier=False)


def texts_of(seed: int, count: int, name: str = "made") -> LabelledTexts:
    rng = random.Random(seed)
    labels = [rng.choice(list(WORDS)) for _ in range(count)]
    texts = [" ".join(rng.choice([*WORDS[label], "the", "good", "old"]) for _ in range(9)) for label in labels]
    return LabelledTexts(name, tuple(texts), tuple(labels))


@pytest.mark.parametrize("seed", range(20))
def test_longest_runs_are_those_of_all_pairs(seed):
    """As a search through all runs of all texts finds them; runs do not cross from one text into another."""
    rng = random.Random(seed)
    own, others = (
        [[rng.choice("abc") for _ in range(rng.randint(0, 12))] for _ in range(rng.randint(1, 6))] for _ in range(2)
    )
    known = {tuple(o[a:b]) for o in others for a in range(len(o)) for b in range(a + 1, len(o) + 1)}
    expected = [
        max([b - a for a in range(len(t)) for b in range(a + 1, len(t) + 1) if tuple(t[a:b]) in known], default=0)
        for t in own
    ]
    runs = Runs(own)
    for other in others:
        runs.mark(other)
    assert runs.longest() == expected


def test_a_copied_record_is_seen():
    """A data set that holds a training record says so."""
    record = "the eagle is a cheap pub near the old river and it has no garden"
    train = ["one two three four five six seven eight nine", record]
    copied = overlap([record.upper() + "!", "words of another kind"], train, ngram=5)
    assert copied.whole == 0.5 and copied.longest == len(record.split()) and copied.shared == 1.0
    own = overlap(["words of another kind and of no other text"], train, ngram=5)
    assert own.whole == 0 and own.shared == 0 and own.longest <= 2


def test_frechet_is_that_of_two_gaussians():
    """Known means and covariances; 0 for the same sample; it grows with the gap."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(40_000, 3)), rng.normal(size=(40_000, 3)) * [2, 1, 1] + [0, 3, 0]
    assert frechet(first, first) == pytest.approx(0, abs=1e-9)
    assert frechet(first, second) == pytest.approx(9 + (2 - 1) ** 2, rel=0.03)


class Letters:
    """An embedding: the share of each of some words, and a little noise, so that covariances are regular."""

    def embed(self, texts, batch_size=64):
        names = sorted({word for words in WORDS.values() for word in words})
        rows = np.array([[text.split().count(name) for name in names] for text in texts], dtype=np.float64)
        return rows + np.random.default_rng(0).normal(0, 0.01, rows.shape)


def test_the_evaluation_puts_the_sets_side_by_side(tmp_path):
    """Text like the real one has a smaller distance; training records have no overlap with themselves."""
    real, train = texts_of(0, 120, "held-out"), texts_of(1, 150, "trained")
    other = LabelledTexts("other", tuple(" ".join(["tea"] * 9) for _ in range(100)))
    found = evaluate([texts_of(2, 100), other], real, train, Letters(), "letters", PLAIN)
    names = [one.name for one in found.sets]
    assert names == ["made", "other", "trained", "held-out"] and found.compared == 100
    like, unlike, reference, held_out = found.sets
    assert like.frechet < unlike.frechet / 10 and reference.frechet is not None and held_out.frechet is None
    assert unlike.duplicates == pytest.approx(0.99) and like.words[0] == 9
    assert reference.overlap is None and held_out.overlap is not None and found.reads_training
    found.save(tmp_path / "deep" / "e.json")
    assert json.loads((tmp_path / "deep" / "e.json").read_text())["sets"][0]["name"] == "made"
    assert (tmp_path / "deep" / "e.md").read_text().startswith("|  | made | other | trained | held-out |")


def test_few_texts_give_no_distance_and_say_so():
    found = evaluate([texts_of(2, 10)], texts_of(0, 120), None, Letters(), "letters", PLAIN)
    assert found.embedding is None and "10 texts are too few" in found.notes[0]
    with pytest.raises(ConfigError, match="no set"):
        evaluate([], texts_of(0, 120))


def test_a_classifier_learns_the_labels_of_synthetic_text():
    """Right labels give a high accuracy on real text; labels that are mixed up do not."""
    pytest.importorskip("sklearn", reason="the extra 'synthetic' is not installed")
    made, real = texts_of(3, 200), texts_of(0, 100)
    mixed = LabelledTexts("mixed", made.texts, tuple(random.Random(0).sample(made.labels, len(made.labels))))
    settings = EvaluationSettings(with_mauve=False)
    right, wrong, _ = evaluate([made, mixed], real, settings=settings).sets
    assert right.classifier.accuracy > 0.95 > 0.75 > wrong.classifier.accuracy
    with pytest.raises(ConfigError, match="one label only"):
        evaluate([LabelledTexts("one", made.texts, ("pub",) * 200)], real, settings=settings)
    bare = LabelledTexts("bare", made.texts)
    assert "have no labels" in evaluate([bare], real, settings=settings).notes[0]
    assert "has no labels" in evaluate([made], LabelledTexts("real", real.texts), settings=settings).notes[0]


def test_mauve_is_that_of_its_library():
    """Alike samples are near 1, others near 0."""
    pytest.importorskip("mauve", reason="the extra 'synthetic' is not installed")
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 400, 4))
    assert mauve(first, second) > 0.8 > 0.2 > mauve(first, second + 20)


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match="scikit-learn"):
        evaluate([texts_of(3, 60)], texts_of(0, 60), settings=EvaluationSettings(with_mauve=False))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": "x", "b": "y"}\n', "no column named text"),
        ('{"text": null}\n{"text": "x"}\n', "record 0 has no text"),
        ('{"text": "x"}\n', "no column 'kind'"),
        ('{"text": "x", "kind": null}\n{"text": "y", "kind": "z"}\n', "record 0 has no label"),
    ],
)
def test_files_that_hold_no_texts_are_refused(tmp_path, content, words):
    """The message has the number of a record and never its text."""
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_texts(path, label_column="kind" if "kind" in words or "label" in words else None)


def test_texts_are_found_in_a_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"texts\.parquet"):
        read_texts(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"label": 1, "text": "x"}\n')
    found = read_texts(tmp_path)
    assert found.texts == ("x",) and found.labels == ("1",)
    with pytest.raises(ConfigError, match="such file"):
        read_texts(tmp_path / "other.jsonl")
    (tmp_path / "t.xyz").write_text("x")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_texts(tmp_path / "t.xyz")
