"""Extraction: text of a model that is word for word in its training data.

Two measures:

* *Samples*: the model writes without a prompt, after prompts, or after one word repeated many times (the divergence
  attack of Nasr et al., arXiv:2311.17035); spans of n tokens that are in the training rows are counted. Spans that are
  also or only in held-out text are counted separately: any model of the language writes them. Only an excess over these
  is memorisation.
* *Prefixes*: the model continues the beginning of a record (discoverable memorisation; Carlini et al.,
  arXiv:2202.07646). It counts how often the next n tokens are those of the record, for members and for non-members.

A private model can also write spans of training rows: those that many records share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from dpllm.audit.bounds import AuditError
from dpllm.config import ConfigError
from dpllm.data.labels import IGNORE
from dpllm.models.writing import LIKELIEST, continuations

_SEPARATOR = -1  # between rows: no token


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """Settings of the sampling, and the length of a verbatim span."""

    num_samples: int = 200
    """Samples per kind of prompt."""
    new_tokens: int = 64
    """Largest number of tokens of a sample."""
    span: int = 20
    """n: number of consecutive tokens that count as verbatim."""
    prefix: int = 10
    """Number of target tokens of a record that the model is given before it continues."""
    temperature: float = 1.0
    """Temperature of sampling; prefixes are continued greedily."""
    top_k: int = 40
    """Sample among this many likeliest tokens, as Carlini et al. (arXiv:2012.07805) do; 0: among all."""
    word: str = "company"
    """The word that is repeated."""
    repeats: int = 50
    """How often it is repeated."""
    seed: int = 0
    """Seed of the samples."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("num_samples", "new_tokens", "span", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the extraction must be at least 1, got {getattr(self, name)}")
        if self.prefix < 0 or self.top_k < 0 or not 0 < self.temperature < math.inf:
            raise ConfigError(
                "prefix and top_k of the extraction cannot be negative, and temperature must be above 0, got "
                f"{self.prefix}, {self.top_k} and {self.temperature}"
            )
        if self.new_tokens < self.span or not self.word.strip():
            raise ConfigError(
                f"a sample of {self.new_tokens} tokens holds no span of {self.span}, or the word to repeat is empty: "
                "raise new_tokens, or lower span"
            )


class SpanIndex:
    """All spans of n tokens of some rows; no span crosses from one row into another.

    >>> SpanIndex([[1, 2, 3, 4], [5, 6]], span=2).find([9, 2, 3, 4, 5, 6]).tolist()
    [False, True, True, False, True]
    """

    def __init__(self, rows: Sequence[Sequence[int]], span: int) -> None:
        """Hash every span, and sort."""
        self.span = span
        self._coefficients = np.random.default_rng(20311).integers(1, 2**63, size=span, dtype=np.uint64) * 2 + 1
        parts = [np.append(np.asarray(row, dtype=np.int64), _SEPARATOR) for row in rows]
        self._tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        hashes, starts = self._hashes(self._tokens), np.arange(max(0, len(self._tokens) - span + 1))
        ends_T = np.cumsum(self._tokens == _SEPARATOR)
        within = ends_T[span - 1 :] - np.concatenate(([0], ends_T[: len(starts) - 1])) == 0 if len(starts) else []
        hashes, starts = hashes[within], starts[within]
        self._hash, first = np.unique(hashes, return_index=True)
        self._start = starts[first]

    def __len__(self) -> int:
        return len(self._hash)

    def find(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Return for each span of a text, (T - n + 1,), whether it is in a row."""
        given = np.asarray(tokens, dtype=np.int64)
        hashes = self._hashes(given)
        if len(hashes) == 0 or len(self) == 0:
            return np.zeros(len(hashes), dtype=bool)
        place = np.minimum(np.searchsorted(self._hash, hashes), len(self) - 1)
        found = self._hash[place] == hashes
        offsets = np.arange(self.span)
        for number in np.flatnonzero(found):  # equal hashes are compared token by token
            start = self._start[place[number]]
            found[number] = bool((self._tokens[start + offsets] == given[number + offsets]).all())
        return found

    def _hashes(self, tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
        length = len(tokens) - self.span + 1
        hashes = np.zeros(max(0, length), dtype=np.uint64)
        for place, coefficient in enumerate(self._coefficients if length > 0 else ()):
            window = tokens[place : place + length].astype(np.uint64) + np.uint64(1)
            window = (window ^ (window >> np.uint64(7))) * coefficient
            hashes += window ^ (window >> np.uint64(29))
        return hashes


@dataclass(frozen=True)
class SampleHits:
    """Verbatim spans in the model's text after one kind of prompt."""

    prompts: str
    """The kind of prompt."""
    num_samples: int
    """Number of texts sampled."""
    num_tokens: int
    """Total number of their tokens."""
    samples: int
    """Number of samples with a span that is in a training row and in no held-out row."""
    training: int
    """Number of different spans that are in training rows and in no held-out row."""
    both: int
    """Number of different spans that are in both."""
    thinned: int
    """Those of `training` that are in a random subset of the training rows, as large as the held-out rows."""
    held_out: int
    """Number of different spans that are only in held-out rows: written verbatim without having been seen. Compare
    with `thinned`."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


@dataclass(frozen=True)
class PrefixHits:
    """Records that the model continued word for word."""

    records: str
    """The kind of records: "members" or "non-members"."""
    num_records: int
    """Number of records that are long enough."""
    continued: int
    """Number of records whose next n target tokens the model wrote by greedy decoding."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


def sample_hits(
    prompts: str, texts: Sequence[Sequence[int]], training: SpanIndex, thinned: SpanIndex, held_out: SpanIndex
) -> SampleHits:
    """Count the verbatim spans of sampled texts.

    >>> held_out = SpanIndex([[3, 4, 5]], span=2)
    >>> training = SpanIndex([[1, 2, 3, 4]], span=2)
    >>> sample_hits("nothing", [[1, 2, 3, 4, 5], [7, 8]], training, training, held_out).to_dict()
    {'prompts': 'nothing', 'num_samples': 2, 'num_tokens': 7, 'samples': 1, 'training': 2, 'both': 1, 'thinned': 2,
    'held_out': 1}
    """
    seen: dict[str, set[tuple[int, ...]]] = {"training": set(), "both": set(), "thinned": set(), "held_out": set()}
    samples = 0
    for text in texts:
        in_training, in_held_out = training.find(text), held_out.find(text)
        samples += bool((in_training & ~in_held_out).any())
        kinds = {
            "training": in_training & ~in_held_out,
            "both": in_training & in_held_out,
            "thinned": thinned.find(text) & ~in_held_out,
            "held_out": in_held_out & ~in_training,
        }
        for kind, places in kinds.items():
            seen[kind].update(tuple(text[start : start + training.span]) for start in np.flatnonzero(places).tolist())
    counts = {kind: len(spans) for kind, spans in seen.items()}
    return SampleHits(prompts, len(texts), sum(map(len, texts)), samples, **counts)


def sampled_extraction(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    training: datasets.Dataset,
    held_out: datasets.Dataset,
    settings: ExtractionSettings,
) -> list[SampleHits]:
    """Sample after each kind of prompt and count verbatim spans.

    The kinds are: only the token that begins a text; the prompts of training records and of held-out ones, if records
    have prompts; one word repeated many times.

    Raises:
        AuditError: the tokenizer has no token to begin with; the model's context is too short for a span.
    """
    rng = np.random.default_rng(settings.seed)
    some = training.select(np.sort(rng.permutation(len(training))[: len(held_out)]))
    indexes = [SpanIndex(rows["input_ids"], settings.span) for rows in (training, some, held_out)]
    found = []
    for name, prompts in _prompts(tokenizer, training, held_out, settings, rng).items():
        texts = written(model, tokenizer, prompts, settings.new_tokens, settings.span, settings)
        found.append(sample_hits(name, texts, *indexes))
    return found


def _prompts(
    tokenizer: PreTrainedTokenizerBase,
    training: datasets.Dataset,
    held_out: datasets.Dataset,
    settings: ExtractionSettings,
    rng: np.random.Generator,
) -> Mapping[str, list[list[int]]]:
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise AuditError(
            "the tokenizer has neither a beginning nor an end token, so the model cannot write without a prompt. Set "
            "its bos_token or eos_token"
        )
    kinds = {"nothing": [[int(begin)]] * settings.num_samples}
    for name, rows in (("training prompts", training), ("held-out prompts", held_out)):
        heads = [ids[: _first_target(labels)] for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True)]
        heads = [head for head in heads if len(head) > 1]
        if heads:
            chosen = rng.integers(len(heads), size=settings.num_samples)
            kinds[name] = [heads[number] for number in chosen]
    word = list(tokenizer(" ".join([settings.word] * settings.repeats), verbose=False).input_ids)
    if word[-1] == tokenizer.eos_token_id:
        word.pop()
    kinds[f"“{settings.word}” repeated"] = [word] * settings.num_samples
    return kinds


def prefix_extraction(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows_of: Mapping[str, datasets.Dataset],
    settings: ExtractionSettings,
) -> list[PrefixHits]:
    """Let the model continue a record after its first target tokens, and compare the text with the record."""
    found = []
    for name, rows in rows_of.items():
        prompts, wanted = [], []
        for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
            start = _first_target(labels) + settings.prefix
            if len(ids) >= start + settings.span:
                prompts.append(ids[:start])
                wanted.append(ids[start : start + settings.span])
        texts = written(model, tokenizer, prompts, settings.span, settings.span, None)
        hits = sum(text == own for text, own in zip(texts, wanted, strict=True))
        found.append(PrefixHits(name, len(prompts), hits))
    return found


def _first_target(labels: Sequence[int]) -> int:
    """Return the position of the first token that is predicted; the first token of a row never is."""
    return next((place for place, label in enumerate(labels) if place > 0 and label != IGNORE), len(labels))


def written(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    least: int,
    sampling: ExtractionSettings | None,
) -> list[list[int]]:
    """Let the model continue each prompt, up to its end-of-sequence token, which is kept.

    Args:
        model: a causal language model, on its device.
        tokenizer: its own.
        prompts: token ids. A prompt that is too long for the model loses its beginning.
        new_tokens: largest number of tokens of a continuation.
        least: number of tokens that must fit after a prompt.
        sampling: temperature, top-k and seed; None: always the likeliest token.

    Raises:
        AuditError: the model's context is too short for a prompt token and `least` tokens.
    """
    context = getattr(model.config, "max_position_embeddings", None) or new_tokens + max(map(len, prompts), default=1)
    if context <= least:
        raise AuditError(f"the model's context of {context} tokens is too short for a span of {least}: lower the span")
    new_tokens = min(new_tokens, max(least, context - max(map(len, prompts), default=1)))
    choose: Mapping[str, Any] = LIKELIEST
    if sampling is not None:
        choose = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": 1.0}
    short = [prompt[-(context - new_tokens) :] for prompt in prompts]
    seed = 0 if sampling is None else sampling.seed
    return continuations(model, tokenizer, short, new_tokens, choose, seed)
