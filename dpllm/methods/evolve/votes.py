"""Votes of private records for their nearest candidates, and the noise that makes them private.

Place in the flow: the only part of Private Evolution that sees private records. Each record is an embedding; it votes
for the nearest candidate. A unit has one vote in all, whatever the number of its records, so the histogram of votes
changes by at most 1 in l2 norm when a unit is left out: its part of the histogram is not negative and adds up to 1.
Replacing a unit changes it by at most √2.

Source: Lin et al., arXiv:2305.15560 (algorithm 2), and Xie et al., arXiv:2403.01749 for text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpllm.config import ConfigError
from dpllm.mechanism.query import Query
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.query_plan import Charge

Floats = NDArray[np.float64]
Int64Array = NDArray[np.int64]
CHARGE = "votes"
SENSITIVITY = 1.0
"""The largest change of the votes by leaving out a unit, in l2 norm."""
_ROWS = 1024  # records whose distances are computed together
_FARTHEST = 4.0  # entries of a record, over the largest entry of a candidate


def votes_charge(noise_multiplier: float, steps: int) -> Charge:
    """Return the charge of all steps: each releases one histogram of votes with Gaussian noise.

    Args:
        noise_multiplier: σ, the standard deviation of the noise of each entry; the sensitivity is 1.
        steps: T.

    >>> votes_charge(8.0, 10).count
    10
    """
    event = Query(noise_multiplier=noise_multiplier / SENSITIVITY, replaced=math.sqrt(2))
    return Charge(name=CHARGE, event=event, count=steps)


def nearest(records: Floats, candidates: Floats) -> Int64Array:
    """Return (N,) for each record the number of the nearest candidate; of equal ones the first.

    Guarantee: the number of a record depends on this record and the candidates, and on no other record, to the last
    bit: distances are whole numbers. The grid has about 2^19 steps up to the largest entry of a candidate, and entries
    of records are cut off at four times that entry.

    A record whose embedding is not finite counts as a vector of zeros, so that its vote, too, goes to one candidate.

    Args:
        records: (N, D) embeddings.
        candidates: (M, D) embeddings, M at least 1.

    >>> nearest(np.array([[0.0], [9.0], [np.nan]]), np.array([[1.0], [8.0]])).tolist()
    [0, 1, 0]
    """
    if len(candidates) == 0:
        raise ConfigError("there is no candidate to vote for")
    # Sums of floats depend on the number of rows of a product: without one record, near-equal candidates would win or
    # lose the votes of others. Whole numbers below 2^53 have exact sums.
    largest = float(np.abs(candidates).max(initial=0.0)) or 1.0
    steps = 2.0 ** ((49 - math.ceil(math.log2(max(1, candidates.shape[1])))) // 2)

    def on_grid(vectors: Floats) -> Floats:
        with np.errstate(over="ignore"):
            return np.rint(np.clip(vectors / largest, -_FARTHEST, _FARTHEST) * steps)

    grid_MD = on_grid(candidates)
    sq_norm_M = (grid_MD**2).sum(1)
    found = np.zeros(len(records), dtype=np.int64)
    for start in range(0, len(records), _ROWS):
        block = records[start : start + _ROWS]
        block = np.where(np.isfinite(block).all(1, keepdims=True), block, 0.0)
        found[start : start + _ROWS] = (sq_norm_M - 2 * on_grid(block) @ grid_MD.T).argmin(1)
    return found


def exact_votes(
    records: Floats,
    units: Int64Array,
    candidates: Floats,
    labels: Sequence[str] | None = None,
    labels_of_candidates: Sequence[str] | None = None,
) -> Floats:
    """Return the exact, private histogram of votes, (M,). It must get its noise before anyone sees it.

    Guarantee: each unit's part is not negative and adds up to 1. A unit with several records shares its vote evenly.
    With labels, a record votes among the candidates of its own label, and its share is lost if there are none.

    Args:
        records: (N, D) embeddings of private records.
        units: (N,) the unit of each record.
        candidates: (M, D) embeddings of candidates.
        labels: of each record; None: records have no labels.
        labels_of_candidates: of each candidate.

    >>> exact_votes(np.array([[0.0], [9.0], [8.0]]), np.array([0, 1, 0]), np.array([[1.0], [8.0]])).tolist()
    [0.5, 1.5]
    """
    rows_of_unit = np.bincount(units, minlength=int(units.max()) + 1 if len(units) else 0)
    share_N = 1.0 / rows_of_unit[units] if len(units) else np.zeros(0)
    votes = np.zeros(len(candidates))
    if labels is None or labels_of_candidates is None:
        np.add.at(votes, nearest(records, candidates), share_N)
        return votes
    own, theirs = np.asarray(labels, dtype=object), np.asarray(labels_of_candidates, dtype=object)
    for label in dict.fromkeys(labels_of_candidates):
        rows, places = np.flatnonzero(own == label), np.flatnonzero(theirs == label)
        np.add.at(votes, places[nearest(records[rows], candidates[places])], share_N[rows])
    return votes


def noisy_votes(run: QueryRun, noise_multiplier: float, exact: Floats) -> Floats:
    """Charge one histogram, and return it with Gaussian noise, (M,).

    Guarantee: the charge is on the disk before the noise is drawn, and the noise is that of the charge.

    Args:
        run: whose plan has the charge of `votes_charge`.
        noise_multiplier: σ of the plan.
        exact: of `exact_votes`.
    """
    run.charge(CHARGE)
    stddev = noise_multiplier * SENSITIVITY
    return exact + run.randomness.gaussian(len(exact), stddev)
