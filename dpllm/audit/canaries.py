"""Canaries of an audit: their texts, the coins that included them, and a hash that proves that neither was changed.

`dpllm.audit.prepare` creates a `CanarySet` and saves it as ``canaries.json``, a secret until the audit;
`dpllm.audit.run` reads it after the training. A canary is one privacy unit: one record, or the records of one new user.
Each is included by its own fair coin, as the one-run bounds require (Steinke, Nasr, Jagielski, arXiv:2305.08846).

The file contains a hash of its whole contents, and the data file's name contains that hash. So the run's recipe commits
to texts, order and coins before the training. The data file holds only the included canaries; both facts are checked
before a score is computed.

**Texts** are made only from public sources. A text must be practically unseen, so that a model can have learnt it only
from the training data. It must not belong to any person, since an audit may print it. Private records are therefore
never read here. There are three kinds:

* *random tokens*: uniform over the tokens that decode to readable text;
* *rare suffix*: the beginning of a public text, followed by tokens that hardly occur in public text (after Panda et
  al., ICLR 2025, who audit with rare tokens behind a prefix);
* *sampled*: text that a model which never saw the data writes at a high temperature (Mitchell et al.,
  arXiv:2606.10481).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from scipy import stats
from transformers import PreTrainedTokenizerBase

from dpllm.audit.bounds import AuditError
from dpllm.config import DataConfig
from dpllm.config.formats.catalogue import FORMATS
from dpllm.models.writing import cache_of

RANDOM_TOKENS, RARE_SUFFIX, SAMPLED = KINDS = ("random-tokens", "rare-suffix", "sampled")
RARE_SHARE = 0.25
"""Share of the vocabulary that counts as rare: the tokens that occur least often in the public text."""

_ROUNDS = 20
_SAMPLED_TOGETHER = 64
Pair = tuple[str, str]
"""The prefix of a text, or an empty one, and the text."""


def distinct(draw: Callable[[int], Sequence[Pair]], num: int) -> list[Pair]:
    """Return `num` pairs whose texts are all different and not empty.

    Raises:
        AuditError: it repeats the same texts.

    >>> import itertools
    >>> numbers = itertools.cycle("abc")
    >>> distinct(lambda num: [("", next(numbers)) for _ in range(num)], 3)
    [('', 'a'), ('', 'b'), ('', 'c')]
    """
    found: dict[str, str] = {}
    for _ in range(_ROUNDS):
        for prefix, text in draw(num - len(found)):
            if text:
                found.setdefault(text, prefix)
        if len(found) >= num:
            return [(prefix, text) for text, prefix in list(found.items())[:num]]
    raise AuditError(
        f"only {len(found)} of {num} canaries could be made without repeating one. Make them longer (--length), use "
        "fewer (--canaries), or a different kind (--kind)"
    )


def readable_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that decode to readable text by themselves, in ascending order.

    Raises:
        AuditError: there are fewer than two.
    """
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in special]
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    found = [
        token
        for token, text in zip(ids, texts, strict=True)
        if text.strip() and text.isprintable() and "\ufffd" not in text
    ]
    if len(found) < 2:
        raise AuditError(
            "the tokenizer has fewer than two tokens that decode to readable text, so it cannot make a canary. Use a "
            "different tokenizer"
        )
    return found


def random_tokens(
    tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, int], rng: np.random.Generator
) -> Callable[[int], list[Pair]]:
    """Return a function that draws texts of uniform tokens.

    When a text is encoded again, neighbouring tokens may merge, so the number of tokens may differ slightly.

    Args:
        tokenizer: tokenizer of the model to audit.
        lengths: tokens of the prefix, 0 for none, and of the text.
        rng: source of the randomness.
    """
    tokens = np.asarray(readable_tokens(tokenizer))

    def draw(num: int) -> list[Pair]:
        return [_decode_pair(tokenizer, rng.choice(tokens, sum(lengths)).tolist(), lengths[0]) for _ in range(num)]

    return draw


def rare_suffix(
    tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, int], public: Sequence[str], rng: np.random.Generator
) -> Callable[[int], list[Pair]]:
    """Return a function that draws beginnings of public texts, followed by rare tokens.

    Args:
        tokenizer: tokenizer of the model to audit.
        lengths: tokens of the prefix and of the rare part.
        public: public texts.
        rng: source of the randomness.

    Raises:
        AuditError: there is no public text.
    """
    beginnings = [text for text in public if text.strip()]
    if not beginnings:
        raise AuditError(
            "a canary with a rare suffix begins with public text, but there is none. Pass a file with one text per "
            "line (--prefixes), a recipe with public_pretrain, or a different kind (--kind)"
        )
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    for ids in _encode(tokenizer, beginnings):
        np.add.at(counts, ids, 1)
    tokens = np.asarray(readable_tokens(tokenizer))
    rare = tokens[np.argsort(counts[tokens], kind="stable")][: max(2, int(RARE_SHARE * len(tokens)))]

    def draw(num: int) -> list[Pair]:
        chosen = [beginnings[int(number)] for number in rng.integers(len(beginnings), size=num)]
        heads = [ids[: lengths[0]] for ids in _encode(tokenizer, chosen)]
        return [_decode_pair(tokenizer, head + rng.choice(rare, lengths[1]).tolist(), len(head)) for head in heads]

    return draw


def sampled(
    model: Any, tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, int], temperature: float, seed: int
) -> Callable[[int], list[Pair]]:
    """Return a function that samples texts from a model that never saw the private data.

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's tokenizer.
        lengths: tokens of the prefix, 0 for none, and of the text.
        temperature: temperature of the sampling; 0.8 or more gives distinctive texts (arXiv:2606.10481).
        seed: seed of the sampling.

    Raises:
        AuditError: the temperature is not above 0, or the tokenizer has no token to begin with.
    """
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if temperature <= 0:
        raise AuditError(f"the temperature must be above 0, got {temperature}; 1 keeps the model's probabilities")
    if begin is None:
        raise AuditError(
            "the tokenizer has no token that begins or ends a text, so the model cannot write without a prompt. Set "
            "its bos_token or eos_token"
        )
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.full((model.get_input_embeddings().weight.shape[0],), -torch.inf)
    allowed[readable_tokens(tokenizer)] = 0.0

    def draw(num: int) -> list[Pair]:
        ids: list[list[int]] = []
        for start in range(0, num, _SAMPLED_TOGETHER):
            size = min(_SAMPLED_TOGETHER, num - start)
            ids += _sample(model, begin, (size, sum(lengths)), allowed, temperature, generator)
        return [_decode_pair(tokenizer, row, lengths[0]) for row in ids]

    return draw


@torch.no_grad()
def _sample(
    model: Any, begin: int, shape: tuple[int, int], allowed_V: torch.Tensor, temperature: float, generator: Any
) -> list[list[int]]:
    """Sample rows of tokens; random numbers come from the CPU on every device."""
    device = next(model.parameters()).device
    model.eval()
    rows_BT = torch.full((shape[0], 1), begin, dtype=torch.long)
    step_BT = rows_BT
    past: dict[str, Any] = {}
    for _ in range(shape[1]):
        out = model(input_ids=step_BT.to(device), use_cache=True, **past)
        past = cache_of(out)
        p_BV = (out.logits[:, -1].float().cpu() / temperature + allowed_V).softmax(-1)
        step_BT = torch.multinomial(p_BV, 1, generator=generator)
        rows_BT = torch.cat([rows_BT, step_BT], dim=1)
    return rows_BT[:, 1:].tolist()


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[list[int]]:
    yield from tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def _decode_pair(tokenizer: PreTrainedTokenizerBase, ids: list[int], split: int) -> Pair:
    prefix, text = (
        str(tokenizer.decode(part, clean_up_tokenization_spaces=False)).strip() for part in (ids[:split], ids[split:])
    )
    return prefix, text


CANARIES_FILE = "canaries.json"
COIN_FLIPS = "an independent fair coin per canary"
CANARY_FORMATS = tuple(name for name, kind in FORMATS.items() if kind().record("", "") is not None)
"""Formats of records that a canary can have."""

READ_TOGETHER = 10_000
"""Number of records read at a time."""

_FORMAT = 1
_NAME_LENGTH = 12  # characters of the hash in the name of the data file
_IMPLAUSIBLE = 1e-6  # probability below which coins were not fair


@dataclass(frozen=True, kw_only=True)
class Canary:
    """One privacy unit that was created for the audit."""

    records: tuple[tuple[str, str], ...]
    """(prefix, text) of each record; the prefix is not scored, the text is."""
    user: str | int | None = None
    """The new user who owns these records; None at sequence level."""
    included: bool = False
    """The coin: whether the canary entered the data."""


@dataclass(frozen=True, kw_only=True)
class CanarySet:
    """All canaries of one audit, and the data that some of them entered."""

    canaries: tuple[Canary, ...]
    """(m,) in secret order."""
    candidates: tuple[Canary, ...] = ()
    """More texts of the same kind that never had a coin: the reference for exposure."""
    kind: str
    """The kind of the texts."""
    unit: str
    """"sequence" or "user"."""
    repetitions: int = 1
    """How often each record of an included canary is in the data."""
    delta: float
    """δ of the recipe for these data."""
    num_units: int
    """N of the data, including the included canaries."""
    data_sha256: str
    """Hash of the data file."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe that trains on the data, without its `data.path`, which contains the hash of this set."""
    created_at: str
    """Time of creation, in UTC."""
    nonce: str
    """256 random bits, so that the hash, which is part of a file name, reveals nothing."""

    @property
    def hash(self) -> str:
        """SHA-256 over texts, order, coins and everything else."""
        return hashlib.sha256(json.dumps(self._body(), sort_keys=True).encode()).hexdigest()

    @property
    def data_name(self) -> str:
        """Name of the data file."""
        return f"records-{self.hash[:_NAME_LENGTH]}.parquet"

    @property
    def included(self) -> list[bool]:
        """(m,) the coins."""
        return [canary.included for canary in self.canaries]

    @property
    def data(self) -> DataConfig:
        """The data section that turns records into rows; its path is only the name of the data file."""
        return DataConfig(**{**self.recipe["data"], "path": self.data_name})

    @property
    def unit_column(self) -> str | None:
        """The column of the user's id."""
        column: str | None = self.recipe["data"]["columns"].get("unit")
        return column

    def save(self, path: str | Path) -> None:
        """Write the file, readable only by its owner (mode 0600).

        Raises:
            FileExistsError: the file exists.
        """
        text = json.dumps({**self._body(), "hash": self.hash}, indent=1, ensure_ascii=False)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CanarySet:
        """Read a file that `save` wrote.

        Raises:
            AuditError: it cannot be read, is a different kind of file, was edited, or states that the canaries were not
                included by coin flips.
        """
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise AuditError(
                f"{path} cannot be read ({error.strerror}). Pass the file that `dpllm audit prepare` wrote"
            ) from error
        except ValueError as error:
            raise AuditError(f"{path} is not JSON ({error})") from error
        if not isinstance(raw, dict) or raw.get("format") != _FORMAT or not isinstance(raw.get("canaries"), list):
            raise AuditError(
                f"{path} holds no canaries of format {_FORMAT}. Pass the file that `dpllm audit prepare` wrote"
            )
        _check_coins(path, raw)
        stored = raw.pop("hash", None)
        try:
            made = cls._from_body(raw)
        except (KeyError, TypeError, ValueError) as error:
            raise AuditError(
                f"{path} lacks a field that `dpllm audit prepare` writes: {error}. Restore the file from a copy"
            ) from error
        if made.hash != stored:
            raise AuditError(
                f"{path} was edited: its texts, order or coins do not match its hash. Scores are meaningless unless "
                "the coins are those that were flipped. Restore the file from a copy"
            )
        return made

    def _body(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["candidates"] = [{"records": item["records"]} for item in values["candidates"]]
        return {"format": _FORMAT, "num_canaries": len(self.canaries), "inclusion": COIN_FLIPS, **values}

    @classmethod
    def _from_body(cls, raw: Mapping[str, Any]) -> CanarySet:
        values = {name: raw[name] for name in raw if name not in ("format", "num_canaries", "inclusion")}
        for name in ("canaries", "candidates"):
            values[name] = tuple(
                Canary(**{**item, "records": tuple((prefix, text) for prefix, text in item["records"])})
                for item in values[name]
            )
        return cls(**values)


def _check_coins(path: str | Path, raw: Mapping[str, Any]) -> None:
    """Raise unless every canary has a coin, and the coins look fair."""
    if raw.get("inclusion") != COIN_FLIPS:
        raise AuditError(
            f"{path} states that the canaries were included by {raw.get('inclusion')!r}. The bound holds for "
            f"{COIN_FLIPS} (arXiv:2305.08846), not for a fixed number or a selection. Prepare an audit with `dpllm "
            "audit prepare`"
        )
    for number, item in enumerate(raw["canaries"]):
        if not isinstance(item, dict) or not isinstance(item.get("included"), bool):
            raise AuditError(
                f"{path}: canary {number} has no coin (included: true or false), so it is unknown whether it was in "
                "the data. Restore the file from a copy"
            )
    num, num_in = len(raw["canaries"]), sum(item["included"] for item in raw["canaries"])
    if num == 0:
        raise AuditError(f"{path} has no canary, so there is nothing to audit with. Pass the file of a different audit")
    if stats.binomtest(num_in, num, 0.5).pvalue < _IMPLAUSIBLE:
        raise AuditError(
            f"{path}: {num_in} of {num} canaries were included, which happens with fair coins in less than one case in "
            f"{1 / _IMPLAUSIBLE:,.0f}. Include each canary by its own fair coin, as `dpllm audit prepare` does"
        )


def record_of(prefix: str, text: str, config: DataConfig) -> dict[str, Any]:
    """Return a record in the format of the data; in formats with a prompt, the prefix is the prompt.

    Raises:
        AuditError: the format has no text that a model learns to write.

    >>> record_of("Say:", "xyzzy", DataConfig(path="x", max_length=8, format="prompt_completion"))
    {'prompt': 'Say:', 'completion': 'xyzzy'}
    """
    made = config.form.record(prefix, text, gap=" ")
    if made is None:
        raise AuditError(
            f"data.format={config.format!r} cannot hold a canary: the audit needs the probability of a text, which "
            f"only the formats {', '.join(CANARY_FORMATS)} provide"
        )
    return made


def key_of(record: Mapping[str, Any], config: DataConfig, unit_column: str | None) -> tuple[Any, ...]:
    """Return the key that identifies a record: its texts, and its user."""
    return (*config.form.key(record), record[unit_column] if unit_column else None)


def key_columns(config: DataConfig, unit_column: str | None) -> list[str]:
    """Return the columns that form a record's key."""
    return [*record_of("", "", config), *([unit_column] if unit_column else [])]


def count_records(
    batches: Iterable[Mapping[str, Sequence[Any]]],
    wanted: Iterable[tuple[Any, ...]],
    config: DataConfig,
    unit_column: str | None,
) -> Counter[tuple[Any, ...]]:
    """Return how often each of the wanted keys is in the data.

    Args:
        batches: records, each batch as columns, which include those of `key_columns`.
        wanted: keys in the form of `key_of`.
        config: the format of the records.
        unit_column: the column of the user's id; None if it is not part of the keys.
    """
    known, found = set(wanted), Counter[tuple[Any, ...]]()
    columns = key_columns(config, unit_column)
    for batch in batches:
        rows = zip(*(batch[name] for name in columns), strict=True)
        keys = (key_of(dict(zip(columns, row, strict=True)), config, unit_column) for row in rows)
        found.update(key for key in keys if key in known)
    return found


def check_data(made: CanarySet, folder: str | Path) -> None:
    """Check that the data next to ``canaries.json`` match the coins.

    Raises:
        AuditError: the data file is missing or was replaced, an included canary is not in it, or an excluded one is.
    """
    path = Path(folder) / made.data_name
    if not path.is_file():
        raise AuditError(
            f"{path} is missing; its name is part of the hash of {CANARIES_FILE}. Either the file was moved, or the "
            "coins were changed after the data had been written. Restore both files of `dpllm audit prepare`"
        )
    if file_hash(path) != made.data_sha256:
        raise AuditError(f"{path} is not the file that {CANARIES_FILE} was made with. Restore it from a copy")
    config, column = made.data, made.unit_column
    # Streamed, so that no copy of private records is left in a cache.
    stored = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    batches = stored.select_columns(key_columns(config, column)).iter(READ_TOGETHER)
    keys = [canary_keys(canary, config, column) for canary in made.canaries]
    found = count_records(batches, (key for own in keys for key in own), config, column)
    for number, (canary, own) in enumerate(zip(made.canaries, keys, strict=True)):
        expected = made.repetitions if canary.included else 0
        if any(found[key] != expected for key in own):
            raise AuditError(
                f"canary {number} was {'included' if canary.included else 'left out'} by its coin, but {path} "
                "contradicts it: coins and data come from different audits, or labels were swapped. Prepare the audit "
                "again"
            )


def canary_keys(canary: Canary, config: DataConfig, unit_column: str | None) -> list[tuple[Any, ...]]:
    """Return the keys of a canary's records, one per record."""
    user = {unit_column: canary.user} if unit_column else {}
    return [key_of({**record_of(*record, config), **user}, config, unit_column) for record in canary.records]


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
