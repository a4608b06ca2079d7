"""Versions of installed packages, for reports and for the comparison of processes."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def installed_version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed.

    A process reads each version once: a report names ten of them, and reading one takes milliseconds.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
