"""Write a recipe as text for people: each key with its reason above it.

`dpllm init` writes it; `dpllm.config.load_recipe` reads it like any other recipe.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from dpllm.config.yaml12 import write_yaml
from dpllm.training.settings import Setting, flow

_WIDTH = 110


def recipe_text(settings: Sequence[Setting], header: Sequence[str], left_out: Mapping[str, Sequence[str]]) -> str:
    """Return the YAML of a recipe.

    Args:
        settings: in the order of the file; the settings of a section are written together. One with an empty reason
            has no comment. A model of which only the name is set has the short form.
        header: paragraphs above the recipe.
        left_out: lines by section, written as comments at its end, such as keys that people may add.
    """
    sections: dict[str, list[Setting]] = {}
    for setting in settings:
        section, dot, _ = setting.key.partition(".")
        sections.setdefault(section if dot else "", []).append(setting)
    for section in left_out:
        sections.setdefault(section, [])
    top = sections.pop("", [])
    lines = [line for number, text in enumerate(header) for line in (["#"] if number else []) + _comment(text)]
    for section, own in sections.items():
        if [setting.key for setting in own] == ["model.name"]:
            lines += ["", *_comment(own[0].reason), *_entry("model", own[0].value)]
            continue
        lines += ["", f"{section}:"]
        for setting in own:
            key = setting.key.partition(".")[2]
            lines += [f"  {line}" for line in (*_comment(setting.reason), *_entry(key, setting.value))]
        lines += [f"  # {line}" for line in left_out.get(section, ())]
    for setting in top:
        lines += ["", *_comment(setting.reason), *_entry(setting.key, setting.value)]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{key}: {flow(value)}"]
    return write_yaml({key: value}).rstrip("\n").split("\n")
