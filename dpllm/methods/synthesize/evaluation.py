"""Evaluation of synthetic text against real text: distances, a classifier, lengths, overlap with training records.

`dpllm methods evaluate` writes the result. Each figure that reads private text (held-out or training records) is an
exact result on it, so ε does not cover it: such results go to ``not_for_release/``, and the data set's ledger lists
that they were written.

The Fréchet distance and MAUVE are figures of samples: compare them with the distance of two samples of real text of the
same size, which is not 0 (MAUVE: not 1). Text of one language shares phrases whoever wrote it: compare the overlap with
that between the training records and text that the model never saw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from dpllm.config import ConfigError
from dpllm.config.extras import require
from dpllm.config.values import integer, nearest
from dpllm.data.readers import read_tables, why_unreadable
from dpllm.methods.synthesize.texts import LABEL, TEXT, words_of
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.private_folder import private_path
from dpllm.report.model_card import add_disclosure

if TYPE_CHECKING:
    from dpllm.methods.synthesize.embeddings import Embedder


TEXTS_NAMES = ("texts.jsonl", "texts.parquet")
"""Names of the file with the texts in the folder of a synthetic data set."""
_TEXT_COLUMNS = (TEXT, "completion", "ref", "sentence")


@dataclass(frozen=True)
class LabelledTexts:
    """Texts, each with its label if there are labels.

    Raises:
        ConfigError: there is no text.
    """

    name: str
    """For tables."""
    texts: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    """(len(texts),) None: no labels."""

    def __post_init__(self) -> None:
        """Check that there is a text."""
        if not self.texts:
            raise ConfigError(f"{self.name} holds no text: give a file with texts")

    def part(self, numbers: Sequence[int]) -> LabelledTexts:
        """Return the texts with these numbers."""
        labels = None if self.labels is None else tuple(self.labels[number] for number in numbers)
        return LabelledTexts(self.name, tuple(self.texts[number] for number in numbers), labels)


def texts_file(path: str | Path) -> Path:
    """Return the file of texts: the path itself, or the file in the folder of a synthetic data set.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in TEXTS_NAMES if (path / name).is_file()), None)
        if found is None:
            raise ConfigError(f"{path} holds neither {' nor '.join(TEXTS_NAMES)}: give a file of texts")
        return found
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    reason = why_unreadable(path)
    if reason is not None:
        raise ConfigError(f"{path}: cannot be read: {reason}")
    return path


def read_texts(
    path: str | Path, text_column: str | None = None, label_column: str | None = None, name: str | None = None
) -> LabelledTexts:
    """Read texts, and their labels if there are any.

    Args:
        path: a file, or the folder of a synthetic data set.
        text_column: None: "text", or another usual name.
        label_column: None: "label", if there is one.
        name: for tables; None: the path.

    Raises:
        ConfigError: the file or a column is missing, or a record has no text; the message gives its number only.
    """
    file = texts_file(path)
    texts: list[Any] = []
    labels: list[Any] = []
    for table in read_tables(file):
        names = table.column_names
        chosen = text_column or next((one for one in _TEXT_COLUMNS if one in names), None)
        chosen = chosen or (names[0] if len(names) == 1 else None)
        if chosen is None or chosen not in names:
            asked = f"no column '{chosen}'{nearest(chosen, names) or '.'}" if chosen else "no column named text."
            raise ConfigError(f"{file}: {asked} It has {', '.join(names)}: name the column of texts")
        if label_column is not None and label_column not in names:
            raise ConfigError(
                f"{file}: no column '{label_column}'{nearest(label_column, names) or '.'} It has {', '.join(names)}: "
                "name the column of labels"
            )
        texts += table.column(chosen).to_pylist()
        known = label_column or (LABEL if LABEL in names else None)
        labels += table.column(known).to_pylist() if known is not None else []
    wrong = next((number for number, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise ConfigError(f"{file}: record {wrong} has no text: fill it in, or remove it")
    missing = next((number for number, label in enumerate(labels) if label is None), None)
    if missing is not None and label_column is not None:
        raise ConfigError(f"{file}: record {missing} has no label: fill it in, or remove it")
    own = tuple(map(str, labels)) if labels and missing is None else None
    return LabelledTexts(name or str(path), tuple(texts), own)


Words = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The overlap of two sets of texts, word for word."""

    ngram: int
    """n."""
    shared: float
    """Share of the distinct n-grams of the texts that occur in the others; 0 if there are none."""
    longest_median: float
    """Median over the texts of the longest run of words that occurs in one of the others."""
    longest: int
    """The longest such run of all texts, in words."""
    whole: float
    """Share of the texts that are equal to one of the others."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


class Runs:
    """The runs of words of some texts, and which of them occur in other texts.

    A suffix automaton (Blumer et al. 1985) of the concatenated texts. The others are read one by one and not stored, so
    memory grows with the texts only, and time with the words of both.

    >>> runs = Runs([["the", "red", "dog", "sleeps"], ["barks", "one"]])
    >>> runs.mark(["a", "red", "dog", "barks"])
    >>> runs.mark(["one", "dog", "sleeps"])
    >>> runs.longest()
    [2, 1]
    """

    def __init__(self, texts: Sequence[Words]) -> None:
        """Build the automaton; unique separators keep runs within one text."""
        self._texts = texts
        self._next: list[dict[str, int]] = [{}]
        self._link, self._length = [-1], [0]
        last = 0
        for number, words in enumerate(texts):
            for word in (*words, f"\0{number}"):
                last = self._extend(last, word)
        self._marked = [0] * len(self._length)

    def mark(self, words: Words) -> None:
        """Mark the runs of another text."""
        state, length = 0, 0
        for word in words:
            while state and word not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if word in self._next[state]:
                state, length = self._next[state][word], length + 1
            self._marked[state] = max(self._marked[state], length)

    def longest(self) -> list[int]:
        """Return, for each text, the length of its longest run that occurs in one of the others."""
        marked = list(self._marked)
        for state in sorted(range(1, len(marked)), key=self._length.__getitem__, reverse=True):
            if marked[state]:  # then its shorter suffixes occur too
                marked[self._link[state]] = self._length[self._link[state]]
        found = []
        for words in self._texts:
            state, most = 0, 0
            for word in words:
                state = self._next[state][word]
                longest = state
                while longest and not marked[longest]:
                    longest = self._link[longest]
                most = max(most, marked[longest] if longest else 0)
            found.append(most)
        return found

    def _extend(self, last: int, word: str) -> int:
        new = self._state(self._length[last] + 1, {}, 0)
        place = last
        while place != -1 and word not in self._next[place]:
            self._next[place][word] = new
            place = self._link[place]
        if place == -1:
            return new
        found = self._next[place][word]
        if self._length[found] == self._length[place] + 1:
            self._link[new] = found
            return new
        copy = self._state(self._length[place] + 1, dict(self._next[found]), self._link[found])
        while place != -1 and self._next[place].get(word) == found:
            self._next[place][word] = copy
            place = self._link[place]
        self._link[found] = self._link[new] = copy
        return new

    def _state(self, length: int, following: dict[str, int], link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        return len(self._length) - 1


def overlap(texts: Sequence[str], others: Iterable[str], ngram: int = 8) -> Overlap:
    """Compare texts with others, word for word; case and punctuation do not matter.

    >>> overlap(["a red dog ran", "he slept"], ["A red dog sat.", "He slept!"], ngram=3)
    Overlap(ngram=3, shared=0.5, longest_median=2.5, longest=3, whole=0.5)
    """
    own = [words_of(text) for text in texts]
    grams = {gram for words in own for gram in _ngrams(words, ngram)}
    wholes = {tuple(words) for words in own}
    shared: set[tuple[str, ...]] = set()
    same: set[tuple[str, ...]] = set()
    runs = Runs(own)
    for other in others:
        words = words_of(other)
        shared.update(gram for gram in _ngrams(words, ngram) if gram in grams)
        if tuple(words) in wholes:
            same.add(tuple(words))
        runs.mark(words)
    longest = runs.longest()
    return Overlap(
        ngram=ngram,
        shared=len(shared) / len(grams) if grams else 0.0,
        longest_median=float(median(longest)),
        longest=max(longest),
        whole=fmean(tuple(words) in same for words in own),
    )


def _ngrams(words: Words, n: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def longest_runs(texts: Sequence[str], canaries: Sequence[str]) -> NDArray[np.float64]:
    """Return, (len(canaries),), the number of words in each canary's longest run that occurs in a text.

    >>> longest_runs(["a red fox ran home"], ["my red fox ran", "one old dog sat"]).tolist()
    [3.0, 0.0]
    """
    runs = Runs([words_of(canary) for canary in canaries])
    for text in texts:
        runs.mark(words_of(text))
    return np.asarray(runs.longest(), dtype=np.float64)


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
    """Return at most this many numbers below ``count``, chosen by a public constant, in increasing order.

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
    """Share of correct labels."""
    macro_f1: float
    """Mean over the labels of F1."""
    majority: float
    """Accuracy of always predicting the commonest label of the tested texts."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


def classify(texts: Texts, labels: Sequence[str], tested: Texts, truth: Sequence[str]) -> Accuracy:
    """Train a classifier on texts and test it on real held-out texts: are the labels right and useful?

    Words and pairs of words weighted by TF-IDF, and logistic regression, both by scikit-learn.

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
"""The report's name of these results, which ε does not cover."""
_FEWEST = 50  # texts for a meaningful distance


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
    """The figures of one set of texts; None: not requested, or meaningless for this set."""

    name: str
    num_texts: int
    words: tuple[float, float, float, float]
    """Mean, 5 % quantile, median and 95 % quantile of the number of words of a text."""
    duplicates: float
    """Share of the texts that are copies of an earlier one."""
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
    """The figures of all sets, the synthetic ones first."""

    sets: tuple[SetFigures, ...]
    compared: int
    """Number of texts of each set in the distances."""
    embedding: str | None
    """Name of the embedding model; None: no distance was computed."""
    reads_training: bool
    """Whether training records were read."""
    notes: tuple[str, ...] = field(default=())
    """Why figures are missing."""

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
        """Write JSON, and a table in Markdown next to it."""
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
"""Name of a figure -> its value for a set."""


def evaluation_table(evaluation: Evaluation) -> tuple[list[str], list[list[str]]]:
    """Return the table of an evaluation: its head, and rows of figures with a column for each set."""
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

    The real texts have their own rows, as a yardstick for each figure: the training records for distance and accuracy,
    the held-out records for the overlap of texts that the model never saw.

    Args:
        synthetic: one set or more.
        real: held-out real texts.
        train: the records that were trained on; None: no overlap is computed.
        embedder: for the distances; None: no distance is computed.
        embedding: name of the embedding model.
        settings: of the comparison.
        say: gets a line before each part.

    Raises:
        ConfigError: the extra "synthetic" is not installed, or there are too few texts.
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
    """Train a classifier on equally many texts of each set with labels; return a note for each without."""
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
    """Refuse to write exact results into a folder for release.

    Raises:
        ConfigError: a parent folder is that of a release, and the file is not in its ``not_for_release/``.
    """
    path, private = Path(path).resolve(), Path(EVALUATION_FILE).parent.name
    for folder in path.parents:
        if (folder / LEDGER_FILE).is_file() and path.relative_to(folder).parts[0] != private:
            raise ConfigError(
                f"--output {path} is in {folder}, which is for release, and results on private text are not: write "
                f"them to {folder / EVALUATION_FILE}, or outside of this folder"
            )


def note_evaluation(folder: str | Path) -> None:
    """Record in the ledger of a data set that results on real text exist, and update its report and card.

    A folder without a ledger has no guarantee and is not changed.

    Raises:
        ValueError: the ledger is damaged, or a run is writing to it.
    """
    folder = Path(folder)
    if (folder / LEDGER_FILE).is_file():
        add_disclosure(folder, DISCLOSED)
    private_path(folder, EVALUATION_FILE)
