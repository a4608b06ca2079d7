"""Find labels, unit ids and file names of the private data in the files that are published with a model.

At the start of a training, hashes of these strings are written into a file that must not be released. `dpllm verify`,
and therefore `dpllm push`, compares the texts in a folder with them, even if the data no longer exists.

A string is compared as a sequence of words without case, accents and punctuation, so ``records_of_Anna_K.csv`` is found
in "Records of Anna K". Strings that any report may contain are not compared: ordinary words ("positive", "train"),
small numbers, and what people named as public (`PrivateStrings.save`, and their notes in the report).
"""

from __future__ import annotations

import hashlib
import html
import itertools
import json
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dpllm.config.files import write_file
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.ledger import REPORT_FILE as JSON_FILE
from dpllm.privacy.private_folder import PRIVATE_FOLDER, private_path

STRINGS_FILE = f"{PRIVATE_FOLDER}/private_strings.json"
"""File with keyed hashes of the strings, relative to the run's folder."""
FEW = 10
"""A label that at least this many units have is not compared; the report asks where the class names come from."""
LABEL, ID, FILE = "a label", "a unit id", "a file name"

_WORD = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+")
_TAG = re.compile(r"<(?:style|script)\b.*?</(?:style|script)>|<[^>]*>", re.DOTALL)
_DOCUMENTED = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)
_LONGEST = 8  # only this many first words of a string are compared
_LEAST = 4  # a string with fewer letters and digits is not compared
_DIGITS = 7  # a number with fewer digits is small
_MOST = 2_000_000  # largest number of strings per run
TEXTS = (
    *("config.json", "generation_config.json", "adapter_config.json", "*/adapter_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "processor_config.json"),
    *("preprocessor_config.json", "chat_template.jinja", "additional_chat_templates/*.jinja", "README.md"),
    *("privacy_report.md", "privacy_report.html", JSON_FILE, "privacy_plan.json", LEDGER_FILE),
)
"""Published files whose texts are compared. A tokenizer's vocabulary is the base model's, or the report asks about it.
"""
_VOCABULARY = ("vocab", "merges")  # keys of a tokenizer's model
_USUAL_NAMES = """
    train training test dev eval valid validation val held out heldout private public raw clean cleaned final new old
    all part shard split sample samples records record rows row data dataset datasets corpus corpora text texts notes
    note documents docs messages chats chat reviews questions answers prompts labels labelled pairs instructions
    english german french of the and for with by from in to on a an my our home users tmp temp work runs run output
    outputs input inputs files file folder csv tsv json jsonl ndjson txt parquet arrow gz zst xlsx export dump latest
"""


@dataclass
class PrivateStrings:
    """The strings of a run's private data.

    Attributes:
        kinds: string -> `LABEL`, `ID` or `FILE`.
    """

    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, texts: Iterable[Any]) -> None:
        """Add strings of one kind; ignore values that are not texts or large numbers, and all after 2 million."""
        for text in texts:
            if isinstance(text, str) or (isinstance(text, int) and abs(text) >= 10 ** (_DIGITS - 1)):
                if len(self.kinds) >= _MOST:
                    return
                self.kinds.setdefault(str(text), kind)

    def add_labels(self, labels: Iterable[tuple[Any, Any]]) -> None:
        """Add the labels that fewer than `FEW` units have."""
        units: dict[Any, set[Any]] = {}
        for label, unit in labels:
            own = units.setdefault(label, set())
            if len(own) < FEW:
                own.add(unit)
        self.add(LABEL, (label for label, own in units.items() if len(own) < FEW))

    def add_path(self, path: str | Path, run: str | Path) -> None:
        """Add the names of a file and of the two folders above it, except folders that also contain the run."""
        parts, others = Path(path).expanduser().resolve().parts, Path(run).resolve().parts
        own = itertools.dropwhile(lambda pair: pair[0] == pair[1], itertools.zip_longest(parts, others))
        self.add(FILE, [part for part, _ in own if part is not None][-3:])

    def save(self, folder: str | Path, public: Iterable[str] = ()) -> None:
        """Write the hashes of the compared strings, with a new key. Call it in one process.

        Args:
            folder: the run's folder.
            public: texts that were declared public, such as class names; strings in them are not compared.
        """
        key = secrets.token_bytes(16)
        # A run may have the name of its data, as in runs/alpaca; two words may be a person's name.
        own = set(_forms(Path(folder).resolve().name, [1]))
        wanted = {
            form
            for text, kind in self.kinds.items()
            for form in _compared(text, kind)
            if not (kind == FILE and form in own)
        }
        wanted -= {form for text in public for form in _forms(text, range(1, _LONGEST + 1))}
        lengths = sorted({len(_WORD.findall(form)) for form in wanted})
        stored = {"key": key.hex(), "lengths": lengths, "hashes": sorted(_hash(form, key) for form in wanted)}
        path = private_path(folder, STRINGS_FILE)
        path.unlink(missing_ok=True)  # whatever its permissions were
        write_file(path, json.dumps(stored), 0o600)


def check_strings(folder: str | Path) -> tuple[str, bool | None, str] | None:
    """Check that the texts in a folder contain no private string.

    Returns:
        What was checked, the result (None: it could not be checked) and the finding in words. None instead of all
        three: the folder is not on the machine that trained, such as a copy of the published files.
    """
    folder = Path(folder)
    what = "no text to publish holds a label, a unit id or a file name of the private data"
    run = next((place for place in (folder, folder.resolve().parent) if (place / PRIVATE_FOLDER).is_dir()), None)
    if run is None:
        return None
    try:
        stored = json.loads((run / STRINGS_FILE).read_text(encoding="ascii"))
        key, lengths, hashes = bytes.fromhex(stored["key"]), list(stored["lengths"]), set(stored["hashes"])
    except (OSError, ValueError, KeyError, TypeError):
        return what, None, f"{STRINGS_FILE} of the run is missing or damaged"
    known = hashes - {_hash(form, key) for text in _noted(folder) for form in _forms(text, lengths)}

    def is_private(text: str) -> bool:
        return any(_hash(form, key) in known for form in _forms(text, lengths))

    files = sorted({path for pattern in TEXTS for path in folder.glob(pattern) if path.is_file()} if known else ())
    found = [
        f"{path.relative_to(folder)}{f' ({place})' if place and not is_private(place) else ''}"
        for path in files
        for place in dict.fromkeys(place for place, text in _strings(path) if is_private(text))
    ]
    if not found:
        return what, True, f"{len(hashes):,} strings compared"
    more = f" and {len(found) - 1} more places" if len(found) > 1 else ""
    return (
        what,
        False,
        f"{found[0]}{more}. Take it out: rename the class, the token or the folder, and save again. If it is public, "
        'name it in `dpllm report note . preprocessing="…"`',
    )


def _strings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the texts of a file, each once, with the key in the file under which it is."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".html":
        yield "", html.unescape(_TAG.sub(" ", text))
        return
    if path.suffix not in (".json", ".jsonl"):
        yield "", text
        return
    seen: set[str] = set()
    for line in text.splitlines() if path.suffix == ".jsonl" else [text]:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            yield "", line
            continue
        if path.name == "adapter_config.json" and isinstance(values, dict):  # uploaded without its base's path
            values["base_model_name_or_path"] = Path(str(values.get("base_model_name_or_path"))).name
        for place, one in _leaves(values):
            if one not in seen:
                seen.add(one)
                yield place, one


def _leaves(value: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield keys and texts of a JSON value, each with the key of the outermost mapping above it."""
    if isinstance(value, str):
        yield above, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if not (above == "model" and name in _VOCABULARY):
                yield above, str(name)
                yield from _leaves(inner, above or str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, above)


def _noted(folder: Path) -> Iterator[str]:
    """Yield what people wrote about the release, which they make public themselves."""
    try:
        report = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
        told = [report["setting"]["data_holder"], report["setting"]["audience"], report["noted"], report["utility"]]
        told += [report["definition"]["dataset"], report["definition"]["other_uses_of_the_data"]]
        told += [[settled["answer"], settled["by"]] for settled in report["settled_points"]]
    except (OSError, ValueError, KeyError, TypeError):
        return
    yield from (text for _, text in _leaves(told))


def _forms(text: str, lengths: Iterable[int]) -> Iterator[str]:
    """Yield each sequence of this many words in a text, both as it is written and as words only."""
    plain = _plain(text)
    spans = [match.span() for match in _WORD.finditer(plain)]
    words = [plain[start:end] for start, end in spans]
    for length in lengths:
        for at in range(len(words) - length + 1):
            yield " ".join(words[at : at + length])
            if length > 1:
                yield plain[spans[at][0] : spans[at + length - 1][1]]


def _compared(text: str, kind: str) -> Iterator[str]:
    """Yield the forms of a private string that are compared; none if any text may contain it."""
    plain = _plain(Path(text).name.partition(".")[0] if kind == FILE else text)
    spans = [match.span() for match in _WORD.finditer(plain)][:_LONGEST]
    words = [plain[start:end] for start, end in spans]
    usual = _ordinary() | set(_USUAL_NAMES.split()) if kind == FILE else _ordinary()
    if kind == FILE:  # "records_of_anna_k" is about anna k
        while words and (words[0] in usual or words[0].isdigit()):
            del words[0], spans[0]
        while words and words[-1] in usual:
            del words[-1], spans[-1]
    if sum(map(len, words)) < _LEAST:
        return
    letters, digits = [word for word in words if not _is_number(word)], sum(c.isdigit() for c in "".join(words))
    if any(word not in usual for word in letters) or (not letters and digits >= _DIGITS):
        yield " ".join(words)
    elif kind == ID and letters and digits and " " not in plain[spans[0][0] : spans[-1][1]]:
        yield plain[spans[0][0] : spans[-1][1]]  # for example "patient-0017": compared only as it is written


def _is_number(word: str) -> bool:
    return word.replace(".", "").replace(",", "").isdigit()


def _plain(text: str) -> str:
    """Return a text without case and accents, with single spaces."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return " ".join(text.casefold().split())


def _hash(form: str, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(form.encode(), key=key, digest_size=8).digest(), "little")


@cache
def _ordinary() -> frozenset[str]:
    """Return the words of dpllm's own sentences and keys, which any report may contain."""
    root = Path(__file__).parent.parent
    files = [file for file in root.rglob("*") if file.suffix in (".py", ".md", ".html") and "clinic" not in file.name]
    texts = (_DOCUMENTED.sub(" ", file.read_text(encoding="utf-8")) for file in files)
    return frozenset(word for text in texts for word in re.findall(r"[^\W\d_]+", text.casefold()))
