"""Figures that compare texts with their references: BLEU and ROUGE by their libraries, exact match, token F1.

Place in the flow: asked by `dpllm.training.held_out` with the texts that a model wrote.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import zip_longest
from statistics import fmean

Texts = Sequence[str]
References = Sequence[Sequence[str]]
"""For each text one or more references."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bleu(texts: Texts, references: References) -> float:
    """Return the corpus BLEU, 0 to 100, each text compared with all of its references.

    It is sacreBLEU's with its default settings (case-sensitive, tokenizer 13a, exponential smoothing; Post 2018,
    arXiv:1804.08771). Texts may have different numbers of references.

    Raises:
        ModuleNotFoundError: the extra "metrics" is not installed.
    """
    streams = list(zip_longest(*references))  # the n-th reference of every text, None where there are fewer
    return float(import_module("sacrebleu").corpus_bleu(list(texts), streams, force=True).score)


def rouge(kind: str, texts: Texts, references: References) -> float:
    """Return the mean ROUGE F-measure, 0 to 100, of each text and the reference that it is closest to.

    It is that of the package rouge-score, without stemming (Lin 2004: ROUGE, a package for automatic evaluation of
    summaries).

    Args:
        kind: "rouge1", "rouge2" or "rougeL".
        texts: to compare.
        references: of each text.

    Raises:
        ModuleNotFoundError: the extra "metrics" is not installed.
    """
    scorer = import_module("rouge_score.rouge_scorer").RougeScorer([kind], use_stemmer=False)
    pairs = zip(texts, references, strict=True)
    return 100 * fmean(float(scorer.score_multi(list(own), text)[kind].fmeasure) for text, own in pairs)


def exact_match(texts: Texts, references: References) -> float:
    """Return the share of texts that equal one of their references.

    >>> exact_match(["two", "four"], [["one", "two"], ["three"]])
    0.5
    """
    return fmean(text in own for text, own in zip(texts, references, strict=True))


def token_f1(texts: Texts, references: References) -> float:
    """Return the mean F1 of the words of a text and of the reference that shares most of them.

    >>> token_f1(["red fox"], [["fox", "dog"]])
    0.6666666666666666
    """
    pairs = zip(texts, references, strict=True)
    return fmean(max(_overlap(text.split(), other.split()) for other in own) for text, own in pairs)


def plain(answer: str) -> str:
    """Return an answer without case, punctuation, articles and more than single spaces, as SQuAD compares answers.

    Source: Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1.

    >>> plain("The  U.S. Army,")
    'us army'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def _overlap(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:  # "no answer" is right only where there is none
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


TEXT_METRICS: Mapping[str, Callable[[Texts, References], float]] = {
    "bleu": bleu,
    "rouge1": lambda texts, references: rouge("rouge1", texts, references),
    "rouge2": lambda texts, references: rouge("rouge2", texts, references),
    "rougeL": lambda texts, references: rouge("rougeL", texts, references),
    "exact_match": exact_match,
    "token_f1": token_f1,
}
"""Names of `dpllm.config.metrics.METRICS` -> function of texts and their references."""
