"""The base of the parts of a recipe's section.

Place in the flow: below `dpllm.config.privacy_section` and `dpllm.config.data_section`. A section with many keys
inherits them from a few parts. Each part has the keys of one topic and their checks, and a function that reads only
these keys names the part as its type. Recipes and Python see one section with all keys.

The keys of a section are in the order of its bases from the last to the first, and then its own: this is the order in
which dataclasses collect fields, and in which the parts check them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Topic:
    """Some keys of a section that belong together."""

    def __post_init__(self) -> None:
        """Check the values. A part first calls the check of its bases, and then checks its own keys."""

    def _set(self, name: str, value: Any) -> None:
        """Replace a value by its converted form, such as a whole number by a float."""
        object.__setattr__(self, name, value)
