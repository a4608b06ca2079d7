"""Private Evolution: synthetic text without training, from a public model and noisy votes.

Place in the flow: `dpllm methods evolve RECIPE`. A public model writes texts. In each of T steps, every private record
votes for the candidate whose embedding is nearest. The votes get Gaussian noise. The candidates with most noisy votes
are kept, and the model writes variations of them, which are candidates of the next step. The model that writes sees no
private record: only noisy votes depend on the records, so ε is that of T Gaussian queries.

Source: Xie et al., arXiv:2403.01749 (Aug-PE: kept by rank, with their variations); Lin et al., arXiv:2305.15560. A
small local model cannot rephrase a text on demand, so a variation keeps the beginning of a text and writes the rest
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpllm.methods.evolve.votes import Floats, Int64Array, exact_votes, noisy_votes
from dpllm.methods.queries.run import QueryRun
from dpllm.methods.synthesize.filters import FilterSettings, TextFilter
from dpllm.methods.synthesize.making import Wanted, Writer, make_texts
from dpllm.methods.synthesize.texts import LABEL, TEXT
from dpllm.models.generation import Sampling


@dataclass(frozen=True, kw_only=True)
class Evolution:
    """Public settings of an evolution.

    Attributes are checked by the recipe's section (`dpllm.methods.evolve.section`).
    """

    number: int
    """Texts of the result, over all labels."""
    steps: int
    """T."""
    variations: int
    """Variations of each kept text in a step; the first step has as many texts in all, from prompts."""
    keep: tuple[float, float]
    """A variation keeps a share of the words between these two, drawn at random."""
    sampling: Sampling
    """How texts are drawn."""
    batch_size: int = 32
    """The most texts that are made together."""


@dataclass(frozen=True)
class PrivateRecords:
    """The private side of the votes."""

    vectors: Floats
    """(N, D) embeddings."""
    units: Int64Array
    """(N,) unit of each record."""
    labels: tuple[str, ...] | None = None
    """(N,) None: without labels."""


@dataclass(frozen=True)
class Candidate:
    """A text of the evolution, which begins with its prompt."""

    text: str
    label: str | None
    prompt: str


def evolve(
    run: QueryRun,
    records: PrivateRecords,
    model: Writer,
    embed: Callable[[Sequence[str]], Floats],
    wanted: Sequence[Wanted],
    settings: Evolution,
    noise_multiplier: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, str]]:
    """Return the texts of the last step, each with its label if there are labels.

    Guarantee: private records are read by `exact_votes` only, whose result gets the noise that was charged. Everything
    else follows from the noisy votes and the public models.

    Args:
        run: of the evolution; its plan has T histograms of votes.
        records: private.
        model: writes texts.
        embed: from texts to (n, D) embeddings, as of the records.
        wanted: public prompts, with the numbers of kept texts after each, as `Evolution.number` shares them out.
        settings: of the evolution.
        noise_multiplier: σ of the plan.
        say: gets a line in each step.
    """
    rng = run.randomness.generator()
    first = [replace(one, count=one.count * (settings.variations + 1)) for one in wanted]
    candidates = _written(model, first, settings)
    kept: list[Candidate] = []
    for step in range(settings.steps):
        vectors = embed([one.text for one in candidates])
        labels = [str(one.label) for one in candidates] if records.labels is not None else None
        exact = exact_votes(records.vectors, records.units, vectors, records.labels, labels)
        noisy = noisy_votes(run, noise_multiplier, exact)
        kept = _best(candidates, noisy, wanted)
        say(f"step {step + 1} of {settings.steps}: {len(kept):,} of {len(candidates):,} candidates are kept")
        if step + 1 < settings.steps:
            candidates = [*kept, *_varied(model, kept, settings, rng)]
    return [{**({} if one.label is None else {LABEL: one.label}), TEXT: one.text} for one in kept]


def _written(model: Writer, wanted: Sequence[Wanted], settings: Evolution) -> list[Candidate]:
    """Return new texts after the prompts, as far as the model writes any."""
    numbered = [replace(one, label=str(place)) for place, one in enumerate(wanted) if one.count]
    filters = TextFilter(FilterSettings(duplicates=True))
    made = make_texts(model, numbered, settings.sampling, filters, settings.batch_size)
    found = []
    for record in made.records:
        one = wanted[int(record[LABEL])]
        found.append(Candidate(_joined(str(one.prompt), record[TEXT]), one.label, str(one.prompt)))
    return found


def _varied(model: Writer, kept: Sequence[Candidate], settings: Evolution, rng: np.random.Generator) -> list[Candidate]:
    """Return the variations of the kept texts: each keeps the beginning of a text, and the rest is written again."""
    begun: list[tuple[Candidate, str]] = []
    for one in kept:
        words, least = one.text.split(), len(one.prompt.split())
        for share in rng.uniform(*settings.keep, size=settings.variations):
            begun.append((one, " ".join(words[: max(least, int(len(words) * share))])))
    prompts = [beginning for _, beginning in begun]
    texts = (text for batch in model.sample(prompts, settings.sampling, settings.batch_size) for text in batch)
    found = []
    for (one, beginning), rest in zip(begun, texts, strict=True):
        text = _joined(beginning, rest)
        if text:
            found.append(replace(one, text=text))
    return found


def _joined(beginning: str, rest: str) -> str:
    """Join the beginning of a text and its continuation; a model that leaves out the space between words gets one.

    >>> _joined("The Eagle", "is cheap."), _joined("The Eagle", ", a pub")
    ('The Eagle is cheap.', 'The Eagle, a pub')
    """
    rest = rest.rstrip()
    apart = bool(beginning and rest) and rest[0].isalnum()
    return f"{beginning}{' ' if apart else ''}{rest}".strip()


def _best(candidates: Sequence[Candidate], noisy: Floats, wanted: Sequence[Wanted]) -> list[Candidate]:
    """Return for each prompt its number of candidates, those with most noisy votes."""
    order = np.argsort(-noisy, kind="stable")
    left: dict[tuple[str | None, str], int] = {}
    for one in wanted:
        key = (one.label, str(one.prompt))
        left[key] = left.get(key, 0) + one.count
    kept = []
    for place in order.tolist():
        one = candidates[place]
        key = (one.label, one.prompt)
        if left.get(key, 0) > 0:
            left[key] -= 1
            kept.append(one)
    return kept
