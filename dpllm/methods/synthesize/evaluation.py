"""Evaluation of synthetic text beside real text: distances, a classifier, lengths, overlap with training records.

Place in the flow: after the generation; `dpllm methods evaluate` writes the result. Each figure that reads private text
(held-out or training records) is an exact result on it, so ε does not cover it: such results go to
``not_for_release/``, and the data set's ledger lists that they were written.

The Fréchet distance and MAUVE are figures of samples: compare them with the distance of two samples of real text of the
same size, which is not 0 (MAUVE: not 1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from dpllm.config import ConfigError
from dpllm.config.extras import require
from dpllm.config.values import integer
from dpllm.methods.synthesize.filters import words_of
from dpllm.methods.synthesize.overlap import Overlap, overlap
from dpllm.methods.synthesize.texts import LabelledTexts
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.private_folder import private_path
from dpllm.report.model_card import add_disclosure

if TYPE_CHECKING:
    from dpllm.methods.synthesize.embeddings import Embedder

Floats = NDArray[np.float64]
SEED = 20240229
"""Public constant: of the clusters of MAUVE, and of the samples that are compared."""


def frechet(first: Floats, second: Floats) -> float:
    """Return the Fréchet distance of two Gaussians with the means and covariances of two samples.

    ``|μ₁ − μ₂|² + tr(Σ₁ + Σ₂ − 2 (Σ₁Σ₂)^½)`` (Dowson and Landau 1982), as the Fréchet Inception distance has it
    (Heusel et al., arXiv:1706.08500), here on embeddings of texts. 0 for equal samples.

    Args:
        first: (n, D) embeddings, n at least 2.
        second: (m, D) embeddings, m at least 2.

    >>> round(frechet(np.array([[0.0], [2.0]]), np.array([[3.0], [5.0]])), 9)
    9.0
    """
    means = [sample.mean(axis=0) for sample in (first, second)]
    one, two = (np.atleast_2d(np.cov(sample, rowvar=False)) for sample in (first, second))
    # The trace of the root of a product of two covariances is the sum of the roots of its eigenvalues.
    values = np.clip(linalg.eigvals(one @ two).real, 0.0, None)
    gap = means[0] - means[1]
    return float(max(0.0, gap @ gap + np.trace(one) + np.trace(two) - 2 * np.sqrt(values).sum()))


def mauve(first: Floats, second: Floats) -> float:
    """Return MAUVE of two samples of embeddings, from 0 (apart) to 1 (alike).

    Computed by its authors' library with its own settings and a fixed seed (Pillutla et al., arXiv:2102.01454).

    Args:
        first: (n, D) embeddings of real texts.
        second: (m, D) embeddings of generated texts.

    Raises:
        ConfigError: the extra "synthetic" is not installed.
    """
    require("synthetic", "MAUVE")
    found = import_module("mauve").compute_mauve(
        p_features=first.astype(np.float32), q_features=second.astype(np.float32), seed=SEED, verbose=False
    )
    return float(found.mauve)


def some_of(count: int, most: int) -> list[int]:
    """Return at most this many of the numbers below ``count``, chosen by a public constant, in their order.

    >>> some_of(3, 3), len(some_of(9, 2))
    ([0, 1, 2], 2)
    """
    if count <= most:
        return list(range(count))
    return [int(number) for number in np.sort(np.random.default_rng(SEED).permutation(count)[:most])]


Texts = Sequence[str]
_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The result on the tested texts."""

    accuracy: float
    """Share of right labels."""
    macro_f1: float
    """Mean over the labels of F1."""
    majority: float
    """Accuracy of always naming the commonest label of the tested texts."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


def classify(texts: Texts, labels: Sequence[str], tested: Texts, truth: Sequence[str]) -> Accuracy:
    """Train on synthetic texts and test on real held-out texts: are the labels right and useful?

    Words and pairs of words weighted by TF-IDF, and logistic regression, both by scikit-learn.

    Args:
        texts: to learn from.
        labels: of each of them.
        tested: real held-out texts.
        truth: of each of them.

    Raises:
        ConfigError: the extra "synthetic" is not installed, or the texts have only one label, or no word.
    """
    require("synthetic", "the classifier")
    if len(set(labels)) < 2:
        raise ConfigError(
            "the texts have one label only, so there is nothing to classify: give texts of several labels"
        )
    pipeline = import_module("sklearn.pipeline")
    features = import_module("sklearn.feature_extraction.text").TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    model = pipeline.make_pipeline(
        features, import_module("sklearn.linear_model").LogisticRegression(max_iter=_STEPS, C=10.0)
    )
    try:
        model.fit(list(texts), list(labels))
    except ValueError as error:
        raise ConfigError(f"the classifier cannot learn from these texts ({error}): give texts with words") from error
    found = model.predict(list(tested))
    metrics = import_module("sklearn.metrics")
    return Accuracy(
        accuracy=float(metrics.accuracy_score(truth, found)),
        macro_f1=float(metrics.f1_score(truth, found, average="macro", zero_division=0.0)),
        majority=max(list(truth).count(label) for label in set(truth)) / len(truth),
    )


EVALUATION_FILE = "not_for_release/evaluation.json"
"""Results in the folder of a data set, relative to it."""
DISCLOSED = "evaluation of synthetic text on real text"
"""The report's words for these results, which ε does not cover."""
_FEWEST = 50  # texts for which a distance says anything


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which texts are compared, and how.

    Raises:
        ConfigError: a number is out of range.
    """

    most: int = 5000
    """The most texts of each set that are compared; a public constant chooses them."""
    ngram: int = 8
    """Words of a phrase that counts as shared."""
    with_mauve: bool = True
    """Whether MAUVE is computed; it needs the extra "synthetic"."""
    with_classifier: bool = True
    """Whether a classifier is trained, if the texts have labels; it needs the extra "synthetic"."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        integer("most", self.most, 2, 1_000_000)
        integer("ngram", self.ngram, 1, 1000)


@dataclass(frozen=True, kw_only=True)
class SetFigures:
    """The figures of one set of texts. One that was not asked for, or has no meaning for this set, is None."""

    name: str
    num_texts: int
    words: tuple[float, float, float, float]
    """Mean, 5 % quantile, median and 95 % quantile of the number of words of a text."""
    duplicates: float
    """Share of the texts that are a copy of an earlier one."""
    mauve: float | None = None
    """MAUVE to the real held-out texts; 1: alike."""
    frechet: float | None = None
    """Fréchet distance of the embeddings to those of the real held-out texts; 0: alike."""
    classifier: Accuracy | None = None
    """Of a classifier trained on this set and tested on the real held-out texts."""
    overlap: Overlap | None = None
    """With the training records."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        parts = {"classifier": self.classifier, "overlap": self.overlap}
        values = {name: part.to_dict() if part is not None else None for name, part in parts.items()}
        return {**vars(self), "words": dict(zip(_WORDS, self.words, strict=True)), **values}


_WORDS = ("mean", "5 %", "median", "95 %")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The figures of each set, the synthetic one first."""

    sets: tuple[SetFigures, ...]
    compared: int
    """Texts of each set that the distances read."""
    embedding: str | None
    """Name of the embedding model; None: no distance was computed."""
    reads_training: bool
    """Whether training records were read."""
    notes: tuple[str, ...] = field(default=())
    """About figures that are missing."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "sets": [one.to_dict() for one in self.sets],
            "compared": self.compared,
            "embedding": self.embedding,
            "reads_training": self.reads_training,
            "notes": list(self.notes),
        }

    def save(self, path: str | Path) -> None:
        """Write JSON, and a table beside it (``.md``)."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(self.as_markdown() + "\n", encoding="utf-8")

    def as_markdown(self) -> str:
        """Return `evaluation_table` as Markdown, and the notes."""
        head, rows = evaluation_table(self)
        lines = [head, ["---"] * len(head), *rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([table, *self.notes])


_FIGURES: Mapping[str, Callable[[SetFigures], str]] = {
    "texts": lambda one: f"{one.num_texts:,}",
    "words of a text: mean": lambda one: f"{one.words[0]:.1f}",
    "words of a text: 5 % to 95 %": lambda one: f"{one.words[1]:.0f} to {one.words[3]:.0f}",
    "copies of an earlier text": lambda one: f"{one.duplicates:.1%}",
    "MAUVE to held-out text (1: alike)": lambda one: "" if one.mauve is None else f"{one.mauve:.3f}",
    "Fréchet distance to it (0: alike)": lambda one: "" if one.frechet is None else f"{one.frechet:.3g}",
    "classifier trained on it: accuracy": lambda one: (
        "" if one.classifier is None else f"{one.classifier.accuracy:.1%}"
    ),
    "classifier: macro F1": lambda one: "" if one.classifier is None else f"{one.classifier.macro_f1:.3f}",
    "n-grams that training records have": lambda one: "" if one.overlap is None else f"{one.overlap.shared:.1%}",
    "longest common run: median": lambda one: "" if one.overlap is None else f"{one.overlap.longest_median:g} words",
    "longest common run: largest": lambda one: "" if one.overlap is None else f"{one.overlap.longest} words",
    "texts that are training records": lambda one: "" if one.overlap is None else f"{one.overlap.whole:.2%}",
}
"""Figure, in words -> its value for a set."""


def evaluation_table(evaluation: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Return the table of an evaluation: its head, and a row for each figure that a set has, a column for each set."""
    rows = [[name, *(value(one) for one in evaluation.sets)] for name, value in _FIGURES.items()]
    head = ["", *(one.name for one in evaluation.sets)]
    return head, [row for row in rows if any(row[1:])]


def evaluate(
    synthetic: Sequence[LabelledTexts],
    real: LabelledTexts,
    train: LabelledTexts | None = None,
    embedder: Embedder | None = None,
    embedding: str | None = None,
    settings: EvaluationSettings | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Compare sets of synthetic texts with real ones.

    The real texts have their own rows, so that each figure has its yardstick: the training records (a distance and an
    accuracy that real text reaches), and the held-out records (the overlap that a text has which the model never saw).

    Args:
        synthetic: one set or more, each with a row.
        real: held-out real texts.
        train: the records that were trained on; None: no overlap is computed.
        embedder: for the distances; None: none is computed.
        embedding: its name.
        settings: of the comparison.
        say: gets a line before each part.

    Raises:
        ConfigError: the extra "synthetic" is needed and not installed, or too few texts are given.
    """
    settings = settings or EvaluationSettings()
    if not synthetic:
        raise ConfigError("there is no set of synthetic texts to evaluate: give one")
    sets = [*synthetic, *([train] if train is not None else [])]
    count = min(settings.most, *(len(one.texts) for one in (*sets, real)))
    notes = []
    if embedder is not None and count < _FEWEST:
        notes.append(f"No distance: {count} texts are too few; at least {_FEWEST} of each set are needed.")
        embedder = None
    chosen = [_some(one, count) for one in (*sets, real)]
    found: list[dict[str, Any]] = [{} for _ in (*sets, real)]
    if embedder is not None:
        say("embedding the texts")
        vectors = [embedder.embed(one.texts) for one in chosen]
        for figures, own in zip(found[:-1], vectors[:-1], strict=True):
            figures["frechet"] = frechet(vectors[-1], own)
            if settings.with_mauve:
                say("computing MAUVE")
                figures["mauve"] = mauve(vectors[-1], own)
    if settings.with_classifier:
        alike = min([settings.most, *(len(one.texts) for one in sets)])
        notes += _classified(sets, real, found, alike, say)
    if train is not None:
        say("comparing the texts with the training records")
        for figures, one in zip(found, (*sets, real), strict=True):
            if one is not train:
                figures["overlap"] = overlap(_some(one, settings.most).texts, train.texts, settings.ngram)
    return Evaluation(
        sets=tuple(_figures(one, figures) for one, figures in zip((*sets, real), found, strict=True)),
        compared=count if embedder is not None else 0,
        embedding=embedding if embedder is not None else None,
        reads_training=train is not None,
        notes=tuple(notes),
    )


def _classified(
    sets: Sequence[LabelledTexts],
    real: LabelledTexts,
    found: list[dict[str, Any]],
    number: int,
    say: Callable[[str], None],
) -> list[str]:
    """Train a classifier on equally many texts of each set with labels; return a line for each that has none."""
    if real.labels is None:
        return [f"No classifier: {real.name} has no labels."]
    notes = []
    for figures, one in zip(found, sets, strict=False):
        if one.labels is None:
            notes.append(f"No classifier of {one.name}: its texts have no labels.")
            continue
        say(f"training a classifier on {one.name}")
        own = _some(one, number)
        assert own.labels is not None
        figures["classifier"] = classify(own.texts, own.labels, real.texts, real.labels)
    return notes


def _some(one: LabelledTexts, most: int) -> LabelledTexts:
    numbers = some_of(len(one.texts), most)
    return one.part(numbers)


def _figures(one: LabelledTexts, figures: dict[str, Any]) -> SetFigures:
    lengths = [len(words_of(text)) for text in one.texts]
    low, median, high = (float(value) for value in np.quantile(lengths, (0.05, 0.5, 0.95)))
    copies = 1 - len({text.strip() for text in one.texts}) / len(one.texts)
    return SetFigures(
        name=one.name, num_texts=len(one.texts), words=(fmean(lengths), low, median, high), duplicates=copies, **figures
    )


def require_outside(path: str | Path) -> None:
    """Refuse a file of exact results in a folder that people publish.

    Args:
        path: of the results.

    Raises:
        ConfigError: a folder above it is that of a release, and the file is not in its ``not_for_release/``.
    """
    path, private = Path(path).resolve(), Path(EVALUATION_FILE).parent.name
    for folder in path.parents:
        if (folder / LEDGER_FILE).is_file() and path.relative_to(folder).parts[0] != private:
            raise ConfigError(
                f"--output {path} is in {folder}, which is for release, and results on private text are not: write "
                f"them to {folder / EVALUATION_FILE}, or outside of this folder"
            )


def note_evaluation(folder: str | Path) -> None:
    """Write into the ledger of a data set's folder that results on real text exist, and its report and card again.

    A folder without a ledger has no guarantee, and nothing is written.

    Args:
        folder: of a synthetic data set.

    Raises:
        ValueError: the ledger is damaged, or a run is writing it.
    """
    folder = Path(folder)
    if (folder / LEDGER_FILE).is_file():
        add_disclosure(folder, DISCLOSED)
    private_path(folder, EVALUATION_FILE)
