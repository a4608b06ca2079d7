"""A classifier that learns from one set of labelled texts and is tested on another.

Place in the flow: part of the evaluation: trained on synthetic text and tested on real held-out text, it shows whether
the labels of the synthetic texts are right and useful. Words and pairs of words weighted by TF-IDF, and logistic
regression, both by scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dpllm.config import ConfigError
from dpllm.config.extras import require

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
    """Train on texts and test on others.

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
