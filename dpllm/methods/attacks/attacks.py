"""All attacks on one finished model that need only the model and the records: membership, LiRA, extraction.

`dpllm methods attack` and `recipes/compare.py` call them, after the training and before the release. `load_released`
reads the output of either; `draw_sample` draws records that were trained on and the same number that were not. The
results are estimates on private records, which ε does not cover: scores of single records are never written out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from dpllm.audit.bounds import AuditError
from dpllm.audit.canaries import CANARIES_FILE, CanarySet, record_of
from dpllm.audit.result import Estimate, json_text, roc_curve
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
from dpllm.config import PRETRAINED_FOLDER, RECIPE_FILE, ConfigError, DataConfig, Recipe, load_recipe
from dpllm.config.recipe import refuse_trainer
from dpllm.data.labels import IGNORE
from dpllm.data.messages import is_conversation, read_messages
from dpllm.data.records import required_columns
from dpllm.data.rows import RowCollator, load_train_and_eval, tokenize_records, unit_index_of
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
from dpllm.models.load import DTYPES, NO_CODE, load_tokenizer
from dpllm.privacy.accounting import History
from dpllm.privacy.checkpoints import MANIFEST_FILE
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.risk import tradeoff_curve
from dpllm.privacy.rounding import format_delta, format_epsilon
from dpllm.privacy.stated import claimed_history
from dpllm.report.disclosures import ATTACK
from dpllm.report.figures import BLUE, GREY, ORANGE
from dpllm.report.model_card import add_disclosure

FEWEST_RECORDS = 20
"""Smallest number of members, and of non-members; with fewer, an attack's figures would be noise."""


@dataclass(frozen=True)
class Released:
    """A finished model with its recipe, tokenizer, plan and history."""

    folder: Path
    """Folder of the model."""
    recipe: Recipe
    """The recipe of its training."""
    model: Any
    """The model, with its adapter if it has one, in evaluation mode."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer."""
    plan: PrivacyPlan | None = None
    """The plan of a private run; None for a model that was trained without privacy."""
    history: History | None = None
    """The steps in the ledger of a private run."""

    @property
    def collator(self) -> RowCollator:
        """Pads rows for the model."""
        return RowCollator(pad_token_id=int(self.tokenizer.pad_token_id))

    def rows(self, records: datasets.Dataset) -> datasets.Dataset:
        """Tokenize records as in the training."""
        return tokenize_records(records, self.tokenizer, self.recipe.data)


def load_released(folder: str | Path) -> Released:
    """Load a finished model with its recipe, its tokenizer and, if it is private, its claim.

    Args:
        folder: a model in the format of transformers or peft, its tokenizer, and the recipe.yaml of its training; also
            plan and ledger if the training was private.

    Raises:
        AuditError: recipe, tokenizer or model is missing, or the model gives no probability to each token.
    """
    folder = Path(folder)
    if not (folder / RECIPE_FILE).is_file():
        raise AuditError(
            f"{folder} holds no {RECIPE_FILE}, so the model's training records are unknown. Give the output folder of "
            "dpllm train, or copy the recipe into this folder"
        )
    recipe = load_recipe(folder / RECIPE_FILE)
    refuse_trainer(recipe, "An attack on a released model")
    if recipe.model.task != "causal_lm":
        raise AuditError(
            f"{folder} holds a model for {recipe.model.task}. These attacks read the probability that a causal "
            "language model gives each token of a record; a classifier or an encoder-decoder needs other attacks"
        )
    if not (folder / "tokenizer_config.json").is_file():
        raise AuditError(f"{folder} holds no tokenizer (tokenizer_config.json): save the model's tokenizer there")
    own = dataclasses.replace(recipe.model, name=str(folder), config=None, tokenizer=None, tokenizer_vocab_size=None)
    tokenizer = load_tokenizer(own)
    model = load_causal_model(str(folder), recipe.model.dtype, tokenizer)
    if not (folder / LEDGER_FILE).is_file():
        return Released(folder, recipe, model, tokenizer)
    plan, contents = PrivacyPlan.load(folder / PLAN_FILE), read_ledger(folder / LEDGER_FILE)
    if plan.seeded or contents.seeded:
        raise AuditError(
            f"{folder} used a fixed seed, so nothing in it is private, and the bounds next to the attacks would be "
            "untrue: train without privacy.seed"
        )
    return Released(folder, recipe, model, tokenizer, plan, claimed_history(plan, contents))


def load_causal_model(name: str, dtype: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load a causal language model for evaluation.

    Raises:
        AuditError: it cannot be loaded, or has fewer tokens than the tokenizer.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], **NO_CODE)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise AuditError(f"the model {name} cannot be loaded: {reason}. Give a folder or a Hub name") from error
    known = int(model.get_input_embeddings().weight.shape[0])
    if known < len(tokenizer):
        raise AuditError(
            f"the model {name} has {known} tokens but the tokenizer has {len(tokenizer)}: they do not belong "
            "together. Name a reference that has the same tokenizer"
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return model.to(accelerator or "cpu").eval()


def starting_point(released: Released) -> str | None:
    """Return the folder or Hub name of the starting model of the private training; None if its weights were random."""
    if released.recipe.public_pretrain is not None:
        beside = (released.folder, Path(released.recipe.train.get("output_dir", released.folder)))
        for folder in beside:
            if (folder / PRETRAINED_FOLDER / "config.json").is_file():
                return str(folder / PRETRAINED_FOLDER)
        raise AuditError(
            f"{released.folder} lacks {PRETRAINED_FOLDER}/, the starting model of the private training. Put it "
            "there, or name a reference model"
        )
    return released.recipe.model.name


@dataclass(frozen=True)
class Sample:
    """Records that were trained on, and the same number that were not."""

    members: datasets.Dataset
    """(n,) records, drawn at random from those that were trained on."""
    non_members: datasets.Dataset
    """(n,) records, drawn at random from the held-out ones."""
    train: datasets.Dataset
    """All records that were trained on."""
    held_out: datasets.Dataset
    """All held-out records whose text was not trained on."""
    dropped: dict[str, int]
    """Reason -> number of records left out."""

    @property
    def records(self) -> datasets.Dataset:
        """(2n,) members, then non-members."""
        return datasets.concatenate_datasets([self.members, self.non_members])

    @property
    def included(self) -> np.ndarray:
        """(2n,) whether a record of `records` is a member."""
        return np.arange(2 * len(self.members)) < len(self.members)


def draw_sample(recipe: Recipe, num_records: int, seed: int = 0, leave_out: Collection[str] = ()) -> Sample:
    """Draw equally many members and non-members, each text once.

    A bound on an attack holds for a record whose text entered the data once. It applies to an estimate only if members
    and non-members come from the same distribution. So texts in both, and texts that were trained on more than once,
    are left out and counted.

    Raises:
        AuditError: there are no held-out records, too few usable ones, or it is unknown which rows of a user were used.
    """
    train, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    if held_out is None:
        raise AuditError(
            "the recipe holds out no records, so there is no non-member to compare with. Hold out a random share "
            "before the training: data.eval=0.1"
        )
    train = train.select(_rows_trained_on(recipe, train))
    train_keys, held_out_keys = _keys(train, recipe.data), _keys(held_out, recipe.data)
    times, skip, seen = Counter(train_keys), set(leave_out), set[str]()
    members = [number for number, key in enumerate(train_keys) if times[key] == 1 and key not in skip]
    non_members, distinct = [], []
    for number, key in enumerate(held_out_keys):
        if key not in times and key not in skip:
            non_members.append(number)
            if key not in seen:
                distinct.append(number)
                seen.add(key)
    dropped = {
        "trained on more than once": sum(count > 1 and key not in skip for key, count in times.items()),
        "held out, and trained on as well": sum(key in times and key not in skip for key in held_out_keys),
        "held out more than once": len(non_members) - len(distinct),
    }
    size = min(num_records, len(members), len(distinct))
    if size < FEWEST_RECORDS:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count) or "none left out"
        raise AuditError(
            f"{len(members)} members and {len(distinct)} non-members can be compared ({reasons}), of {num_records} "
            f"requested; fewer than {FEWEST_RECORDS} of each show nothing. Hold out more records "
            "(data.eval), and remove duplicates from the data before the training"
        )
    rng = np.random.default_rng(seed)
    chosen = [np.sort(rng.permutation(np.array(numbers))[:size]) for numbers in (members, distinct)]
    return Sample(train.select(chosen[0]), held_out.select(chosen[1]), train, held_out.select(non_members), dropped)


def record_key(values: Collection[Any]) -> str:
    """Return a key that identifies a record's text."""
    plain = [read_messages(value, "a record") if is_conversation(value) else value for value in values]
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _keys(records: datasets.Dataset, config: DataConfig) -> list[str]:
    columns = records.select_columns(required_columns(config)).to_dict()
    return [record_key(values) for values in zip(*columns.values(), strict=True)]


def _rows_trained_on(recipe: Recipe, train: datasets.Dataset) -> np.ndarray:
    """Return the numbers of the records that the run could draw: of a user above the bound, only the first ones."""
    if recipe.privacy.protects != "user":
        return np.arange(len(train))
    units = unit_index_of(train, recipe.privacy)
    if recipe.privacy.rows_kept == "random" and units.rows_dropped:
        raise AuditError(
            f"{units.rows_dropped} records were left out of the training by a secret draw (privacy.rows_kept=random), "
            'so the members are unknown. Attack a run with privacy.rows_kept="first"'
        )
    return np.sort(np.asarray(units.rows))


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
    """Record in the ledger of a run that its records were attacked; a folder without a guarantee has no ledger."""
    if (folder / LEDGER_FILE).is_file() and not (folder / MANIFEST_FILE).is_file():
        add_disclosure(folder, ATTACK)


def attack_folder(
    folder: str | Path, settings: AttackSettings | None = None, progress: Progress = lambda text: None
) -> AttackReport:
    """Attack the model of a folder; the ledger of its run, if there is one, records that.

    Canaries that `dpllm audit prepare` added to the data count neither as members nor as non-members: they have their
    own audit.

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
    """Return the facts to print below the tables."""
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


_COLOURS = (BLUE, "#5b8e7d", "#8a5a83", "#b08d2f", "#4f5d75", "#9c4a4a")


def plot_attacks(reports: Mapping[str, AttackReport], path: str | Path) -> Path:
    """Write a PNG with the ROC curves of each report, both axes logarithmic.

    Returns:
        The path.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    size = len(reports)
    figure, panels = plt.subplots(1, size, figsize=(5.2 * size + 0.6, 4.8), sharey=True, squeeze=False)
    for panel, (title, report) in zip(panels[0], reports.items(), strict=True):
        least = 0.5 / report.records.num
        grid = np.geomspace(least, 1, 200)
        panel.plot(grid, grid, "--", color=GREY, linewidth=1.2, label="blind guessing")
        if report.history is not None:
            panel.plot(*tradeoff_curve(report.history, "zero-out", grid.tolist()), color=ORANGE, linewidth=2.2)
            panel.lines[-1].set_label("at most, for any attack on this run")
        for attack, colour in zip(report.attacks, _COLOURS, strict=False):
            rates, found = roc_curve(attack.scores, attack.included)
            label = f"{attack.name} (AUROC {attack.auroc.value:.3f})"
            panel.step(np.maximum(rates, least), np.maximum(found, least), where="post", color=colour, label=label)
        panel.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.3), title=title)
        panel.set_xlabel("held-out records accused")
        panel.grid(color="#e6e6e6", linewidth=0.8)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        panel.legend(frameon=False, loc="lower right", fontsize="small")
    panels[0][0].set_ylabel("members found")
    figure.tight_layout()
    path = Path(path)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
