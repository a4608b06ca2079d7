"""All attacks on one finished model that need only the model and the records: membership, LiRA, extraction.

Place in the flow: after the training, before the release; `dpllm methods attack` and `recipes/compare.py` call it. The
results are estimates on private records, which ε does not cover: scores of single records are never written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from dpllm.audit.canaries import CANARIES_FILE, CanarySet, record_of
from dpllm.audit.result import Estimate, json_text
from dpllm.audit.scores import (
    MembershipResult,
    TokenScores,
    bounds_of,
    check_exchangeable,
    interval,
    join_rows,
    judge_attack,
    membership_rows,
    membership_scores,
    token_scores,
)
from dpllm.config import ConfigError, Recipe
from dpllm.data.labels import IGNORE
from dpllm.data.records import required_columns
from dpllm.data.tokenization import RECORD
from dpllm.methods.attacks.extraction import (
    ExtractionSettings,
    PrefixHits,
    SampleHits,
    prefix_extraction,
    sampled_extraction,
)
from dpllm.methods.attacks.lira import (
    ShadowTraining,
    confidences,
    copies_of,
    draw_halves,
    lira_score,
    shadow_confidences,
)
from dpllm.methods.attacks.released import (
    Released,
    Sample,
    draw_sample,
    load_causal_model,
    load_released,
    record_key,
    starting_point,
)
from dpllm.privacy.accounting import History
from dpllm.privacy.checkpoints import MANIFEST_FILE
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.rounding import format_delta, format_epsilon
from dpllm.report.disclosures import ATTACK
from dpllm.report.model_card import add_disclosure

ATTACKS_FILE = "attacks.json"
PICTURE_FILE = "attacks.png"
NOTE = "Measured on private records, which ε does not cover; an attack that finds little proves nothing."

Progress = Callable[[str], None]
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """The attacks to run, and the number of records."""

    num_records: int = 1000
    """Largest number of members, and of non-members; a false positive rate of 0.1 % needs at least 1000."""
    reference: str | None = None
    """A model that saw none of the records. None: the model at the start of training, if not random."""
    shadows: int = 0
    """K, the number of shadow models of LiRA; 0: no LiRA."""
    shadow_training: ShadowTraining = field(default_factory=ShadowTraining)
    """Training of the shadow models."""
    extraction: ExtractionSettings | None = field(default_factory=ExtractionSettings)
    """Settings of the extraction attacks; None: no extraction."""
    seed: int = 0
    """Seed of the draw of records and of the shadows."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.num_records < 1 or self.shadows < 0:
            raise ConfigError(
                f"num_records must be at least 1 and shadows at least 0, got {self.num_records} and {self.shadows}"
            )


@dataclass(frozen=True, kw_only=True)
class AttackedRecords:
    """The records of the attacks, and how well the attacked model predicts them."""

    num: int
    """Number of members, and of non-members."""
    dropped: dict[str, int]
    """Reason -> number of records left out."""
    member_perplexity: float
    """exp of the mean loss per target token of the members."""
    held_out_perplexity: float
    """The same for the non-members."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A model that saw neither members nor non-members."""

    name: str
    """Its folder, or its name on the Hub."""
    auroc: Estimate
    """AUROC of its losses: about 1/2."""


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """Results of the attacks."""

    folder: str
    """Folder of the model."""
    epsilon: float | None
    """ε that the ledger charges, under zero-out adjacency; None: trained without privacy."""
    delta: float | None
    """Its δ."""
    records: AttackedRecords
    """The members and the non-members."""
    reference: Reference | None
    """The reference model, if there is one."""
    attacks: tuple[MembershipResult, ...]
    """Membership inference."""
    bounds: dict[float, float] | None
    """False positive rate -> largest share of members that any attack can find; None without a ledger."""
    settings: AttackSettings
    """The settings of the attacks."""
    history: History | None = None
    """The steps of the claim."""
    samples: tuple[SampleHits, ...] = ()
    """Verbatim spans in the model's text."""
    prefixes: tuple[PrefixHits, ...] = ()
    """Records continued word for word."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without scores of single records."""
        extraction, records, reference = self.settings.extraction, self.records, self.reference
        return {
            "folder": self.folder,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "num_members": records.num,
            "num_non_members": records.num,
            "dropped": records.dropped,
            "reference": None if reference is None else reference.name,
            "reference_auroc": None if reference is None else reference.auroc.to_dict(),
            "member_perplexity": records.member_perplexity,
            "held_out_perplexity": records.held_out_perplexity,
            "membership": [attack.to_dict() for attack in self.attacks],
            "true_positive_rate_bounds": self.bounds and {f"{rate:g}": value for rate, value in self.bounds.items()},
            "extraction": None
            if extraction is None
            else {
                "settings": dict(vars(extraction)),
                "samples": [hits.to_dict() for hits in self.samples],
                "prefixes": [hits.to_dict() for hits in self.prefixes],
            },
            "shadows": self.settings.shadows,
            "seed": self.settings.seed,
            "note": NOTE,
        }

    def save(self, folder: str | Path) -> Path:
        """Write attacks.json, and return its path."""
        path = Path(folder) / ATTACKS_FILE
        path.write_text(json_text(self.to_dict()), encoding="utf-8")
        return path


def _note_attack(folder: Path) -> None:
    """Write into the ledger of a run that its records were attacked; a folder without a guarantee has none."""
    if (folder / LEDGER_FILE).is_file() and not (folder / MANIFEST_FILE).is_file():
        add_disclosure(folder, ATTACK)


def attack_folder(
    folder: str | Path, settings: AttackSettings | None = None, progress: Progress = lambda text: None
) -> AttackReport:
    """Attack the model of a folder; the ledger of its run, if there is one, lists that this was done.

    Canaries that `dpllm audit prepare` put into its data count neither as members nor as non-members here: they have
    their own audit.

    Args:
        folder: a folder for `dpllm.methods.attacks.released.load_released`.
        settings: the attacks to run.
        progress: called with a description of each stage.

    Raises:
        AuditError: the folder lacks a file; too few records; members and non-members differ before training.
        DataError, ConfigError: records or recipe cannot be read.
    """
    settings = settings or AttackSettings()
    progress("reading the model")
    released = load_released(folder)
    _note_attack(Path(folder))  # before there is a result
    progress("drawing records")
    recipe = released.recipe
    sample = draw_sample(recipe, settings.num_records, settings.seed, _canaries_in(recipe))
    rows = released.rows(sample.records)
    progress("membership inference")
    tuned = _scores(released.model, released, rows)
    name = settings.reference or starting_point(released)
    base = public = reference = None
    if name is not None:
        base = load_causal_model(name, recipe.model.dtype, released.tokenizer)
        public = _scores(base, released, rows)
        reference = Reference(name=name, auroc=check_exchangeable(public, sample.included))
    scores = membership_scores(tuned, _target_texts(released, rows), public)
    if settings.shadows:
        if base is None:
            raise ConfigError(
                "LiRA trains shadows from the model at the start of training, but this training started with random "
                "weights: name a public model (--reference), or omit --shadows"
            )
        scores["LiRA"] = _lira(released, base, rows, confidences(tuned), settings, progress)
    samples, prefixes = _extract(released, sample, rows, settings, progress)
    members, others = _halves(tuned, sample)
    return AttackReport(
        folder=str(folder),
        epsilon=_epsilon(released),
        delta=None if released.plan is None else released.plan.delta,
        records=AttackedRecords(
            num=len(sample.members),
            dropped=sample.dropped,
            member_perplexity=_perplexity(members),
            held_out_perplexity=_perplexity(others),
        ),
        reference=reference,
        attacks=tuple(judge_attack(attack, values, sample.included) for attack, values in scores.items()),
        bounds=None if released.history is None else bounds_of(released.history, len(sample.non_members)),
        settings=settings,
        history=released.history,
        samples=samples,
        prefixes=prefixes,
    )


def attack_tables(report: AttackReport) -> list[Table]:
    """Return the tables for the screen: title, head, rows."""
    claim = "trained without privacy"
    if report.epsilon is not None and report.delta is not None:
        claim = f"ε = {format_epsilon(report.epsilon)} at δ = {format_delta(report.delta)}"
    title = f"membership inference: {report.records.num} members, {report.records.num} others; {claim}"
    tables: list[Table] = [(title, *membership_rows(report.attacks, report.bounds))]
    extraction = report.settings.extraction
    if extraction is not None:
        head = ["sampled after", "texts", "tokens", "texts with hits", "training alone", "both", "thinned", "held out"]
        rows = [[hits.prompts, *(f"{value:,}" for value in list(vars(hits).values())[1:])] for hits in report.samples]
        title = (
            f"verbatim spans of {extraction.span} tokens, each counted once: only in training rows, also in held-out "
            "rows; in the same number of training rows as held-out rows (thinned), and only in held-out rows"
        )
        tables.append((title, head, rows))
    return tables


def attack_facts(report: AttackReport) -> list[tuple[str, str]]:
    """Return the facts to print beside the tables."""
    facts = [
        ("perplexity of members", f"{report.records.member_perplexity:.4g}"),
        ("perplexity of held-out records", f"{report.records.held_out_perplexity:.4g}"),
    ]
    if report.reference is not None:
        facts.append(("AUROC of the reference, which saw neither", interval(report.reference.auroc)))
    if report.settings.extraction is not None:
        prefix, span = report.settings.extraction.prefix, report.settings.extraction.span
        for hits in report.prefixes:
            name = f"{hits.records} whose next {span} tokens it wrote, given {prefix}"
            facts.append((name, f"{hits.continued:,} of {hits.num_records:,}"))
    facts += [(f"left out: {reason}", f"{count:,}") for reason, count in report.records.dropped.items() if count]
    return [*facts, ("note", NOTE)]


def _canaries_in(recipe: Recipe) -> set[str]:
    """Return the keys of the records that an audit put into the data."""
    path = Path(recipe.data.path).with_name(CANARIES_FILE)
    if not path.is_file():
        return set()
    made = CanarySet.load(path)
    if made.data_name != Path(recipe.data.path).name:
        return set()
    columns = required_columns(recipe.data)
    records = (record_of(*pair, recipe.data) for canary in made.canaries for pair in canary.records)
    return {record_key([record[name] for name in columns]) for record in records}


def _scores(model: Any, released: Released, rows: datasets.Dataset) -> TokenScores:
    return join_rows(token_scores(model, rows, released.collator), rows[RECORD])


def _target_texts(released: Released, rows: datasets.Dataset) -> list[str]:
    """Return the text of each record's target tokens."""
    texts: dict[int, str] = {}
    for number, labels in zip(rows[RECORD], rows["labels"], strict=True):
        targets = [label for label in labels[1:] if label != IGNORE]
        texts[number] = texts.get(number, "") + str(released.tokenizer.decode(targets, skip_special_tokens=True))
    return list(texts.values())


def _lira(
    released: Released,
    base: Any,
    rows: datasets.Dataset,
    target_R: np.ndarray,
    settings: AttackSettings,
    progress: Progress,
) -> np.ndarray:
    included_KR = draw_halves(settings.shadows, len(target_R), np.random.default_rng(settings.seed))
    found = []
    trained = shadow_confidences(
        copies_of(base),
        released.recipe.model,
        rows,
        released.collator,
        included_KR,
        settings.shadow_training,
        settings.seed,
    )
    for number in range(settings.shadows):
        progress(f"shadow {number + 1} of {settings.shadows}")
        found.append(next(trained))
    return lira_score(target_R, np.array(found), included_KR)


def _extract(
    released: Released, sample: Sample, rows: datasets.Dataset, settings: AttackSettings, progress: Progress
) -> tuple[tuple[SampleHits, ...], tuple[PrefixHits, ...]]:
    if settings.extraction is None:
        return (), ()
    progress("extraction: sampling")
    training, held_out = released.rows(sample.train), released.rows(sample.held_out)
    samples = sampled_extraction(released.model, released.tokenizer, training, held_out, settings.extraction)
    progress("extraction: continuing records")
    is_member = np.asarray(rows[RECORD]) < len(sample.members)
    halves = {
        "members": rows.select(np.flatnonzero(is_member)),
        "non-members": rows.select(np.flatnonzero(~is_member)),
    }
    return tuple(samples), tuple(prefix_extraction(released.model, released.tokenizer, halves, settings.extraction))


def _halves(tokens: TokenScores, sample: Sample) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    size = len(sample.members)
    return tokens.log_probs[:size], tokens.log_probs[size:]


def _perplexity(log_probs: Sequence[np.ndarray]) -> float:
    loss = -float(np.concatenate(log_probs).mean())
    return math.exp(loss) if loss < 700 else math.inf


def _epsilon(released: Released) -> float | None:
    if released.plan is None or released.history is None:
        return None
    return released.plan.guarantee.of(released.history).under("zero-out")
