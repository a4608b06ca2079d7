"""The tests can fail: deleting what privacy rests on turns them red.

``@kills`` names an edit of the package beside the test that must notice it. ``python -m tests.mutations`` makes each
edit in a copy of the package and runs its test there, which has to fail; with words as arguments, it takes only the
mutations whose description has all of them. ``make test-deep`` runs it.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests import children

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/**/test_*.py"
Test = TypeVar("Test", bound=Callable[..., object])


def kills(what: str, file: str, before: str, after: str, case: str | None = None) -> Callable[[Test], Test]:
    """The test below fails when `before` is replaced by `after` in a file of the package.

    Args:
        what: the fault, in words.
        file: path of the edited file in this repository.
        before: text that the file contains.
        after: text in its place.
        case: the case of a parametrised test that notices the edit; all cases are run if it is left out.
    """
    del what, file, before, after, case  # they are read from the source: no test needs to be imported
    return lambda test: test


@dataclass(frozen=True)
class Mutation:
    """One edit, and the pytest id of the test that must notice it."""

    test: str
    what: str
    file: str
    before: str
    after: str

    def changed(self) -> str | None:
        """The edited file; None if the edit changes nothing, because the file no longer contains `before`."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        edited = source.replace(self.before, self.after)
        return None if edited == source else edited


def collect() -> list[Mutation]:
    """Read the mutations of all tests from their decorators."""
    return [
        mutation
        for path in sorted(ROOT.glob(TESTS))
        if "@kills(" in (source := path.read_text(encoding="utf-8"))
        for mutation in _in(ast.parse(source), path.relative_to(ROOT).as_posix())
    ]


def _in(node: ast.AST, place: str) -> Iterator[Mutation]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef):
            yield from _in(inner, f"{place}::{inner.name}")
        elif isinstance(inner, ast.FunctionDef):
            for call in inner.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "kills":
                    what, file, before, after = (ast.literal_eval(argument) for argument in call.args)
                    cases = [f"[{ast.literal_eval(keyword.value)}]" for keyword in call.keywords]
                    yield Mutation("".join([f"{place}::{inner.name}", *cases]), what, file, before, after)


def survives(mutation: Mutation) -> str | None:
    """Run the test on an edited copy of the package; return why it did not fail, None if it did."""
    edited = mutation.changed()
    if edited is None:
        return f"{mutation.file} no longer contains {mutation.before!r}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("dpllm", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / mutation.file).write_text(edited, encoding="utf-8")
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-x", "-q", "-rfE"]
        code, printed = children.run_pytest(copy, [*options, mutation.test])
    red = re.search(rf"^(FAILED|ERROR) {re.escape(mutation.test)}", printed, flags=re.MULTILINE)
    if code == 1 and red:  # a copy that can't be imported would not count
        return None
    return f"exit code {code}, {printed.strip().splitlines()[-1]}"


def main(words: Sequence[str]) -> int:
    """Run the mutations whose description has all these words; print one line for each."""
    chosen = [mutation for mutation in collect() if all(word in mutation.what for word in words)]
    children.load()
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for mutation, reason in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'killed' if reason is None else 'SURVIVED'}: {mutation.what} ({mutation.test})", flush=True)
            survivors += reason is not None
            if reason is not None:
                print(f"    {reason}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return min(survivors, 1) if chosen else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
