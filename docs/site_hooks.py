"""The parts of the site that are made when it is built: files from other folders, links to code, and counts.

MkDocs calls the functions ``on_...``. A page may link to any file of the repository. In the site a link to another page
leads there, and a link to code becomes the file's name.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "index.md": "README.md",
    "recipes.md": "recipes/README.md",
    "results.md": "benchmarks/results.md",
    "security.md": "SECURITY.md",
    "utility.svg": "benchmarks/utility.svg",
}
"""Files of the site that are not in docs/, with their place in the repository."""

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!\w+:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"\{\{ *(\w+) *\}\}")


def on_files(files: Files, config: Any) -> Files:
    """Add the files that are not in docs/."""
    for page, place in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / place)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in the counts, and point links to other pages of the site."""
    del config, files
    source = Path(page.file.abs_src_path).resolve().relative_to(ROOT).as_posix()
    return with_links(with_counts(markdown), source, page.file.src_uri)


def with_counts(markdown: str) -> str:
    """Replace each ``{{ name }}`` by the count of that name.

    Raises:
        KeyError: there is no such count.
    """
    return MARKER.sub(lambda found: f"{COUNTS[found[1]]():,}".replace(",", " "), markdown)


def with_links(markdown: str, source: str, page: str) -> str:
    """Rewrite the relative links of a file for its place in the site.

    Args:
        markdown: its text.
        source: its place in the repository.
        page: its place in the site.

    Raises:
        ValueError: a link leads to a file that does not exist.
    """
    pages = {place: name for name, place in ELSEWHERE.items()}

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
        if not (ROOT / target).exists():
            raise ValueError(f"{source}: the link {link['target']} leads to no file of the repository")
        name = pages.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if name is None or name.endswith(".py"):
            plain = link["text"].strip("`")
            return f"`{target}`" if plain in link["target"] else f"{link['text']} (`{target}`)"
        place = posixpath.relpath(name, posixpath.dirname(page) or ".")
        return f"{link['image']}[{link['text']}]({place}{link['anchor'] or ''})"

    parts = FENCED.split(markdown)
    return "".join(part if number % 2 else LINK.sub(rewritten, part) for number, part in enumerate(parts))


def _calls(places: str, name: str) -> int:
    """Count the calls of a class or a function in files that a pattern names."""
    nodes = (node for path in ROOT.glob(places) for node in ast.walk(_parsed(path)))
    calls = (node for node in nodes if isinstance(node, ast.Call))
    return sum(isinstance(node.func, ast.Name) and node.func.id == name for node in calls)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _tests() -> int:
    nodes = (node for path in (ROOT / "tests").rglob("test_*.py") for node in ast.walk(_parsed(path)))
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in nodes)


def _raises() -> int:
    nodes = (node for path in (ROOT / "dpllm").rglob("*.py") for node in ast.walk(_parsed(path)))
    return sum(isinstance(node, ast.Raise) and node.exc is not None for node in nodes)


def _attacks() -> int:
    text = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")
    return sum(line.startswith("|") and "`tests/" in line for line in text.splitlines())


COUNTS: dict[str, Callable[[], int]] = {
    "attacks": _attacks,
    "mutations": lambda: _calls("tests/**/test_*.py", "kills"),
    "planted_bugs": lambda: _calls("tests/audit/test_planted_bugs.py", "Bug"),
    "raises": _raises,
    "tests": _tests,
}
"""Figures of the page about tests, counted in the source."""
