"""Documents with programs and commands, and the run of a page as a reader would run it: in order, in one folder.

* A block with ``title="name"`` is written to that file.
* Other ``python`` blocks run one after the other, in one namespace.
* A line of a ``bash`` block is a command. ``dpllm`` runs in this process, ``python`` and ``accelerate`` in others.
  Installations (``pip``, ``make``) are not run, and nor are outputs compared that follow them.
* Each line of a ``text`` block was printed by the blocks since the last one. Numbers may differ, and “…” is anything.
* ``<!-- run: key=value ... -->`` above a block adds arguments to its commands, so that a test takes seconds. Readers of
  the page do not see it.

``python -m tests.pages docs/tutorials/trainer.md`` runs a page in the current folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("tutorials", "methods")
    for path in (ROOT / "docs" / folder).glob("*.md")
)
_BLOCK = re.compile(
    r"(?:^<!-- run: (?P<more>.*?) -->\n+)?^```(?P<language>\w+)(?: +title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN = ("pip", "make")
_NUMBER = re.compile(r"\d[\d ,.:e+-]*\d|\d")


@dataclass(frozen=True)
class Block:
    """A block of code of a document."""

    language: str
    title: str | None
    code: str
    more: tuple[str, ...] = ()
    """Arguments that a test adds to its commands."""

    @property
    def lines(self) -> list[str]:
        """Its commands, without comments; a backslash joins lines."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := line.split("  #")[0].strip()) and not words.startswith("#")]


def blocks(document: str, language: str | None = None) -> list[Block]:
    """Return the blocks of a document of the repository, in order; of a notebook its cells."""
    text = (ROOT / document).read_text(encoding="utf-8")
    if document.endswith(".ipynb"):
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [Block("python", None, "".join(cell["source"])) for cell in cells]
    found = (
        Block(match["language"], match["title"], match["code"], tuple(shlex.split(match["more"] or "")))
        for match in _BLOCK.finditer(text)
    )
    return [block for block in found if language in (None, block.language)]


def commands(document: str, program: str) -> list[str]:
    """Return the commands of a document that begin with this."""
    return [line for block in blocks(document, "bash") for line in block.lines if line.startswith(program)]


def run_page(document: str) -> None:
    """Run a document in the current folder.

    Raises:
        AssertionError: a command failed, or did not print what the document shows.
    """
    namespace = sys.modules.setdefault("page", ModuleType("page")).__dict__  # a class looks its module up
    printed, run = "", False
    for block in blocks(document):
        if block.title is not None:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            with _captured() as output:
                exec(compile(block.code, document, "exec"), namespace)
            printed, run = printed + output.getvalue(), True
        elif block.language == "bash":
            printed += "".join(_run(line, block.more) for line in block.lines)
            run = any(line.split()[0] not in _NOT_RUN for line in block.lines)
        elif block.language == "text" and run:
            missing = missing_lines(block.code, printed)
            assert not missing, f"{document} shows {missing}, and this was printed:\n{printed}"
            printed = ""


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of a document that were not printed; numbers may differ.

    >>> missing_lines("ε = 7.99 …\\ndone", "ε = 3.1 at δ = 1e-5\\n  done")
    []
    """
    normal = " ".join(printed.split())
    return [line for line in shown.splitlines() if line.strip() and not re.search(_pattern(line), normal)]


def _pattern(line: str) -> str:
    parts = []
    for part in " ".join(line.split()).split("…"):
        end = 0
        for number in _NUMBER.finditer(part):
            parts += [re.escape(part[end : number.start()]), r"[\d ,.:e+-]+"]
            end = number.end()
        parts += [re.escape(part[end:]), ".*?"]
    return "".join(parts[:-1])


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        yield output


def _run(line: str, more: tuple[str, ...]) -> str:
    """Run a command and return what it printed."""
    words = [*shlex.split(line), *more]
    if words[0] in _NOT_RUN:
        return ""
    if words[0] == "dpllm":
        from typer.testing import CliRunner

        from dpllm.cli.program import app

        result = CliRunner().invoke(app, words[1:])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, f"{line}\n{result.output}"
        return result.output
    places = {"python": sys.executable, "accelerate": str(Path(sys.executable).parent / "accelerate")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([places[words[0]], *words[1:]], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{line}\n{run.stdout}\n{run.stderr[-3000:]}"
    return run.stdout


if __name__ == "__main__":
    run_page(sys.argv[1])
