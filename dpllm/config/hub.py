"""Values that the Hub accepts in a card's metadata, and the files that it stores elsewhere.

The Hub validates licenses and languages when a card is uploaded. Languages are therefore checked before the training,
and an unknown license is written in the form that the Hub expects.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import re
from pathlib import Path

_IDENTIFIERS = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0
cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl
gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr
mpl-2.0 odc-by odbl openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr
deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
grok2-community gemma unknown other
"""
LICENSES = frozenset(_IDENTIFIERS.split())
"""Identifiers of licenses (the Hub's documentation, "Licenses")."""

_TABLE = "utils/resources/languages.json"
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code")


def license_metadata(license: str | None) -> dict[str, str]:
    """Return the metadata of a card for a license.

    >>> license_metadata("mit"), license_metadata("The Clinic's License 1.0"), license_metadata(None)
    ({'license': 'mit'}, {'license': 'other', 'license_name': 'the-clinic-s-license-1.0'}, {})
    """
    if license is None:
        return {}
    if license.lower() in LICENSES:
        return {"license": license.lower()}
    return {"license": "other", "license_name": re.sub(r"[^a-z0-9.]+", "-", license.lower()).strip("-")}


def is_language(code: str) -> bool:
    """Return whether a text is a code of a language, by its form and the table of `datasets`.

    >>> is_language("en"), is_language("pt-BR"), is_language("English"), is_language("xxq")
    (True, True, False, False)
    """
    if _LANGUAGE.fullmatch(code) is None:
        return False
    known = _languages()
    return not known or code == "multilingual" or code.partition("-")[0] in known


@functools.cache
def _languages() -> frozenset[str]:
    """Return the codes of BCP 47, with two letters where a language has such a code; none if the table is missing."""
    package = importlib.util.find_spec("datasets")
    for folder in package.submodule_search_locations or () if package is not None else ():
        with contextlib.suppress(OSError, ValueError):
            return frozenset(json.loads((Path(folder) / _TABLE).read_text(encoding="utf-8")))
    return frozenset()


def refuse_lfs_pointer(file: Path, error: type[ValueError]) -> None:
    """Raise `error` when a file is the small text that git leaves in place of a large file, without git-lfs."""
    with open(file, "rb") as source:
        if source.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise error(
                f"{file}: it is a git-lfs pointer and not the file itself: run `git lfs install` and `git lfs pull` in "
                "its folder, or download the file"
            )


_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
