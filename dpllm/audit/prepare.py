"""Data with canaries, and the recipe that trains on them.

`prepare` reads a recipe's records as the training would, creates canaries, and tosses a fair coin for each. It writes a
folder with the records and the included canaries at random positions among them, the recipe that trains on these, and
``canaries.json``. This file is a secret until the audit: the person who trains must not know the coins.

The coins test the zero-out adjacency, with one difference that all audits of DP-SGD share: an excluded canary is absent
instead of a unit that contributes nothing. So N, and with it q = b/N, depends on the coins, by one part in N for each.
N is public, and the bounds guess only from scores.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dpllm.audit.bounds import FEWEST_CANARIES, AuditError, one_run_bounds, power
from dpllm.audit.canaries import (
    CANARIES_FILE,
    CANARY_FORMATS,
    KINDS,
    RANDOM_TOKENS,
    RARE_SUFFIX,
    READ_TOGETHER,
    SAMPLED,
    Canary,
    CanarySet,
    Pair,
    canary_keys,
    count_records,
    distinct,
    file_hash,
    key_columns,
    random_tokens,
    rare_suffix,
    record_of,
)
from dpllm.audit.canaries import sampled as sampled_texts
from dpllm.config import RECIPE_FILE, DataConfig, HeldOut, ModelConfig, Recipe, nearest, recipe_to_dict, save_recipe
from dpllm.config.formats.record_format import Chat, Text
from dpllm.config.recipe import refuse_trainer
from dpllm.data.rows import load_records, load_train_and_eval, tokenization_info, tokenize_records, unit_index_of
from dpllm.data.units import UnitIndex
from dpllm.mechanism.sampling import secret_rng
from dpllm.models.load import load_base_model, load_tokenizer
from dpllm.training.arguments import plan_for, training_arguments

HELD_OUT_FILE = "held_out.parquet"
RUN_FOLDER = "run"
DEFAULT_CANARIES = 1000
MOST_CANARIES = 20_000
"""Largest number of canaries of an audit; with more, its bounds would take more than minutes."""
MOST_CANARY_TOKENS = 20_000_000
"""Largest number of tokens of all canaries and candidates together."""

_LONGEST, _LONGEST_PREFIX = 32, 16  # tokens, if no length is given


@dataclass(frozen=True, kw_only=True)
class CanaryOptions:
    """Number and kind of the canaries to make.

    Raises:
        AuditError: a value is out of range.
    """

    num: int = DEFAULT_CANARIES
    """m: each canary has its own coin; more canaries show more."""
    kind: str = RANDOM_TOKENS
    """"random-tokens", "rare-suffix" or "sampled"."""
    length: int | None = None
    """Tokens of a canary's own text. None: 32, or half of `data.max_length` if that is less."""
    records_per_user: int | None = None
    """Different records per canary user. None: 8, or the largest number that a user may have. Only at user level."""
    repetitions: int = 1
    """How often each of these records is in the data. Only at user level."""
    prefixes: Sequence[str] | None = None
    """Public texts with which canaries with a rare suffix begin. None: the recipe's public text."""
    sampler: str | None = None
    """Folder or Hub id of the model that writes the sampled canaries. None: the recipe's `model.name`."""
    temperature: float = 1.0
    """Temperature of the sampling."""
    num_candidates: int | None = None
    """More texts of the same kind, without coins, for exposure. None: the number of canaries."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.kind not in KINDS:
            raise AuditError(
                f"unknown kind of canary {self.kind!r}{nearest(self.kind, KINDS) or '.'} Known kinds: "
                f"{', '.join(KINDS)}"
            )
        for name, most in (("num", MOST_CANARIES), ("length", None), ("records_per_user", None), ("repetitions", None)):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise AuditError(f"{name} must be at least 1, got {value}")
            if value is not None and most is not None and value > most:
                raise AuditError(
                    f"{name} must be at most {most}, got {value}: more canaries hardly raise the bound. Use fewer "
                    "(--canaries)"
                )
        if self.num_candidates is not None and self.num_candidates < 0:
            raise AuditError(f"num_candidates must be at least 0, got {self.num_candidates}")
        if not 0 < self.temperature < math.inf:
            raise AuditError(
                f"temperature must be above 0 and finite, got {self.temperature}; 1 keeps the model's probabilities"
            )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The files of `prepare`, and the power of the audit."""

    folder: Path
    """Folder of the files."""
    made: CanarySet
    """Contents of ``canaries.json``."""
    num_records: int
    """Records of the data file."""
    ceiling: float
    """The highest lower bound on ε that this many canaries can show, with perfect scores."""
    power: Mapping[str, float]
    """Noise below the plan's -> share of such audits that fail under an ideal attack; empty: no claim."""

    @property
    def recipe_path(self) -> Path:
        """The recipe that trains on the data."""
        return self.folder / RECIPE_FILE

    @property
    def secret_path(self) -> Path:
        """The file with the coins, which is a secret until the audit."""
        return self.folder / CANARIES_FILE

    @property
    def run_folder(self) -> Path:
        """The folder to which that recipe writes the model."""
        return self.folder / RUN_FOLDER


def prepare(recipe: Recipe, folder: str | Path, options: CanaryOptions | None = None) -> Prepared:
    """Write data with canaries into a new folder, and the recipe that trains on them.

    Guarantee: the coins are fair, independent and from the operating system's entropy; only the data file depends on
    them. Canaries are created without reading a private record; afterwards a check ensures that none of them is already
    in the data.

    Args:
        recipe: the training to audit. Held-out records are split off first, so that no canary is among them.
        folder: the folder to write, which must not exist, or must be empty.
        options: number and kind of the canaries.

    Raises:
        AuditError: the canaries could show nothing, or something untrue, or cannot be created for this recipe.
        ValueError: the records, the tokenizer or the model cannot be loaded.
    """
    options, folder = options or CanaryOptions(), Path(folder)
    _check_request(recipe, folder, options)
    per_unit = _records_per_unit(recipe, options)
    num_more = options.num if options.num_candidates is None else options.num_candidates
    _check_size((options.num + num_more) * per_unit, recipe, options)
    train, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    _refuse_other_chats(train, recipe.data)
    public = load_records(recipe.public_pretrain.data) if recipe.public_pretrain else None
    public_texts = public[recipe.public_pretrain.data.column("text")] if public and recipe.public_pretrain else None
    tokenizer = load_tokenizer(recipe.model, public_texts)
    draw = _texts(recipe, tokenizer, options, public_texts)
    pairs = distinct(draw, (options.num + num_more) * per_unit)
    _check_lengths(pairs, recipe, tokenizer)
    units = [tuple(pairs[start : start + per_unit]) for start in range(0, len(pairs), per_unit)]
    users = _new_users(train, recipe.privacy.unit, options.num)
    canaries = tuple(
        Canary(records=records, user=user, included=bool(secrets.randbits(1)))
        for records, user in zip(units[: options.num], users, strict=True)
    )
    _check_new(canaries, train, recipe.data)
    records = _insert(train, canaries, recipe, options.repetitions)
    units_of_all = unit_index_of(records, recipe.privacy)
    num_units = units_of_all.num_units
    delta = recipe.privacy.delta if recipe.privacy.delta is not None else 1 / (10 * num_units)
    ceiling = _ceiling(options.num, delta, recipe)  # before anything is written
    shares = _power(options.num, delta, recipe, units_of_all)

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "records.tmp"
    records.to_parquet(str(temporary))
    if held_out is not None:
        held_out.to_parquet(str(folder / HELD_OUT_FILE))
    changed = _recipe_for(recipe, folder.resolve(), with_held_out=held_out is not None)
    made = CanarySet(
        canaries=canaries,
        candidates=tuple(Canary(records=records) for records in units[options.num :]),
        kind=options.kind,
        unit=recipe.privacy.protects,
        repetitions=options.repetitions,
        delta=delta,
        num_units=num_units,
        data_sha256=file_hash(temporary),
        recipe=_as_stored(changed),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        nonce=secrets.token_hex(32),
    )
    os.replace(temporary, folder / made.data_name)
    data = dataclasses.replace(changed.data, path=str(folder.resolve() / made.data_name))
    save_recipe(dataclasses.replace(changed, data=data), folder / RECIPE_FILE)
    made.save(folder / CANARIES_FILE)
    return Prepared(folder=folder, made=made, num_records=len(records), ceiling=ceiling, power=shares)


def read_prefixes(path: str | Path) -> list[str]:
    """Return the lines of a file of public text.

    Raises:
        AuditError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"{path} cannot be read as text ({error}). Pass a file with a public text per line") from error


def _check_request(recipe: Recipe, folder: Path, options: CanaryOptions) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AuditError(f"{folder} is not empty. Pass a new folder, so that an earlier audit's coins are not lost")
    refuse_trainer(recipe, "dpllm audit prepare")
    if recipe.model.task != "causal_lm" or recipe.data.format not in CANARY_FORMATS:
        raise AuditError(
            f"model.task={recipe.model.task!r} with data.format={recipe.data.format!r} cannot be audited with text "
            f"canaries, which need a causal_lm and one of the formats {', '.join(CANARY_FORMATS)}. `dpllm audit "
            "gradient` audits the training itself for any task"
        )
    if recipe.privacy.budget_file is not None:
        raise AuditError(
            f"the recipe charges {recipe.privacy.budget_file}, which counts the units without canaries, so it would "
            "refuse the run. Create a budget for these data (`dpllm budget create`) and name it for training. Prepare "
            "with privacy.budget_file="
        )
    if recipe.privacy.protects == "sequence" and (options.repetitions > 1 or options.records_per_user is not None):
        raise AuditError(
            "without data.columns.unit every record is a unit, so ε does not cover a canary in several records, and a "
            "bound above ε would accuse a sound run. Omit --repetitions and --records-per-user, or audit a user-level "
            "recipe"
        )


def _records_per_unit(recipe: Recipe, options: CanaryOptions) -> int:
    """Return the number of different records of a canary.

    Raises:
        AuditError: some of them would be omitted from the training.
    """
    most = recipe.privacy.max_rows_per_unit
    if recipe.privacy.protects == "sequence" or most is None:
        return 1
    asked = options.records_per_user
    chosen = max(1, min(8, most // options.repetitions)) if asked is None else asked
    if chosen * options.repetitions > most:
        raise AuditError(
            f"a canary user would have {chosen * options.repetitions} records, but only max_rows_per_unit={most} of "
            "them are used. Use fewer (--records-per-user, --repetitions)"
        )
    return chosen


def _check_size(num_texts: int, recipe: Recipe, options: CanaryOptions) -> None:
    """Raise, before any text is made, if the texts could not be trained on, or would take hours to make."""
    if options.length is not None and options.length > recipe.data.max_length:
        raise AuditError(
            f"canaries of {options.length} tokens are longer than data.max_length={recipe.data.max_length}, and the "
            "truncated part is never learnt. Make them shorter (--length), or raise data.max_length"
        )
    tokens = num_texts * (options.length or _LONGEST)
    if tokens > MOST_CANARY_TOKENS:
        raise AuditError(
            f"{num_texts} texts of canaries and candidates have {tokens} tokens, but at most {MOST_CANARY_TOKENS} are "
            "allowed. Use fewer (--canaries, --candidates, --records-per-user) or shorter ones (--length)"
        )


def _texts(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    options: CanaryOptions,
    public_texts: Iterable[str] | None,
) -> Callable[[int], Sequence[Pair]]:
    """Return a function that draws texts of the chosen kind."""
    room = max(2, recipe.data.max_length - 4)  # reserves 4 tokens for a tokenizer's or a template's additions
    length = min(_LONGEST, max(2, room // 2)) if options.length is None else options.length
    prefix = min(_LONGEST_PREFIX, max(1, room // 4))
    lengths = (0 if recipe.data.form.holds is Text else prefix, length)
    if options.kind == RANDOM_TOKENS:
        return random_tokens(tokenizer, lengths, secret_rng())
    if options.kind == RARE_SUFFIX:
        public = options.prefixes if options.prefixes is not None else list(public_texts or ())
        return rare_suffix(tokenizer, (prefix, length), public, secret_rng())
    name = options.sampler or recipe.model.name
    if name is None:
        raise AuditError(
            f"{SAMPLED} canaries are written by a model that exists before the private training, but the recipe names "
            "none. Pass its folder (--sampler, such as public_pretrain of an earlier run), or a different kind "
            "(--kind)"
        )
    loaded: Any = load_base_model(ModelConfig(name=name, dtype=recipe.model.dtype), tokenizer)
    model = loaded.to(torch.accelerator.current_accelerator() or "cpu")
    return sampled_texts(model, tokenizer, lengths, options.temperature, secrets.randbits(63))


def _check_lengths(pairs: Sequence[Pair], recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise an error unless every record of a canary is one complete row."""
    records = datasets.Dataset.from_list([record_of(*pair, recipe.data) for pair in pairs])
    info = tokenization_info(tokenize_records(records, tokenizer, recipe.data))
    if too_long := info["records_truncated"] + info["records_split"]:
        raise AuditError(
            f"{too_long} of {len(pairs)} canaries have more than data.max_length={recipe.data.max_length} tokens, and "
            "the truncated part is never learnt. Make them shorter (--length), or raise data.max_length"
        )


def _check_new(canaries: Sequence[Canary], train: datasets.Dataset, config: DataConfig) -> None:
    """Raise an error if the data already contain a canary, under any user."""
    keys = {key for canary in canaries for key in canary_keys(canary, config, None)}
    batches = train.select_columns(key_columns(config, None)).iter(READ_TOGETHER)
    if known := count_records(batches, keys, config, None):
        raise AuditError(
            f"{len(known)} of the canaries are already in the data, so leaving one out would have no effect. Make them "
            "longer (--length), or use a different kind (--kind)"
        )


def _new_users(train: datasets.Dataset, column: str | None, num: int) -> list[Any]:
    """Return ids of the data's type that no user in the data has; None at sequence level."""
    if column is None:
        return [None] * num
    present = set(train[column])
    if all(isinstance(user, str) for user in present):
        width = max([len(user) for user in present])
        found: dict[str, None] = {}
        while len(found) < num:
            user = secrets.token_hex(max(4, (width + 1) // 2))
            if user not in present:
                found[user] = None
        return list(found)
    first = int(max(present)) + 1
    return [first + int(number) for number in secret_rng().permutation(num)]


def _refuse_other_chats(train: datasets.Dataset, config: DataConfig) -> None:
    """Refuse chats that are not messages with a role and a content, which a canary needs."""
    if config.form.holds is not Chat:
        return
    message = getattr(train.features[config.column("messages")], "feature", None)
    kinds = [getattr((message or {}).get(key), "dtype", None) for key in ("role", "content")]
    if not {*kinds} <= {"string", "large_string"}:
        raise AuditError(
            f"data.columns.messages={config.column('messages')!r} holds chats that are not {{role, content}} messages, "
            "so a canary does not fit. Write role and content, as texts, into a copy of the data for the audit"
        )


def _insert(train: datasets.Dataset, canaries: Sequence[Canary], recipe: Recipe, repetitions: int) -> datasets.Dataset:
    """Insert the records of the included canaries at random positions; the others keep their order."""
    column = recipe.privacy.unit
    filled = []
    for canary in canaries:
        for pair in canary.records if canary.included else ():
            record = dict.fromkeys(train.column_names) | record_of(*pair, recipe.data)
            filled += [record | ({column: canary.user} if column else {})] * repetitions
    columns = {name: [record[name] for record in filled] for name in train.column_names}
    added = datasets.Dataset.from_dict(columns, features=train.features)
    rng = secret_rng()
    order = np.empty(len(train) + len(added), dtype=np.int64)
    is_added = np.zeros(len(order), dtype=bool)
    is_added[rng.choice(len(order), len(added), replace=False)] = True
    order[is_added] = len(train) + rng.permutation(len(added))
    order[~is_added] = np.arange(len(train))
    return datasets.concatenate_datasets([train, added]).select(order)


def _recipe_for(recipe: Recipe, folder: Path, with_held_out: bool) -> Recipe:
    """Return the recipe for the data in the folder, with a placeholder for their path."""
    data = dataclasses.replace(
        recipe.data,
        path=CANARIES_FILE,  # placeholder for a name that depends on everything else
        name=None,
        split="train",
        eval=HeldOut(path=str(folder / HELD_OUT_FILE) if with_held_out else None),
        limit=None,
    )
    train = {name: value for name, value in recipe.train.items() if name != "resume_from_checkpoint"}
    return dataclasses.replace(recipe, data=data, train={**train, "output_dir": str(folder / RUN_FOLDER)})


def _as_stored(recipe: Recipe) -> dict[str, Any]:
    values = recipe_to_dict(recipe)
    values["data"] = {**values["data"], "path": ""}
    return values


def _num_scores(recipe: Recipe) -> int:
    """Return 2 if the training starts from a model to compare with, since two scores then share the error; else 1."""
    return 2 if recipe.model.name or recipe.public_pretrain else 1


def _power(num: int, delta: float, recipe: Recipe, units: UnitIndex) -> dict[str, float]:
    """Return the probability that the audit notices that the run has less noise than its plan."""
    if num < FEWEST_CANARIES:
        return {}
    average = recipe.train.get("average")
    plan = plan_for(training_arguments(recipe.train), recipe.privacy, units, average=average)
    if plan.noise_multiplier == 0:
        return {}
    return power([(plan.event, plan.num_steps)], delta, in_one_run=num, tests=_num_scores(recipe))


def _ceiling(num: int, delta: float, recipe: Recipe) -> float:
    """Return the bound for perfect scores of this many canaries, with all corrections."""
    tests = _num_scores(recipe)
    perfect = np.arange(num, dtype=np.float64)
    return max(bound.ceiling for bound in one_run_bounds(perfect, perfect >= num / 2, delta, tests=tests))
