"""A training run: the sections of its recipe.

A recipe names the model, the data and the privacy guarantee. It does not describe hardware, so the guarantee cannot
depend on the machine. `dpllm.config.recipe_file` reads and writes the files.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from dpllm.config.data_section import DataConfig
from dpllm.config.formats.catalogue import FORMATS
from dpllm.config.hub import is_language
from dpllm.config.metrics import check_fit
from dpllm.config.privacy_section import PrivacyConfig, PrivacyUnit
from dpllm.config.quantization import check_quantization
from dpllm.config.recipe_file import UNIT
from dpllm.config.sections import BASIC, Count, Names, OneOf, Text, Whole, assign, section
from dpllm.config.tasks import TASKS
from dpllm.config.train_values import check_train, refuse_own, with_schedule
from dpllm.config.values import ConfigError, between
from dpllm.mechanism.limits import NOISE_MEMORIES

if TYPE_CHECKING:
    from dpllm.config.recipe_file import Source

DTYPES = ("float32", "bfloat16", "auto")
COMPILE = ("none", "blocks")
HEADS = ("auto", "whole", "chunks")
"""Values of ``model.head``."""
PRETRAINED_FOLDER = "public_pretrain"
"""Folder, inside the run's folder, of the starting model of the private training, if the recipe made that model."""


_SIZES = re.compile(
    r"(?!type_vocab_size).*_size|d_(model|ff|kv)|dim|hidden_dim|n_\w+|num_\w*(layers|heads|labels)|max_position\w+"
)

_SHARES = re.compile(r"(?:.*_)?(?:dropout|pdrop|dropout_prob|dropout_rate|layerdrop)")


def _config(config: dict[str, Any]) -> dict[str, Any]:
    """Check the numbers that transformers does not: sizes and shares; it checks the kinds when the model is made."""
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ValueError("must be a mapping with model_type, such as {model_type: llama, hidden_size: 128}")
    for key, value in config.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            size, share = _SIZES.fullmatch(key) is not None, _SHARES.fullmatch(key) is not None
            between(f"config.{key}", value, 1 if size else 0 if share else None, 1 if share else None, below=share)
    return config


@section
class ModelConfig:
    """The model: a pretrained one by `name`, or a fresh one from `config`."""

    name: Annotated[Text | None, BASIC] = None
    """Hub id or folder of a pretrained model. Give this or config; `model: NAME` is short for it."""
    config: Annotated[Names, AfterValidator(_config)] | None = None
    """A transformers configuration with model_type; the weights are initialised at random."""
    task: Annotated[str, OneOf(tuple(TASKS)), BASIC] = "causal_lm"
    """What the model is trained for."""
    tokenizer: Text | None = None
    """Hub id or folder of the tokenizer. null: the model's own."""
    tokenizer_vocab_size: Annotated[Whole, Field(ge=260)] | None = None
    """Train a byte-level BPE tokenizer of this size on the public text (a vocabulary reveals the words of its text)."""
    dtype: Annotated[str, OneOf(DTYPES), BASIC] = "float32"
    """float32, bfloat16, or auto (as the weights were saved)."""
    adapter: Annotated[Names | None, BASIC] = None
    """Arguments of peft.LoraConfig, such as {r: 16, target_modules: all-linear}. null: full fine-tuning."""
    quantization: Annotated[Any, BASIC] = None
    """Stored form of the frozen matrices under an adapter (QLoRA), by bitsandbytes: nf4, fp4, int8, or a mapping such
    as {kind: nf4, double: false}. One process or DDP. null: as dtype says, or as the weights were quantised before; if
    their method is usually calibrated with texts (GPTQ, AWQ), the report asks where these came from."""
    compile: Annotated[str, OneOf(COMPILE)] = "none"
    """blocks: the model's layers run as graphs of torch.compile, made after the checks of the first step; head and loss
    stay eager, and so do layers that a graph cannot hold, which the log of step 1 lists with the reason."""
    tie_word_embeddings: bool | None = None
    """Whether the head shares the input embedding. null: as the model comes; false: the head becomes a copy."""
    freeze: list[str] = Field(default_factory=list)
    """Patterns of parameter names that are not trained, such as "transformer.wte.*"."""
    head: Annotated[str, OneOf(HEADS)] = "auto"
    """How a causal language model computes its losses. auto: a head that is not trained (LoRA) in chunks, without all
    logits, at no cost; a trained one too under activation checkpointing, where the logits take more than what is kept
    of the blocks. chunks: also a trained head, whose logits are then computed twice. whole: from all logits."""
    start_is_independent: bool = False
    """Declares that starting weights and adapters hold nothing of the private records, where this is in doubt; the
    report has an open point that says so."""
    trust_remote_code: bool = False
    """Runs the code in the folder of the model or the tokenizer (auto_map in config.json), which you have read; the
    report has an open point that names it."""
    num_labels: Annotated[Count | None, BASIC] = None
    """Number of classes of a classifier, or of values of a regression (null: 1). null: that of data.class_names, or of
    the public label names of a Hub data set."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if (self.name is None) == (self.config is None):
            given = "neither" if self.name is None else "both"
            raise ConfigError(
                f"give exactly one of name (a pretrained model) and config (trained from scratch), got {given}"
            )
        if self.tokenizer is not None and self.tokenizer_vocab_size is not None:
            raise ConfigError("give tokenizer (load one) or tokenizer_vocab_size (train one on public text), not both")
        check_quantization(self.quantization, has_adapter=self.adapter is not None)
        if self.num_labels == 1 and self.task != "regression":
            raise ConfigError("num_labels must be at least 2, got 1: only a regression has one value")


def _train(given: Any) -> Any:
    check_train("train", given)
    return dict(given)


def _public_train(given: Any) -> Any:
    check_train("train", given)
    refuse_own("train", given)
    return dict(given)


@section
class PublicPretrainConfig:
    """Ordinary training on public text before the private phase; the report names the text as public."""

    data: DataConfig
    """The public text, with the keys of data."""
    train: Annotated[Any, BeforeValidator(_public_train)] = Field(default_factory=dict)
    """Like the section train, for the public training."""
    max_shared_records: Annotated[Whole, Field(ge=0)] = 0
    """Number of private records that may occur in the public text and are declared public; the report lists it as an
    open point."""

    def __post_init__(self) -> None:
        """Check that no unit of public text is protected."""
        if UNIT in self.data.columns:
            raise ConfigError("data.columns.unit names protected units, and public text has none: leave it out")


def _language(given: Any) -> Any:
    for code in given if isinstance(given, list) else [given]:
        if code is not None and not (isinstance(code, str) and is_language(code)):
            raise ValueError("must be a code of BCP 47 such as en, de or pt-BR, or a list of them")
    return given


@section
class ReleaseConfig:
    """Facts about a release that only people know, for the privacy report and the model card.

    The report has an open point for each of the first three that is left out.
    """

    data_holder: Annotated[Text | None, BASIC] = None
    """Who holds the raw data."""
    audience: Annotated[Text | None, BASIC] = None
    """Who will see the released model."""
    other_uses: Annotated[Text | None, BASIC] = None
    """Other uses of the same data: tuning runs, earlier models, model selection; "none" where there were none."""
    preprocessing: Text | None = None
    """Numbers, names or settings that were computed from these records before the run, such as names of classes, class
    weights or the scale of targets, and what was public; "none" where there were none. The report asks where the run
    has a place for them."""
    trained_by: Text | None = None
    """Who trained the model and answers for it."""
    base_model: Text | None = None
    """Name of the model that was fine-tuned, such as its Hub id, where model.name is a folder."""
    license: Text | None = None
    """License of the released model: the Hub's identifier, such as apache-2.0, or another name."""
    language: Annotated[Any, BeforeValidator(_language)] = None
    """Languages of the model: ISO codes such as en, or [en, de]."""


def _tokens(given: Any) -> Any:
    if given not in (None, "auto") and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ValueError('must be a whole number of at least 1, or "auto"')
    return given


@section
class Microbatch:
    """The rows that go through the model at once; it has no influence on the guarantee."""

    tokens: Annotated[Any, BeforeValidator(_tokens), BASIC] = None
    """Tokens of a microbatch, padding included. It replaces the number of rows, train.per_device_train_batch_size: rows
    of similar length share a microbatch, so that a microbatch of short rows has many. auto: the largest number that
    fits on the GPU, found by trial before the first step (one process per GPU and DDP; 2048 on a CPU)."""
    pack: bool = False
    """Whether the rows of a microbatch are concatenated without padding; tokens then counts only the rows' own tokens.
    For causal language models."""


@section
class Recipe:
    """One run: the sections of a recipe file."""

    model: Annotated[ModelConfig, BASIC]
    """Section: the model."""
    data: Annotated[DataConfig, BASIC]
    """Section: the records."""
    privacy: Annotated[PrivacyConfig, BASIC]
    """Section: the guarantee."""
    train: Annotated[Any, BeforeValidator(_train), BASIC] = Field(default_factory=dict)
    """Section: names of transformers.TrainingArguments, and average: the average of the weights that is released, such
    as {kind: ema, decay: 0.95}. Without lr_scheduler_type the learning rate is constant after a warm-up of 10 % of the
    steps. optim_args of AdamW may be second_moment=corrected or low_passed. trainer: sft or dpo takes the names of
    TRL's SFTConfig or DPOConfig too."""
    public_pretrain: PublicPretrainConfig | None = None
    """Section: ordinary training on public text first."""
    release: ReleaseConfig = Field(default_factory=ReleaseConfig)
    """Section: facts for the report that only people know."""
    microbatch: Microbatch = Field(default_factory=Microbatch)
    """Section: the rows that go through the model at once."""
    beside: dict[str, Any] = Field(default_factory=dict)
    """Sections of methods that stand beside ``train``, by name (`dpllm.registry`); each is a key of the file.
    ``federated`` is that of a federated run (`dpllm methods federated`): ``train`` then has the rounds as ``max_steps``
    and the server's ``learning_rate``."""
    noise_memory: Annotated[str, OneOf(NOISE_MEMORIES)] = "auto"
    """For correlated noise: stored keeps the noise of earlier steps, regenerated draws it again in each step (no
    memory, more time), auto stores as much as fits a quarter of the device's memory. It changes no number."""
    source: ClassVar[Source | None] = None
    """The file and the overrides that the recipe was read from; no key."""

    def __post_init__(self) -> None:
        """Check the combinations of two sections."""
        check_fit(self.data, self.model.task)
        privacy, data = one_unit(self.privacy, self.data)
        assign(self, train=with_schedule(self.train), privacy=privacy, data=data)
        if self.microbatch.pack and self.model.task != "causal_lm":
            raise ConfigError(
                f'microbatch.pack concatenates rows, which model.task="{self.model.task}" does not support: it is for '
                "causal language models. Leave microbatch.pack out"
            )
        if self.model.quantization is not None and self.model.name is None and self.public_pretrain is None:
            raise ConfigError(
                "model.quantization freezes the weights, and those of model.config are random: name a pretrained model "
                "(model.name), or train one on public text first (public_pretrain)"
            )
        refuse_shipped_name(privacy.dataset, data.path)
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


NESTED: dict[type, dict[str, type]] = {
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
"""The sections inside each section."""

_Privacy = TypeVar("_Privacy", bound=PrivacyUnit)
_Data = TypeVar("_Data", bound=DataConfig)


_SHIPPED = ("chitchat", "clinic")
"""Names of the data sets of shipped recipes, whose paths begin with ``builtin:``."""


def refuse_shipped_name(dataset: str | None, path: Any) -> None:
    """Refuse a shipped recipe's name of a data set for other records: report and budget would name the wrong people.

    Raises:
        ConfigError: ``privacy.dataset`` is such a name, and ``data.path`` is not the shipped one.
    """
    if dataset in _SHIPPED and not str(path).startswith("builtin:"):
        raise ConfigError(
            f"privacy.dataset={dataset} is the data set of a shipped recipe, and data.path={path} has "
            "other records: set privacy.dataset to a name of your own, or to null"
        )


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
