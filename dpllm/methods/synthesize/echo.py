"""The echo of canaries in synthetic text: whether texts repeat more of the canaries that were trained on.

Place in the flow: part of the evaluation, for a run on data that `dpllm audit prepare` made. About half of the canaries
were included by coin flips. Synthetic text from a private model repeats as much of the others. The figure is no bound
on ε: `dpllm audit texts` has bounds from the texts, and `dpllm audit run` from the model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpllm.config.values import ConfigError
from dpllm.methods.synthesize.filters import words_of
from dpllm.methods.synthesize.overlap import Runs


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Longest runs of words that canaries share with synthetic texts."""

    included: int
    """Canaries that were trained on."""
    left_out: int
    """Canaries that were not."""
    run_included: float
    """Median over the included ones of the longest run, in words."""
    run_left_out: float
    """The same of the others."""
    auroc: float
    """Probability that an included canary has a longer run than one that was left out, ties counted half; 0.5 without
    memory."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return (
            f"Canaries: the longest run of words in the texts has a median of {self.run_included:g} words for the "
            f"{self.included:,} that were trained on, and of {self.run_left_out:g} for the {self.left_out:,} that were "
            f"not; AUROC {self.auroc:.3f} (0.5: no memory)."
        )


def echo(texts: Sequence[str], canaries: Sequence[str], included: Sequence[bool]) -> Echo:
    """Compare canaries that were trained on with those that were not, by their longest run in texts.

    Args:
        texts: synthetic.
        canaries: their texts.
        included: (len(canaries),) their coins.

    Raises:
        ConfigError: all were included, or none.

    >>> echo(["a red fox ran home"], ["my red fox ran", "one old dog sat"], [True, False]).auroc
    1.0
    """
    coins = np.asarray(included, dtype=bool)
    if coins.all() or not coins.any():
        raise ConfigError("the canaries are all included or all left out, so there is nothing to compare them with")
    longest = longest_runs(texts, canaries)
    ranks = stats.rankdata(longest)
    inside = int(coins.sum())
    above = float(ranks[coins].sum()) - inside * (inside + 1) / 2
    return Echo(
        included=inside,
        left_out=len(coins) - inside,
        run_included=float(median(longest[coins].tolist())),
        run_left_out=float(median(longest[~coins].tolist())),
        auroc=above / (inside * (len(coins) - inside)),
    )


def longest_runs(texts: Sequence[str], canaries: Sequence[str]) -> NDArray[np.float64]:
    """Return (len(canaries),) the number of words in each canary's longest run that a text has too.

    >>> longest_runs(["a red fox ran home"], ["my red fox ran", "one old dog sat"]).tolist()
    [3.0, 0.0]
    """
    runs = Runs([words_of(canary) for canary in canaries])
    for text in texts:
        runs.mark(words_of(text))
    return np.asarray(runs.longest(), dtype=np.float64)
