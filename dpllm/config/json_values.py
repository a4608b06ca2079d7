"""Conversion of values for JSON, which has no infinite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def json_value(value: Any) -> Any:
    """Return a value with every infinite number replaced by "inf", in mappings and sequences too.

    >>> json_value({"epsilon": math.inf, "curve": (1, 2.5)})
    {'epsilon': 'inf', 'curve': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
