"""The methods beside training that this installation has: what each adds to recipes, ledgers, reports and commands.

Place in the flow: below everything. The core asks here for the sections, events, words and commands of the methods in
`dpllm/methods`, and imports none of them: without that folder, training, accounting, reports and checks work all the
same. A method is a folder whose ``__init__`` has a `Method` named ``METHOD``, and a line in ``methods/catalogue.toml``.
The catalogue is a file and no group of entry points, since those are read from the metadata of the last installation:
after an update of an editable one, ledgers with new events could not be read.
"""

from __future__ import annotations

import contextlib
import importlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).parent / "methods" / "catalogue.toml"
BROKEN: dict[str, str] = {}
"""The methods that were left out because something of them cannot be imported: name, and error with remedy."""

_UNTIL = "until it works, recipes, ledgers and reports of the method are unknown"
_AGAIN = "install dpllm again; until then, recipes, ledgers and reports of all methods are unknown"


class MethodError(ValueError):
    """A method of the catalogue cannot be imported, or is not installed."""


@dataclass(frozen=True, kw_only=True)
class MethodFolder:
    """The folders that a method makes where they are no folders of a run."""

    record: str
    """The file by which such a folder is known."""
    what: str
    """What the folder is of, with its article: "a tuning"."""
    released: str
    """The folder inside it that holds the released model."""
    verify: str
    """Place of the function that checks the folder, for `dpllm verify`."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method.

    Its functions and classes are named by their places, "package.module:name", from which `load` takes them when they
    are needed: no help screen waits for torch or scipy.
    """

    name: str
    """Name of its section in a recipe, if it has one, and of its command below ``dpllm methods``."""
    section: str | None = None
    """Place of the class of its section."""
    beside_train: bool = False
    """Whether the section stands in the recipe of a training run; otherwise it replaces ``train``."""
    holds_records_out: bool = False
    """Whether the method measures its result on records that were held out."""
    events: tuple[str, ...] = ()
    """Places of the classes of its own events in ledgers, plans and budgets."""
    noises: tuple[str, ...] = ()
    """Places of the classes of its own kinds of noise."""
    words: tuple[ReleaseWords, ...] = ()
    """The words of its releases for report and card."""
    commands: tuple[str, ...] = ()
    """Places of the functions behind its other commands, which are called like them."""
    query: str | None = None
    """Place of the `QueryCommand`: how a query recipe with its section is read, planned and carried out."""
    carry_out: str | None = None
    """Place of the function behind its command where that takes a recipe with its section: the method, the file, the
    overrides, and whether as JSON."""
    help: str = ""
    """The help screen of that command."""
    examples: tuple[str, ...] = ()
    """Command lines below it."""
    show_plan: str | None = None
    """Place of the function that prints the plan of a recipe with its section: the file, the overrides, and whether as
    JSON."""
    folder: MethodFolder | None = None
    """The folders it makes that are no folders of a run."""

    @property
    def invocation(self) -> str:
        """The words that start its command: "dpllm methods count"."""
        return f"dpllm methods {self.name}"


@cache
def methods() -> tuple[Method, ...]:
    """Return the installed methods without those that cannot be imported; none without the folder ``methods``."""
    BROKEN.clear()
    found: list[Method] = []
    listed: list[str] = []
    with leave_out_broken(CATALOGUE.name):
        listed = _catalogue()
    for name in listed:
        with leave_out_broken(name):
            one = load(f"{name}:METHOD")
            if not isinstance(one, Method):
                raise MethodError(
                    f"the method {name} cannot be used (METHOD is a {type(one).__name__}): install dpllm again, or "
                    f"take its line out of {CATALOGUE}; {_UNTIL}"
                )
            found.append(one)
    return tuple(found)


def _catalogue() -> list[str]:
    """Return the packages that the catalogue lists, each once; none without a catalogue.

    Raises:
        MethodError: it is no catalogue.
    """
    if not CATALOGUE.is_file():
        return []
    try:
        listed = tomllib.loads(CATALOGUE.read_text(encoding="utf-8")).get("methods")
    except (OSError, ValueError) as error:
        raise MethodError(f"{CATALOGUE} cannot be read ({error}): {_AGAIN}") from error
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise MethodError(f"{CATALOGUE} has no list 'methods' of packages: {_AGAIN}")
    return list(dict.fromkeys(listed))


@contextlib.contextmanager
def leave_out_broken(name: str) -> Iterator[None]:
    """End the block where something of the method cannot be used, and note it in `BROKEN`."""
    try:
        yield
    except (Exception, SystemExit) as error:  # whatever a method does wrong, the others and the core go on
        BROKEN[name] = " ".join(str(error).split())


def parts(kind: str) -> list[Any]:
    """Return the "events" or "noises" of all methods but the broken ones."""
    found: list[Any] = []
    for one in methods():
        with leave_out_broken(one.name):
            found += [load(place) for place in getattr(one, kind)]
    return found


def load(place: str) -> Any:
    """Return the function, class or object of a method that stands at a place.

    Args:
        place: "package.module:name".

    Raises:
        MethodError: the module cannot be imported, or nothing in it has the name.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # of the method's code, which may raise anything
        raise MethodError(
            f"the method {module} cannot be imported ({type(error).__name__}: {error}): install dpllm again, or take "
            f"its line out of {CATALOGUE}; {_UNTIL}"
        ) from error


def query_sections() -> dict[str, type]:
    """Return the sections that replace ``train``, by their names."""
    return _sections(beside_train=False)


def sections_beside_train() -> dict[str, type]:
    """Return the sections that stand in the recipe of a training run, by their names."""
    return _sections(beside_train=True)


def _sections(beside_train: bool) -> dict[str, type]:
    found: dict[str, type] = {}
    for one in methods():
        if one.section is not None and one.beside_train is beside_train:
            with leave_out_broken(one.name):
                found[one.name] = load(one.section)
    return found


def method(name: str) -> Method:
    """Return the method with this name.

    Raises:
        MethodError: there is none.
    """
    found = next((one for one in methods() if one.name == name), None)
    if found is None:
        raise MethodError(f"there is no method {name!r}; installed are {installed()}")
    return found


def installed() -> str:
    """Return the names of all methods, for messages; of broken ones with the error."""
    names = ", ".join(one.name for one in methods() if one.name not in BROKEN) or "none"
    return "; broken: ".join([names, *BROKEN.values()])


def folder_of_method(folder: Path) -> MethodFolder | None:
    """Return whose kind a folder is, if a method makes such folders and they are no folders of a run."""
    return next((one.folder for one in methods() if one.folder and (folder / one.folder.record).is_file()), None)


@dataclass(frozen=True, kw_only=True)
class ReleaseWords:
    """The sentences about one kind of private release."""

    name: str
    """Value of `QueryPlan.method`: a few words, unique."""
    result: str
    """The release, as in the title of page and card: "counts of labels"."""
    what: str
    """What was done, without a full stop at the end; the report adds the data set and the number of units."""
    mechanism: str
    """How an answer is computed and bounded, for experts; the report also lists the plan's settings."""
    released: tuple[str, ...]
    """What may be released under the guarantee."""
    adjacency: str
    """Which data sets are neighbours for this method, and why: a clause that follows "zero-out: "."""
    not_covered: tuple[tuple[str, str], ...]
    """Uses of the data that ε does not cover, each with what to do about it."""
    assumptions: tuple[tuple[str, str], ...]
    """The assumptions behind the numbers, and how the run ensured each."""
    use: str
    """How a reader of the card uses the released files: one paragraph of Markdown."""
    has_model: bool = True
    """Whether a public model, which may have seen private records before, reads or writes texts."""
    is_model: bool = False
    """Whether the release is a model; otherwise the Hub stores it as a data set."""


def release_words() -> dict[str, ReleaseWords]:
    """Return the sentences of every kind of private release of the installed methods, by name."""
    return {words.name: words for method in methods() for words in method.words}


def require_release(name: str) -> str:
    """Refuse a kind of release that no installed method defines.

    Raises:
        MethodError: no installed method defines it.
    """
    if name not in release_words():
        raise MethodError(
            f"no installed method defines the release {name!r}; installed are {installed()}. Install dpllm completely"
        )
    return name
