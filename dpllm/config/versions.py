"""The version of dpllm, by its commit, and the versions of other packages.

The code that computes plans, ledgers and reports changes, so each ledger and report names the commit that wrote it.
`setup.py` runs this file before anything is installed, so it imports only the standard library.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

_NEXT_RELEASE = "0.2"
_UNKNOWN = f"{_NEXT_RELEASE}.dev0+unknown"
COMMIT_FILE = "commit.json"
"""In a built package: version, commit and changes of the checkout from which it was built."""
_PACKAGE = Path(__file__).resolve().parents[1]
_SHORT = 9  # hexadecimal digits of a commit in a version


class CodeVersion(NamedTuple):
    """The version of dpllm that is running."""

    version: str
    """By PEP 440: of the tag on the commit ("0.2" of v0.2), or such as "0.2.dev875+g6d2265a1c.dirty", or
    "0.2.dev0+unknown" where no commit is known."""
    commit: str | None
    """The commit in full; None: unknown."""
    changed: bool
    """Whether files of the package differ from that commit."""


def code_version() -> CodeVersion:
    """Return the version of the running package: of its git checkout, or of the checkout from which it was built.

    A process reads it once. In a checkout that git cannot read, because there is no git or
    it refuses (``safe.directory``), the version is unknown: the metadata of an installation may be older than the code.
    """
    return version_of(_PACKAGE)


@functools.cache
def version_of(package: Path) -> CodeVersion:
    """Return the version of a package folder, as `code_version`.

    Args:
        package: the folder ``dpllm``.
    """
    found = _of_checkout(package) if (package.parent / ".git").exists() else None
    if found is not None:
        return found
    try:
        built = json.loads((package / COMMIT_FILE).read_text(encoding="utf-8"))
        return CodeVersion(str(built["version"]), built["commit"], bool(built["changed"]))
    except (OSError, ValueError, KeyError, TypeError):
        return CodeVersion(_UNKNOWN, None, False)


def _of_checkout(package: Path) -> CodeVersion | None:
    """Return the version by git; None if git cannot tell, or if the checkout is that of another project."""
    root, inside = package.parent, f"{package.name}/__init__.py"
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = _git(root, "rev-parse", "--show-toplevel", "--is-shallow-repository", "HEAD")
    if project != "dpllm" or found is None or _git(root, "ls-files", "--error-unmatch", inside) is None:
        return None
    top, shallow, commit = found.splitlines()
    count = (
        "0" if shallow == "true" else _git(root, "rev-list", "--count", "HEAD")
    )  # a shallow clone has no such number
    status = _git(root, "status", "--porcelain", "--untracked-files=no", "--", package.name)
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", f"{package.name}/*.py")
    if Path(top).resolve() != root or count is None or status is None or new is None:
        return None
    changed = bool(status or new)
    release = _git(root, "describe", "--exact-match", "--tags", "--match", "v[0-9]*", "HEAD")
    if release is not None and not changed:
        return CodeVersion(release.removeprefix("v"), commit, False)
    local = f"g{commit[:_SHORT]}{'.dirty' if changed else ''}"
    return CodeVersion(f"{_NEXT_RELEASE}.dev{count}+{local}", commit, changed)


def _git(root: Path, *words: str) -> str | None:
    """Return what a git command prints; None if it fails or there is no git."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # of a hook, for instance
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, cwd=root, env=own, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version_words(version: str, commit: str | None, changed: bool) -> str:
    """Return a version with its commit, for people.

    >>> version_words("0.2.dev3+gabc.dirty", "abc", True)
    '0.2.dev3+gabc.dirty (commit abc, with changes that are in no commit)'
    """
    words = "of an unknown commit" if commit is None else f"commit {commit}"
    return f"{version} ({words}{', with changes that are in no commit' if changed else ''})"


def has_format(found: Any, due: int) -> bool:
    """Return whether a file's value of "format" is the number that this version reads."""
    return type(found) is int and found == due


def other_format(kind: str, found: Any, due: int, written_by: str | None = None) -> str:
    """Return the error of a file with a different format, and the version that reads it.

    Args:
        kind: of the file, in words.
        found: the format that it names.
        due: the format that this version reads.
        written_by: the version that wrote it, in words, if the file names it.
    """
    which = f"dpllm {written_by}" if written_by else "the version of dpllm that wrote it"
    return f"is a {kind} of format {json.dumps(found)}, and this version of dpllm reads format {due}: use {which}"


@functools.cache
def installed_version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed.

    A process reads each version once: a report names ten of them, and reading one takes milliseconds.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
