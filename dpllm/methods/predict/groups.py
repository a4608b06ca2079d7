"""The secret division of the units into disjoint groups.

Place in the flow: before the first token. Parallel composition needs that each unit is in one group at most: a text of
one group then costs the units of the others nothing. The division looks at no record, and comes from the operating
system.
"""

from __future__ import annotations

import random

import numpy as np

from dpllm.data.units import Int64Array


def secret_groups(num_units: int, size: int, count: int) -> list[Int64Array]:
    """Return ``count`` disjoint groups of ``size`` units each, drawn uniformly.

    Args:
        num_units: N, public.
        size: s.
        count: the number of groups.

    Raises:
        ValueError: there are too few units.

    >>> [sorted(group.tolist()) for group in secret_groups(3, 3, 1)]
    [[0, 1, 2]]
    """
    if size < 1 or count < 1 or size * count > num_units:
        raise ValueError(
            f"{count:,} groups of {size:,} units need {count * size:,} units, and there are {num_units:,}: take fewer "
            "groups, or a smaller size. A unit cannot be in two groups"
        )
    order = np.array(random.SystemRandom().sample(range(num_units), size * count), dtype=np.int64)
    return checked_groups([order[start : start + size] for start in range(0, len(order), size)])


def checked_groups(groups: list[Int64Array]) -> list[Int64Array]:
    """Return the groups.

    Raises:
        ValueError: a unit is in two of them, or twice in one.
    """
    units = np.concatenate(groups)
    if len(np.unique(units)) < len(units):
        raise ValueError(
            "a unit is in two groups, or twice in one: its texts would cost it more than the ε of one group. Groups "
            "must be disjoint"
        )
    return groups
