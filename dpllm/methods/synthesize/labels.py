"""Labels of a synthetic data set: their public classes, their shares, and the number of texts for each.

Place in the flow: before the generation. A model that was tuned on prompts with a label writes texts for a label that
it is given. The shares of the labels are a second use of the private records: exact shares are not covered by ε. They
are either public, given by the user, or noisy counts over public classes, which the query run charges
(`dpllm.methods.queries`). Everything here is post-processing of one or the other.

Classes are never collected from the records: a class that only one person has would reveal that person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.config.values import ConfigError

PLACE = "{label}"
"""Where the label is put into a prompt."""

LabelShares = Mapping[str, float]
"""Class -> share of the texts; the shares add up to 1."""


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the public classes.

    Raises:
        ConfigError: there are fewer than two, one is empty, or one is named twice.
    """
    names = tuple(classes)
    if len(names) < 2:
        raise ConfigError(f"labels need at least two classes, got {len(names)}: name all public classes")
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError("a label is empty or no text: name every class")
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ConfigError(f"the label {twice!r} is named twice: name each class once")
    return names


def public_shares(weights: Mapping[str, Any]) -> dict[str, float]:
    """Return shares that the user gave as public.

    Args:
        weights: class -> a number of at least 0, such as a share or a public count.

    Raises:
        ConfigError: a number is negative, not finite or no number, or all are 0.

    >>> public_shares({"pub": 3, "restaurant": 1})
    {'pub': 0.75, 'restaurant': 0.25}
    """
    names = check_classes(list(weights))
    values = []
    for name in names:
        value = weights[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"the share of the label {name!r} is {value!r}: give a number of at least 0")
        values.append(float(value))
    return shares_of(names, np.array(values))


def shares_of(classes: Sequence[str], counts: NDArray[np.float64]) -> dict[str, float]:
    """Return shares from counts, noisy or public: a negative count becomes 0.

    Args:
        classes: their names.
        counts: (len(classes),) one for each.

    Raises:
        ConfigError: no count is above 0.

    >>> shares_of(["a", "b"], np.array([-2.5, 40.0]))
    {'a': 0.0, 'b': 1.0}
    """
    above = np.clip(np.asarray(counts, dtype=np.float64), 0.0, None)
    total = float(above.sum())
    if not total > 0:
        raise ConfigError(
            "no label has a count above 0, so there are no shares: the noise is larger than the data. Give public "
            "shares, or all labels the same share"
        )
    return {name: float(value) / total for name, value in zip(classes, above, strict=True)}


def texts_of_each(shares: LabelShares, total: int) -> dict[str, int]:
    """Return the number of texts of each label: the shares of ``total``, rounded so that they add up to it.

    >>> texts_of_each({"a": 0.5, "b": 0.3, "c": 0.2}, 5)
    {'a': 3, 'b': 1, 'c': 1}
    """
    exact = {name: share * total for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    order = sorted(exact, key=lambda name: counts[name] - exact[name])  # the largest remainders first
    for name in order[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def prompt_of(template: str, label: str) -> str:
    """Return the prompt of a label.

    Raises:
        ConfigError: the template has no place for it.

    >>> prompt_of("food: {label}", "Thai")
    'food: Thai'
    """
    if PLACE not in template:
        raise ConfigError(
            f"the prompt {template!r} has no {PLACE}, where each label is put: write it as the model saw it in "
            f"training, such as 'food: {PLACE}'"
        )
    return template.replace(PLACE, label)
