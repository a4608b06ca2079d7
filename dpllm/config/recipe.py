"""The configuration of a run: strict dataclasses, and the YAML recipe they are read from.

Place in the flow: first. A recipe names the model, the data and the privacy guarantee. It does not describe hardware,
so the guarantee cannot depend on the machine. Every value is checked when the object is made, whether it came from YAML
or from Python. An unknown key is an error: a misspelt `noise_multiplier` must never be ignored.

`PrivacyConfig` holds public values only; nothing in it may be derived from the private data.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dpllm import registry
from dpllm.config import values
from dpllm.config.data_section import UNIT, DataConfig
from dpllm.config.files import write_file
from dpllm.config.formats.catalogue import FORMATS
from dpllm.config.hub import is_language
from dpllm.config.metrics import check_fit
from dpllm.config.model_values import HEADS, check_adapter, check_model_config
from dpllm.config.privacy_section import PrivacyConfig, PrivacyUnit
from dpllm.config.quantization import check_quantization
from dpllm.config.shipped import recipe_file, shipped_recipes
from dpllm.config.tasks import TASKS
from dpllm.config.train_values import check_train, refuse_own, with_schedule
from dpllm.config.values import ConfigError as ConfigError
from dpllm.config.values import nearest as nearest
from dpllm.config.yaml12 import read_yaml, write_yaml
from dpllm.mechanism.limits import NOISE_MEMORIES

DTYPES = ("float32", "bfloat16", "auto")
COMPILE = ("none", "blocks")

RECIPE_FILE = "recipe.yaml"
"""The recipe of a run, in its folder."""
PRETRAINED_FOLDER = "public_pretrain"
"""Folder, inside the run's folder, of the starting model of the private training, if the recipe made that model."""

_Section = TypeVar("_Section")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: a pretrained one by `name`, or a fresh one from `config`."""

    name: str | None = None
    """Hub id or folder of a pretrained model. Give this or `config`."""
    config: dict[str, Any] | None = None
    """A transformers configuration with `model_type`; the weights are initialised at random."""
    task: str = "causal_lm"
    """One of `TASKS`."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer. None: the model's own."""
    tokenizer_vocab_size: int | None = None
    """Train a byte-level BPE tokenizer of this size on the public text (a vocabulary reveals the words of its text)."""
    dtype: str = "float32"
    """"float32", "bfloat16", or "auto" (as the weights were saved)."""
    adapter: dict[str, Any] | None = None
    """Arguments of `peft.LoraConfig`. None: full fine-tuning."""
    quantization: str | dict[str, Any] | None = None
    """Stored form of the frozen matrices under an adapter (QLoRA): "nf4", "fp4" or "int8", or a mapping with `kind`
    and its options (`dpllm.config.quantization`). None: as `dtype` says, or as the weights were quantised before."""
    compile: str = "none"
    """"blocks": torch.compile for the model's blocks, as full graphs, after the checks of the first step."""
    tie_word_embeddings: bool | None = None
    """Whether the head shares the input embedding. None: as the model comes; False: the head becomes a copy."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of parameter names that are not trained, such as "transformer.wte.*"."""
    head: str = "auto"
    """How a causal language model computes its losses. "auto": a head that is not trained (LoRA) in chunks, without
    all logits, at no cost; a trained one too under activation checkpointing, where the logits take more than what is
    kept of the blocks. "chunks": also a trained head, whose logits are then computed twice. "whole": from all logits.
    It has no influence on the guarantee."""
    start_is_independent: bool = False
    """Declares that starting weights and adapters hold nothing of the private records, where this is in doubt."""
    trust_remote_code: bool = False
    """Runs the code in the folder of the model or the tokenizer (`auto_map` in config.json), which you have read."""
    num_labels: int | None = None
    """Number of classes of a classifier, or of values of a regression (None: 1). None: the number of the data set's
    public label names."""

    def __post_init__(self) -> None:
        """Check every value."""
        values.flag("start_is_independent", self.start_is_independent)
        values.choice("head", self.head, HEADS)
        values.flag("trust_remote_code", self.trust_remote_code)
        if (self.name is None) == (self.config is None):
            given = "neither" if self.name is None else "both"
            raise ConfigError(
                f"give exactly one of name (a pretrained model) and config (trained from scratch), got {given}"
            )
        if self.name is not None:
            values.text("name", self.name)
        if self.config is not None:
            check_model_config("config", self.config)
        values.choice("task", self.task, tuple(TASKS))
        values.choice("dtype", self.dtype, DTYPES)
        values.choice("compile", self.compile, COMPILE)
        if self.tokenizer is not None:
            values.text("tokenizer", self.tokenizer)
            if self.tokenizer_vocab_size is not None:
                raise ConfigError(
                    "give tokenizer (load one) or tokenizer_vocab_size (train one on public text), not both"
                )
        if self.tokenizer_vocab_size is not None:
            values.integer("tokenizer_vocab_size", self.tokenizer_vocab_size, 260)
        if self.adapter is not None:
            check_adapter("adapter", self.adapter)
        check_quantization(self.quantization, has_adapter=self.adapter is not None)
        if self.tie_word_embeddings is not None:
            values.flag("tie_word_embeddings", self.tie_word_embeddings)
        if not isinstance(self.freeze, list) or not all(isinstance(pattern, str) for pattern in self.freeze):
            raise ConfigError(f"freeze must be a list of name patterns, got {self.freeze!r}")
        if self.num_labels is not None:
            values.integer("num_labels", self.num_labels, 1 if self.task == "regression" else 2)


@dataclass(frozen=True, kw_only=True)
class PublicPretrainConfig:
    """Ordinary training on public text before the private phase; the report names the text as public."""

    data: DataConfig
    """Text that anyone may know."""
    train: dict[str, Any] = field(default_factory=dict)
    """Names of `TrainingArguments`."""
    max_shared_records: int = 0
    """Number of private records that may occur in the public text and are declared public; the report lists it as an
    open point."""

    def __post_init__(self) -> None:
        """Check the section."""
        check_train("train", self.train)
        refuse_own("train", self.train)
        values.integer("max_shared_records", self.max_shared_records, 0)
        if UNIT in self.data.columns:
            raise ConfigError("data.columns.unit names protected units, and public text has none: leave it out")


@dataclass(frozen=True, kw_only=True)
class ReleaseConfig:
    """Facts about a release that only people know, for the privacy report and the model card.

    The report has an open point for each of the first three that is left out.
    """

    data_holder: str | None = None
    """Who holds the raw data."""
    audience: str | None = None
    """Who will see the released model."""
    other_uses: str | None = None
    """Other uses of the same data: tuning runs, earlier models, model selection; "none" where there were none."""
    preprocessing: str | None = None
    """Numbers, names or settings that were computed from these records before the run, such as names of classes, class
    weights or the scale of targets, and what was public; "none" where there were none. The report asks where the run
    has a place for them."""
    trained_by: str | None = None
    """Who trained the model and answers for it."""
    base_model: str | None = None
    """Name of the model that was fine-tuned, such as its Hub id, where ``model.name`` is a folder."""
    license: str | None = None
    """License of the released model: the Hub's identifier, such as apache-2.0, or another name."""
    language: str | list[str] | None = None
    """Languages of the model: ISO codes such as en, or [en, de]."""

    def __post_init__(self) -> None:
        """Check the texts."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name != "language" and value is not None:
                values.text(item.name, value)
        for code in [self.language] if not isinstance(self.language, list) else self.language:
            if code is not None and not (isinstance(code, str) and is_language(code)):
                raise ConfigError(f"language must be a code such as en, de or pt-BR, or a list of them, got {code!r}")


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The rows that go through the model at once; it has no influence on the guarantee."""

    tokens: int | str | None = None
    """Tokens of a microbatch, padding included. It replaces the number of rows,
    ``train.per_device_train_batch_size``: rows of similar length share a microbatch, so that a microbatch of short
    rows has many. "auto": the largest number that fits on the GPU, found by trial before the first step (one process
    per GPU and DDP; 2048 on a CPU)."""
    pack: bool = False
    """Whether the rows of a microbatch are concatenated without padding; `tokens` then counts only the rows' own
    tokens. For causal language models."""

    def __post_init__(self) -> None:
        """Check the values."""
        if isinstance(self.tokens, str) and self.tokens != "auto":
            raise ConfigError(f'tokens must be a whole number or "auto", got {self.tokens!r}')
        if self.tokens is not None and self.tokens != "auto":
            values.integer("tokens", self.tokens, 1)
        values.flag("pack", self.pack)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run: the sections of a recipe file."""

    model: ModelConfig
    data: DataConfig
    privacy: PrivacyConfig
    train: dict[str, Any] = field(default_factory=dict)
    """Names and values of `TrainingArguments`; names are checked where they are used. And ``average``: the average of
    the weights that is released (`dpllm.mechanism.averages`), such as ``{kind: ema, decay: 0.95}``. Without
    ``lr_scheduler_type`` the learning rate is constant after a warm-up of 10 % of the steps. ``optim_args`` of AdamW
    may be ``second_moment=corrected`` or ``low_passed`` (`dpllm.training.corrected_adamw`). And ``trainer``: "sft" or
    "dpo" takes the names of TRL's ``SFTConfig`` or ``DPOConfig`` too (`dpllm.DPSFTTrainer`, `dpllm.DPDPOTrainer`)."""
    public_pretrain: PublicPretrainConfig | None = None
    release: ReleaseConfig = field(default_factory=ReleaseConfig)
    microbatch: Microbatch = field(default_factory=Microbatch)
    """The rows that go through the model at once. It has no influence on the guarantee."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Sections of methods that stand beside ``train``, by name (`dpllm.registry`); each is a key of the file.
    ``federate`` is that of a federated run (`dpllm methods federated`): ``train`` then has the rounds as ``max_steps``
    and the server's ``learning_rate``."""
    noise_memory: str = "auto"
    """For correlated noise: "stored" keeps the noise of earlier steps, "regenerated" draws it again in each step, and
    "auto" stores as much as fits a quarter of the device's memory. It changes no number."""

    def __post_init__(self) -> None:
        """Check the section without a dataclass, and the combinations of two sections."""
        check_train("train", self.train)
        check_fit(self.data, self.model.task)
        object.__setattr__(self, "train", with_schedule(self.train))
        values.choice("noise_memory", self.noise_memory, NOISE_MEMORIES)
        if self.microbatch.pack and self.model.task != "causal_lm":
            raise ConfigError(
                f'microbatch.pack concatenates rows, which model.task="{self.model.task}" does not support: it is for '
                "causal language models. Leave microbatch.pack out"
            )
        privacy, data = one_unit(self.privacy, self.data)
        object.__setattr__(self, "privacy", privacy)
        object.__setattr__(self, "data", data)
        if self.model.quantization is not None and self.model.name is None and self.public_pretrain is None:
            raise ConfigError(
                "model.quantization freezes the weights, and those of model.config are random: name a pretrained model "
                "(model.name), or train one on public text first (public_pretrain)"
            )
        self._check_trainer(self.train.get("trainer"))
        refuse_drawn_pieces(self.privacy, self.data.long_records)

    def _check_trainer(self, trainer: str | None) -> None:
        """Check that the records have the form that ``train.trainer`` takes."""
        trainers = self.data.form.trainers
        if trainer not in trainers:
            fitting = [name for name, kind in FORMATS.items() if trainer in kind.trainers]
            raise ConfigError(
                f"data.format={self.data.format!r} needs train.trainer={trainers[0] or 'null'}, and it is "
                f"{trainer or 'null'}: set it, or one of the formats {', '.join(fitting)}"
            )
        public = None if self.public_pretrain is None else self.public_pretrain.data.form
        if public is not None and None not in public.trainers:
            raise ConfigError(
                f"public_pretrain.data.format={public.name!r} has {public.about}, and the public training learns one "
                "text: set another format"
            )
        if trainer is not None and (self.model.task != "causal_lm" or self.data.long_records == "split"):
            raise ConfigError(
                f"train.trainer={trainer} makes one row of each record for a causal language model: set "
                "model.task=causal_lm and data.long_records=truncate"
            )
        if trainer == "dpo" and self.microbatch.pack:
            raise ConfigError(
                "microbatch.pack concatenates rows, and a row of train.trainer=dpo has two sequences: leave it out"
            )


_Privacy = TypeVar("_Privacy", bound=PrivacyUnit)
_Data = TypeVar("_Data", bound=DataConfig)


def one_unit(privacy: _Privacy, data: _Data) -> tuple[_Privacy, _Data]:
    """Return both sections with the same column of the units: a recipe file has it in ``data`` alone.

    Raises:
        ConfigError: they name two columns.
    """
    column = data.columns.get(UNIT)
    if column is None and privacy.unit is not None:
        data = dataclasses.replace(data, columns={**data.columns, UNIT: privacy.unit})
    elif column is not None and privacy.unit is None:
        privacy = dataclasses.replace(privacy, unit=column)
    elif column != privacy.unit:
        raise ConfigError(f"data.columns.unit={column} and privacy.unit={privacy.unit} name two columns: keep one")
    return privacy, data


_WITHOUT_TRAINER = {
    "sft": "Give the same recipe without train.trainer and its options: its rows hold the same texts",
    "dpo": "Nothing was measured for pairs. Begin with the settings of the recipe dpo_replies (dpllm recipes "
    "dpo_replies). Several runs on the same pairs add up their ε in a budget (dpllm budget --help)",
}


def refuse_trainer(recipe: Recipe, purpose: str) -> None:
    """Refuse a recipe whose rows are made as TRL makes them, where rows are made in the usual way.

    Args:
        recipe: the recipe.
        purpose: subject of the message.

    Raises:
        ConfigError: it has ``train.trainer``.
    """
    trainer = recipe.train.get("trainer")
    if trainer is not None:
        raise ConfigError(
            f"{purpose} makes rows and losses itself and would not have those of train.trainer={trainer}. "
            f"{_WITHOUT_TRAINER[trainer]}"
        )


def refuse_drawn_pieces(privacy: PrivacyConfig, long_records: str) -> None:
    """Refuse to draw rows singly where their number depends on how texts are cut.

    Args:
        privacy: the guarantee.
        long_records: value of ``data.long_records``.

    Raises:
        ConfigError: rows are drawn, and a record may become several of them.
    """
    if privacy.sampling == "example" and long_records == "split":
        raise ConfigError(
            'privacy.sampling="example" draws rows, and data.long_records="split" makes several rows of one '
            "record: their number would depend on the tokenizer. "
            'Set long_records="truncate", or sampling="unit"'
        )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `key=value` overrides.

    Numbers such as ``1e-6`` are floats, and only ``true`` and ``false`` are booleans (so ``eval_strategy: no`` stays
    the text "no"). A repeated key is refused.

    Args:
        path: a YAML file with the sections of `Recipe`, or the name of a shipped recipe ("quickstart").
        overrides: dotted assignments, each value parsed as YAML: ``"privacy.epsilon=3"``. A later assignment
            overrides an earlier one; ``key=`` and ``key=null`` reset a key to nothing.

    Returns:
        The checked recipe.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or unusable; the message names both.
    """
    raw = read_raw(path, overrides)
    hand_over_unit(raw, str(path))
    return _build(Recipe, raw, str(path), "")


def hand_over_unit(raw: dict[str, Any], source: str) -> None:
    """Write ``data.columns.unit`` of a file into its section ``privacy``, which reads it.

    Raises:
        ConfigError: the section has a unit of its own.
    """
    data, privacy = raw.get("data"), raw.get("privacy")
    if isinstance(privacy, dict):
        if UNIT in privacy:
            raise ConfigError(
                f"{source}: unknown key 'privacy.unit'; the column whose value identifies the unit is data.columns.unit"
            )
        columns = data.get("columns") if isinstance(data, dict) else None
        if isinstance(columns, Mapping) and columns.get(UNIT) is not None:
            raw["privacy"] = {**privacy, UNIT: columns[UNIT]}


def read_raw(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sections of a recipe file as plain values, with overrides applied; see `load_recipe`.

    Raises:
        ConfigError: the file cannot be read or is no mapping, or an override has another form.
    """
    try:
        raw = read_yaml(recipe_file(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error.reason} at {error.start}"
        if isinstance(error, FileNotFoundError):
            raise ConfigError(
                f"{path}: there is no such file, and no shipped recipe has this name{_similar(Path(path).stem)} "
                "dpllm recipes lists the shipped recipes, and dpllm init writes one for your own records"
            ) from error
        raise ConfigError(f"{path}: cannot be read ({words})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping with the sections {', '.join(_names(Recipe))}")
    for override in overrides:
        apply_override(raw, override)
    if isinstance(raw.get("model"), str):
        raw["model"] = _SHORT["model"](raw["model"])
    return raw


def _similar(name: str) -> str:
    """Return the names of the shipped recipes that are close to a name, as a question; a full stop if there are none.

    >>> _similar("users")
    '; did you mean federate_users or quickstart_users?'
    """
    known = list(shipped_recipes())
    found = [one for one in known if name and name in one] or difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(found)}?" if found else "."


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain nested dictionaries, including every default."""
    plain = dataclasses.asdict(recipe)
    beside = plain.pop("beside")
    del plain["privacy"][UNIT]  # it is data.columns.unit
    return {**plain, **beside}


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the resolved recipe; `load_recipe` returns an equal recipe from the file."""
    write_file(path, write_yaml(recipe_to_dict(recipe)))


_NESTED: dict[type, dict[str, type]] = {
    Recipe: {
        "model": ModelConfig,
        "data": DataConfig,
        "privacy": PrivacyConfig,
        "public_pretrain": PublicPretrainConfig,
        "release": ReleaseConfig,
        "microbatch": Microbatch,
    },
    PublicPretrainConfig: {"data": DataConfig},
}


def _names(section: type) -> list[str]:
    names = [item.name for item in dataclasses.fields(section)]
    if section is not Recipe:
        return names
    return [*(name for name in names if name != "beside"), *registry.sections_beside_train()]


def read_section(section: type[_Section], raw: Mapping[str, Any], source: str, name: str) -> _Section:
    """Make one section of its mapping, with the errors of a recipe.

    Args:
        section: its class, such as `PrivacyConfig`.
        raw: keys and values.
        source: where the mapping is from, for messages.
        name: of the section.

    Raises:
        ConfigError: a key is unknown, missing or unusable; the message names it.

    >>> read_section(ReleaseConfig, {"audience": "anyone"}, "DPTrainer", "release").audience
    'anyone'
    """
    return _build(section, raw, source, f"{name}.")


def _build(section: type[_Section], raw: Mapping[str, Any], source: str, prefix: str) -> _Section:
    """Make the dataclass of a section from its mapping; `prefix` is the dotted path of the section with a final dot."""
    known = _names(section)
    methods = f"; installed methods: {registry.installed()}" if section is Recipe else ""
    for key in raw:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f"did you mean '{prefix}{close[0]}'? " if close else ""
            raise ConfigError(f"{source}: unknown key '{prefix}{key}'; {hint}Known here: {', '.join(known)}{methods}")
    given = copy.deepcopy(dict(raw))
    of_methods = registry.sections_beside_train() if section is Recipe else {}
    for key, nested in {**_NESTED.get(section, {}), **of_methods}.items():
        value = given.get(key)
        if isinstance(value, Mapping):
            given[key] = _build(nested, value, source, f"{prefix}{key}.")
        elif value is not None:
            raise ConfigError(f"{source}: '{prefix}{key}' must be a mapping, got {values.shown(value)}")
    optional = {*of_methods, *(item.name for item in dataclasses.fields(section) if _has_default(item))}  # type: ignore[arg-type]
    for key in known:
        if key not in optional and given.get(key) is None:
            raise ConfigError(f"{source}: missing key '{prefix}{key}'; it has no default")
        if given.get(key, ...) is None:
            del given[key]  # an empty value means the default, as in `train:` with nothing below it
    if of_methods:
        given["beside"] = {name: given.pop(name) for name in of_methods if name in given}
    try:
        return section(**given)
    except ConfigError as error:
        where = f"section '{prefix[:-1]}': " if prefix else ""
        raise ConfigError(f"{source}: {where}{error}") from error


def _has_default(item: dataclasses.Field[Any]) -> bool:
    return item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING


_SHORT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "model": lambda value: {"name": value},
    "data.eval": lambda value: {"path" if isinstance(value, str) else "share": value},
}
"""Keys whose value may be short for a mapping."""


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Write the value of ``key=value`` into the sections of a recipe; see `load_recipe`.

    Raises:
        ConfigError: it has another form, or its value is no YAML.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} must read key=value, such as privacy.epsilon=3")
    try:
        value = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {values.shown(override)}: the value {error}") from error
    place = raw
    for depth, part in enumerate(parts[:-1]):
        if place.get(part) is None:
            place[part] = {}
        if (short := _SHORT.get(".".join(parts[: depth + 1]))) and not isinstance(place[part], dict):
            place[part] = short(place[part])
        place = place[part]
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: '{'.'.join(parts[: depth + 1])}' is a value, not a section")
    place[parts[-1]] = value
