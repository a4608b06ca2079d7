"""The section ``count`` of a recipe: noisy counts of public classes.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.count.counting` carries it out.
"""

from __future__ import annotations

from typing import Annotated

from dpllm.config.sections import OwnFile, Text, section


@section
class CountConfig:
    """How the records of each class are counted. The classes are ``data.class_names``, in ``data.columns.label``."""

    file: Annotated[Text, OwnFile(".json")] = "counts.json"
    """Name of the released file, in the run's folder."""
