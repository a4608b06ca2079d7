"""A new recipe for a person's own records: every setting with its reason, from public numbers and their own choices.

Place in the flow: `dpllm init`. The rules are those of `dpllm.privacy.defaults` and `dpllm.training.suggested_run`.

Guarantee: of the private records, only facts that a guarantee treats as public enter a setting: N, and the names and
kinds of the columns. The lengths of texts and the number of rows of a user are private. They are measured for the
person at the screen (`Look`), and no setting depends on them.

Facts of a pretrained model are read on this machine (`model_at_hand`): nothing is downloaded, and no weight is read.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PreTrainedTokenizerBase

from dpllm.config import ConfigError, DataConfig, HeldOut, Microbatch, ModelConfig, PrivacyConfig, Recipe
from dpllm.config.data_section import MAX_LENGTH, READING
from dpllm.config.formats.catalogue import formats_for
from dpllm.config.formats.record_format import Chat, TextLabel, columns_in
from dpllm.config.recipe_file import UNIT
from dpllm.config.tasks import TASKS
from dpllm.config.yaml12 import write_yaml
from dpllm.data.columns import texts_of
from dpllm.data.records import DataError, load_records, reading_remarks
from dpllm.data.rows import unit_index_of
from dpllm.data.units import UnitIndex
from dpllm.ghost.attach import is_linear, is_transposed
from dpllm.models.inputs import num_positions
from dpllm.models.load import NO_CODE, load_tokenizer, not_loaded, require_folder, skeleton
from dpllm.models.starting_point import refuse_private_start
from dpllm.privacy import defaults
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.settings import Setting, flow
from dpllm.training.suggested_run import suggested_run
from dpllm.training.weight_size import WeightSize, size_of_model

_ENDLESS = 1_000_000  # a tokenizer without a limit states 10^30


@dataclass(frozen=True)
class ModelAtHand:
    """A model on this machine.

    Attributes:
        folder: folder with its config.json.
        encoder_decoder: whether it has an encoder and a decoder.
        parameters: number of its parameters.
        longest: the largest number of tokens of a row, by positions and tokenizer; None: no limit is stated.
        transposed: whether its matrices are stored as inputs by outputs (GPT-2).
        has_weights: whether its .safetensors files are on this machine.
        tokenizer: its tokenizer.
    """

    folder: str
    encoder_decoder: bool
    parameters: int
    longest: int | None
    transposed: bool
    has_weights: bool
    tokenizer: PreTrainedTokenizerBase

    @property
    def has_template(self) -> bool:
        """Return whether its tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)


def model_at_hand(name: str) -> ModelAtHand | None:
    """Return the facts of a model in a folder or in the cache of the Hub; None if it is not on this machine.

    Raises:
        ConfigError: there is no such folder, or its files are damaged.
    """
    require_folder("model", name)
    folder = Path(name)
    if not folder.is_dir():
        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    try:
        config: Any = AutoConfig.from_pretrained(str(folder), **NO_CODE)
    except (OSError, ValueError) as error:
        raise not_loaded("model", name, error) from error
    encoder_decoder = bool(config.is_encoder_decoder)
    section = ModelConfig(name=str(folder), task="seq2seq_lm" if encoder_decoder else "causal_lm")
    try:
        tokenizer = load_tokenizer(section)
    except ConfigError:
        if str(folder) != name:  # the cache may contain only a part of the model
            return None
        raise
    model = _built(section)
    limits = [num_positions(model), getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < _ENDLESS]
    return ModelAtHand(
        folder=str(folder),
        encoder_decoder=encoder_decoder,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        longest=min(known, default=None),
        transposed=any(is_linear(module) and is_transposed(module) for module in model.modules()),
        has_weights=any(folder.glob("*.safetensors")),
        tokenizer=tokenizer,
    )


def _built(section: ModelConfig) -> Any:
    """Return the model without weights: as a language model, or an encoder as a classifier."""
    try:
        return skeleton(section)
    except ConfigError:
        return skeleton(ModelConfig(name=section.name, task="sequence_classification", num_labels=2))


_LOOKED_AT = 500  # records whose lengths are estimated
_CHARACTERS_OF_A_TOKEN = 4
_USUAL_SPREAD, _USUAL_WIDTH = 0.02, 2048
_LARGE = 1_000_000_000
OWN = "Your choice."
_OF_PEOPLE = (
    "Facts for the privacy report that only you know. Each one left out stays an open point of the report.",
    "data_holder: the organisation that holds the raw data",
    "audience: the people who will get the model",
    "other_uses: none   # or the other uses of the same records, such as earlier models",
)
_OF_LABELS = "preprocessing: none   # or what was computed from these records, such as class weights or target scales"


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a person decided about a new recipe; None: the rule decides."""

    data: DataConfig
    """The records, their format and their columns; its `max_length` is not used."""
    model: str
    """A folder, or a Hub id."""
    epsilon: float
    """ε of the whole run."""
    output_dir: str
    """The folder of the run."""
    unit_column: str | None = None
    """The column of the user's id; None: each record is a unit."""
    rows: int | None = None
    """k."""
    classes: int | list[str] | None = None
    """Names of the classes, or their number."""
    adapter: bool | None = None
    """Whether to train an adapter, or all weights."""
    rank: int | None = None
    """Rank of the adapter."""
    max_length: int | None = None
    """The most tokens of a row."""
    held_out: float | None = None
    """The share of units to hold out."""
    start_is_independent: bool = False
    """Declares that the starting weights hold nothing of the private records, where this is in doubt."""


@dataclass(frozen=True)
class Look:
    """What was seen in the private records, for the person at the screen; no setting depends on it.

    Attributes:
        records: their number.
        tokens: the median and the 95th percentile of the tokens of a record, to two digits.
        measured: whether the model's tokenizer counted them; otherwise four characters are a token.
        cut: the share of records longer than a row.
        rows: the median and the 95th percentile of the records of a user; None: records are the units.
        read: what was found when the files were read (`dpllm.data.records.reading_remarks`).
    """

    records: int
    tokens: tuple[int, int]
    measured: bool
    cut: float
    rows: tuple[int, int] | None
    read: tuple[str, ...] = ()


@dataclass(frozen=True)
class NewRecipe:
    """A recipe, with a reason for each setting.

    Attributes:
        settings: in the order of the file.
        notes: remarks, one or two sentences each.
        plan: its plan.
        look: what was seen in the private records.
        population: all units, the held-out ones included.
    """

    settings: tuple[Setting, ...]
    notes: tuple[str, ...]
    plan: PrivacyPlan
    look: Look
    population: int

    def value(self, key: str) -> Any:
        """Return the value of a key."""
        return next(setting.value for setting in self.settings if setting.key == key)

    def text(self) -> str:
        """Return the recipe as text, with the reason of each setting above it."""
        noun = "users" if self.plan.unit == "user" else "records"
        header = [
            "A recipe of dpllm, written by dpllm init. Every value can be changed.",
            f"Dependence on private records: b, T, δ, the held-out share, the noise and the learning rate follow from "
            f"N = {self.plan.num_units:,}, the number of {noun} that are trained on, which the guarantee treats as "
            "public. Names and kinds of the columns are taken from the file. No other setting depends on the records: "
            "their lengths, and the number of records of a user, were not used. If you change a setting because of "
            "what you saw in private records, ε does not cover this choice.",
            *self.notes,
        ]
        asks = any(one.key == "model.task" and TASKS[one.value].needs_labels for one in self.settings)
        return recipe_text(self.settings, header, {"release": (*_OF_PEOPLE, *([_OF_LABELS] if asks else []))})


def new_recipe(wishes: Wishes, at_hand: ModelAtHand | None) -> NewRecipe:
    """Return the recipe for a person's wishes; the records are read once.

    Raises:
        ConfigError: the format, the task and the model do not fit, or the model was trained on private records.
        DataError: the records cannot be read, a column is missing, or there are too few units.
    """
    task = task_of(wishes, at_hand)
    max_length = _max_length(wishes, at_hand)
    refuse_private_start(wishes.model, wishes.start_is_independent)
    names = wishes.classes if isinstance(wishes.classes, list) else None
    data = dataclasses.replace(
        wishes.data,
        max_length=max_length.value,
        long_records=wishes.data.form.long_records if task == "causal_lm" else "truncate",
        class_names=names,
    )
    records = load_records(data)
    unit, protects = _unit(wishes), "sequence" if wishes.unit_column is None else "user"
    bounds = {"max_rows_per_unit": len(records)} if unit else {}
    index = unit_index_of(records, _privacy(wishes, {**unit, **bounds}, 1))
    population = index.num_units
    _refuse_few(population, protects)
    share = defaults.held_out_share(population) if wishes.held_out is None else wishes.held_out
    num_units = population - (max(1, round(share * population)) if share else 0)
    data = dataclasses.replace(data, eval=HeldOut(share=share or None))
    batch, steps = defaults.batch_and_steps(num_units)
    model = _model_section(wishes, task, at_hand)
    privacy = dataclasses.replace(_privacy(wishes, unit, batch), delta=defaults.delta_for(num_units))
    train = {"output_dir": wishes.output_dir, "max_steps": steps}
    draft = Recipe(
        model=ModelConfig(**{item.key.removeprefix("model."): item.value for item in model}),
        data=data,
        privacy=privacy,
        train=train,
        microbatch=Microbatch(tokens="auto"),
    )
    run = suggested_run(draft, UnitIndex.one_row_per_unit(num_units))
    rate = run.rate_for(_size(draft.model, at_hand))
    settings = [
        *model,
        *_data_settings(data, max_length, wishes),
        *_privacy_settings(privacy, num_units, batch, steps),
        *_of_section("privacy", run.settings),
        *_train_settings(wishes.output_dir, steps, at_hand, rate),
        *_of_section("train", run.settings),
    ]
    notes = [
        *defaults.need_words(num_units, wishes.epsilon, protects),
        defaults.range_words(float(rate.value), draft.model.adapter is not None, run.step_ratio != 1),
    ]
    if at_hand is None:
        notes.append(
            f"{wishes.model} is not on this machine, and nothing was downloaded: whether it can be trained, its "
            "tokenizer, and the size of its weights were not looked at. Once it is here, dpllm plan suggest RECIPE "
            "computes the learning rate from its weights."
        )
    look = _look(records, data, at_hand, index if unit else None)
    look = dataclasses.replace(look, read=tuple(reading_remarks(records)))
    return NewRecipe(_each_once(settings), tuple(notes), run.plan, look, population)


def task_of(wishes: Wishes, at_hand: ModelAtHand | None) -> str:
    """Return the task for a format and a model.

    Raises:
        ConfigError: the model cannot be trained with this format.
    """
    form = wishes.data.form
    if form.holds is TextLabel:
        if wishes.classes is None:
            raise ConfigError(
                "the classes are not known: name them, in order, or give their number "
                "(data.class_names=[negative, positive] or model.num_labels=2). They are "
                "public facts, and are not collected from the private labels"
            )
        return form.tasks[0]
    if at_hand is not None and at_hand.encoder_decoder:
        if "seq2seq_lm" not in form.tasks:
            raise ConfigError(
                f"{wishes.model} has an encoder and a decoder, so records need a prompt and a completion, and the "
                f"format is {form.name}: give data.format={' or '.join(formats_for('seq2seq_lm'))}, or another model"
            )
        return "seq2seq_lm"
    if form.holds is Chat and at_hand is not None and not at_hand.has_template:
        raise ConfigError(
            f"the tokenizer of {wishes.model} has no chat template: give the chat version of the model, or store the "
            "records as prompts and completions (data.format=prompt_completion)"
        )
    return form.tasks[0]


def _max_length(wishes: Wishes, at_hand: ModelAtHand | None) -> Setting:
    most = None if at_hand is None else at_hand.longest
    if wishes.max_length is not None:
        if most is not None and wishes.max_length > most:
            raise ConfigError(f"data.max_length={wishes.max_length} exceeds the {most} tokens that the model allows")
        reason = f"{OWN} If you chose it by looking at the lengths of private records, ε does not cover this choice."
        return Setting("data.max_length", wishes.max_length, reason, None)
    value = MAX_LENGTH if most is None else min(MAX_LENGTH, most)
    limit = "" if most is None or value < most else f" The model allows {most}."
    reason = f"The most tokens of a row, a public constant: the lengths of the records were not used.{limit}"
    return Setting("data.max_length", value, reason, None)


def _unit(wishes: Wishes) -> dict[str, Any]:
    if wishes.unit_column is None:
        return {}
    return {"unit": wishes.unit_column, "max_rows_per_unit": wishes.rows, "rows_kept": "random"}


def _privacy(wishes: Wishes, unit: dict[str, Any], batch: int) -> PrivacyConfig:
    return PrivacyConfig(epsilon=wishes.epsilon, expected_batch_size=batch, **unit)


def _refuse_few(num_units: int, unit: str) -> None:
    if num_units < defaults.FEWEST_UNITS:
        noun = "users" if unit == "user" else "records"
        raise DataError(
            f"{num_units:,} {noun} are too few: the noise that hides each of them hides their common traits too. "
            f"At least {defaults.FEWEST_UNITS} are needed to begin, and about {defaults.units_needed(8.0):,} for a "
            "good model at ε = 8. Collect more, or train on public records of the same kind"
        )


def _model_section(wishes: Wishes, task: str, at_hand: ModelAtHand | None) -> list[Setting]:
    found = [Setting("model.name", wishes.model, "", None)]
    if wishes.start_is_independent:
        found.append(
            Setting("model.start_is_independent", True, f"{OWN} The report has an open point about it.", False)
        )
    if task != "causal_lm":
        found.append(Setting("model.task", task, "", "causal_lm"))
    if isinstance(wishes.classes, int) and task == "sequence_classification":
        found.append(Setting("model.num_labels", wishes.classes, OWN, None))
    size = None if at_hand is None else at_hand.parameters
    adapter = (size is None or size > defaults.MOST_TRAINED) if wishes.adapter is None else wishes.adapter
    if not adapter:
        small = f"{size:,} parameters are few enough to train all of them" if size else OWN.rstrip(".")
        reason = (
            f"All weights are trained: {small}. Where private text differs from the model's own, this was measured far "
            "better than adapters (docs/correlated_noise.md)."
        )
        return [dataclasses.replace(found[0], reason=reason), *found[1:]]
    rank = defaults.RANK if wishes.rank is None else wishes.rank
    peft = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "target_modules": "all-linear"}
    if at_hand is not None and at_hand.transposed:
        peft["fan_in_fan_out"] = True
    why = "the size of the model is not known here" if size is None else f"the model has {size:,} parameters"
    why = why if wishes.adapter is None else "you chose it"
    reason = (
        f"{defaults.rank_reason(rank)} An adapter is trained because {why}. "
        "If the private text is unlike the model's own, train embeddings and head too: modules_to_save: "
        "[embed_tokens, lm_head] (the names differ between models)."
    )
    return [
        *found,
        Setting("model.adapter", peft, reason, None),
        Setting("model.dtype", "auto", "The frozen weights have the type in which they were saved.", None),
    ]


def _data_settings(data: DataConfig, max_length: Setting, wishes: Wishes) -> list[Setting]:
    path = "Your records. A relative path is seen from the folder in which the training is started."
    found = [Setting("data.path", data.path, path, None)]
    form, usual = data.form, type(data.form)()
    columns = {
        key: getattr(form, key)
        for key, about in columns_in(type(form)).items()
        if not about.optional or getattr(form, key) != getattr(usual, key)
    }
    implied = type(DataConfig(path=data.path, max_length=2, columns=columns).form) is type(form)
    protected = (
        "Each record is protected by itself. If one person may have several records, protect all records of a person "
        "together: unit: the column of their ids."
    )
    if wishes.unit_column is not None:
        columns[UNIT] = wishes.unit_column
        protected = f"unit: all records of one user, with the same {wishes.unit_column}, are protected together."
    found.append(Setting("data.columns", columns, protected, None))
    of = "records" if wishes.unit_column is None else "users with all their records"
    rule = OWN if wishes.held_out is not None else "5 % of them, at most about 1,000, by their public number."
    found.append(
        Setting(
            "data.eval",
            data.eval.share,
            f"The share of {of} that is held out and measured before and after the training. {rule} These figures are "
            "exact results on private records, and ε does not cover them: keep them to yourself, or leave it out.",
            None,
        )
    )
    if not implied:
        found.append(Setting("data.format", data.format, "", None))
    default = DataConfig(path=data.path)
    for key in READING:
        if (value := getattr(data, key)) != getattr(default, key):
            found.append(Setting(f"data.{key}", value, "", getattr(default, key)))
    if data.class_names is not None:
        found.append(Setting("data.class_names", data.class_names, OWN, None))
    long = (
        "A longer record becomes several rows of the same unit, so all of it is used."
        if data.long_records == "split"
        else "The rest of a longer record is not used."
    )
    return [*found, max_length, Setting("data.long_records", data.long_records, long, "truncate")]


def _privacy_settings(privacy: PrivacyConfig, num_units: int, batch: int, steps: int) -> list[Setting]:
    epsilon = (
        "What the whole run may cost. ε up to 1 is strong, up to 10 reasonable (Ponomareva et al., JAIR 2023, "
        "arXiv:2303.00654)."
    )
    found = [
        Setting("privacy.epsilon", privacy.epsilon, epsilon, None),
        Setting("privacy.delta", privacy.delta, defaults.delta_reason(num_units), None),
    ]
    if privacy.max_rows_per_unit is not None:
        rows = privacy.max_rows_per_unit
        kept = "Which rows of a user with more: by a secret draw before the training."
        found += [
            Setting("privacy.max_rows_per_unit", rows, defaults.rows_reason(rows), None),
            Setting("privacy.rows_kept", privacy.rows_kept, kept, "first"),
        ]
    reason = defaults.batch_reason(num_units, batch, steps)
    return [*found, Setting("privacy.expected_batch_size", batch, reason, None)]


def _train_settings(output_dir: str, steps: int, at_hand: ModelAtHand | None, rate: Setting) -> list[Setting]:
    found = [
        Setting("train.output_dir", output_dir, "", None),
        Setting("train.max_steps", steps, "Private steps; see privacy.expected_batch_size.", None),
        dataclasses.replace(rate, reason=f"{rate.reason} TrainingArguments' own default, 5e-5, is far too low here."),
    ]
    if at_hand is None or at_hand.parameters > _LARGE:
        reason = "Less memory for about a third more time. It changes no number of the guarantee."
        found.append(Setting("train.gradient_checkpointing", True, reason, False))
    often = "A checkpoint, so that a run which crashes can go on (train.resume_from_checkpoint=auto)."
    return [
        *found,
        Setting("train.logging_steps", 10, "", None),
        Setting("train.save_strategy", "steps", often, None),
        Setting("train.save_steps", max(1, steps // 4), "", None),
        Setting("train.save_total_limit", 1, "", None),
        Setting(
            "microbatch.tokens",
            "auto",
            "Tokens that go through the model at once: as many as fit. Models that are sharded over GPUs (FSDP2, "
            "DeepSpeed) need a number instead, such as 8192. It changes no number of the guarantee.",
            None,
        ),
    ]


def _of_section(section: str, settings: Sequence[Setting]) -> list[Setting]:
    return [item for item in settings if item.key.startswith(f"{section}.") and item.value is not None]


def _each_once(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Return the settings; of those with one key the last, and the reason of several neighbours with one only once."""
    by_key = {item.key: item for item in settings}
    found: list[Setting] = []
    for item in by_key.values():
        said = any(item.reason == one.reason and item.reason for one in found)
        found.append(dataclasses.replace(item, reason="") if said else item)
    return tuple(found)


def _size(model: ModelConfig, at_hand: ModelAtHand | None) -> WeightSize:
    """Return the size of the trained weights; a usual one if they are not here."""
    adapter = model.adapter is not None
    if at_hand is not None and (at_hand.has_weights or adapter):
        return size_of_model(dataclasses.replace(model, name=at_hand.folder))
    spread = (3 * _USUAL_WIDTH) ** -0.5 if adapter else _USUAL_SPREAD
    words = (
        f"of new adapter weights in a model of width {_USUAL_WIDTH:,}"
        if adapter
        else "of the initialisation that most models begin with"
    )
    return WeightSize(spread, 0, f"{words} (the weights of this model are not here)")


def _look(records: datasets.Dataset, data: DataConfig, at_hand: ModelAtHand | None, index: UnitIndex | None) -> Look:
    """Return lengths and rows per user, rounded to two digits."""
    step = max(1, len(records) // _LOOKED_AT)
    chosen = records.select(range(0, len(records), step)).select_columns(
        [name for name in data.form.names if name in records.column_names]
    )
    texts = [" ".join(texts_of(list(record.values()))) for record in chosen]
    if at_hand is None:
        lengths = np.array([len(text) / _CHARACTERS_OF_A_TOKEN for text in texts])
    else:
        encoded = at_hand.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = np.array([len(ids) for ids in encoded])
    rows = None
    if index is not None:
        counts = np.diff(np.asarray(index.offsets))
        rows = _rounded(np.percentile(counts, 50)), _rounded(np.percentile(counts, 95))
    return Look(
        records=len(records),
        tokens=(_rounded(np.percentile(lengths, 50)), _rounded(np.percentile(lengths, 95))),
        measured=at_hand is not None,
        cut=round(float(np.mean(lengths > data.max_length)), 2),
        rows=rows,
    )


def _rounded(value: Any) -> int:
    return int(float(f"{float(value):.2g}"))


_WIDTH = 110


def recipe_text(settings: Sequence[Setting], header: Sequence[str], left_out: Mapping[str, Sequence[str]]) -> str:
    """Return the YAML of a recipe.

    Args:
        settings: in the order of the file; the settings of a section are written together. One with an empty reason
            has no comment. A model of which only the name is set has the short form.
        header: paragraphs above the recipe.
        left_out: lines by section, written as comments at its end, such as keys that people may add.
    """
    sections: dict[str, list[Setting]] = {}
    for setting in settings:
        section, dot, _ = setting.key.partition(".")
        sections.setdefault(section if dot else "", []).append(setting)
    for section in left_out:
        sections.setdefault(section, [])
    top = sections.pop("", [])
    lines = [line for number, text in enumerate(header) for line in (["#"] if number else []) + _comment(text)]
    for section, own in sections.items():
        if [setting.key for setting in own] == ["model.name"]:
            lines += ["", *_comment(own[0].reason), *_entry("model", own[0].value)]
            continue
        lines += ["", f"{section}:"]
        for setting in own:
            key = setting.key.partition(".")[2]
            lines += [f"  {line}" for line in (*_comment(setting.reason), *_entry(key, setting.value))]
        lines += [f"  # {line}" for line in left_out.get(section, ())]
    for setting in top:
        lines += ["", *_comment(setting.reason), *_entry(setting.key, setting.value)]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key}: {flow(value)}"]
    return write_yaml({key: value}).rstrip("\n").split("\n")
