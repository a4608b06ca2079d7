"""Distances between two sets of texts, from their embeddings: MAUVE by its library, and the Fréchet distance.

Place in the flow: part of the evaluation. Both are figures of samples: compare them with the distance of two samples
of real text of the same size, which is not 0 (MAUVE: not 1).
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from dpllm.config.extras import require

Floats = NDArray[np.float64]
SEED = 20240229
"""Public constant: of the clusters of MAUVE, and of the samples that are compared."""


def frechet(first: Floats, second: Floats) -> float:
    """Return the Fréchet distance of two Gaussians with the means and covariances of two samples.

    ``|μ₁ − μ₂|² + tr(Σ₁ + Σ₂ − 2 (Σ₁Σ₂)^½)`` (Dowson and Landau 1982), as the Fréchet Inception distance has it
    (Heusel et al., arXiv:1706.08500), here on embeddings of texts. 0 for equal samples.

    Args:
        first: (n, D) embeddings, n at least 2.
        second: (m, D) embeddings, m at least 2.

    >>> round(frechet(np.array([[0.0], [2.0]]), np.array([[3.0], [5.0]])), 9)
    9.0
    """
    means = [sample.mean(axis=0) for sample in (first, second)]
    one, two = (np.atleast_2d(np.cov(sample, rowvar=False)) for sample in (first, second))
    # The trace of the root of a product of two covariances is the sum of the roots of its eigenvalues.
    values = np.clip(linalg.eigvals(one @ two).real, 0.0, None)
    gap = means[0] - means[1]
    return float(max(0.0, gap @ gap + np.trace(one) + np.trace(two) - 2 * np.sqrt(values).sum()))


def mauve(first: Floats, second: Floats) -> float:
    """Return MAUVE of two samples of embeddings, from 0 (apart) to 1 (alike).

    Computed by its authors' library with its own settings and a fixed seed (Pillutla et al., arXiv:2102.01454).

    Args:
        first: (n, D) embeddings of real texts.
        second: (m, D) embeddings of generated texts.

    Raises:
        ConfigError: the extra "synthetic" is not installed.
    """
    require("synthetic", "MAUVE")
    found = import_module("mauve").compute_mauve(
        p_features=first.astype(np.float32), q_features=second.astype(np.float32), seed=SEED, verbose=False
    )
    return float(found.mauve)


def some_of(count: int, most: int) -> list[int]:
    """Return at most this many of the numbers below ``count``, chosen by a public constant, in their order.

    >>> some_of(3, 3), len(some_of(9, 2))
    ([0, 1, 2], 2)
    """
    if count <= most:
        return list(range(count))
    return [int(number) for number in np.sort(np.random.default_rng(SEED).permutation(count)[:most])]
