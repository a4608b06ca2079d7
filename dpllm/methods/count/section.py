"""The section ``count`` of a recipe: noisy counts of public classes.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.count.counting` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config import values
from dpllm.config.topics import Topic


@dataclass(frozen=True, kw_only=True)
class CountConfig(Topic):
    """How the records of each class are counted. The classes are ``data.class_names``, in ``data.columns.label``."""

    file: str = "counts.json"
    """Name of the released file, in the run's folder."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        values.own_file("file", self.file, ".json")
