"""The probe of Private Evolution for the audit: a unit all of whose records are nearest to one candidate.

Place in the flow: beside the run. The rows of a unit, the votes, the charge and the noise are those of the command; the
embeddings are made up, and no model is asked.
"""

from __future__ import annotations

import numpy as np

from dpllm.methods.evolve.evolution import CHARGE, Floats, exact_votes, noisy_votes
from dpllm.methods.queries.probe import Probe, made_units
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.query_plan import QueryPlan

_OTHERS = 8
_CANDIDATES = 4


def vote_probe(plan: QueryPlan) -> Probe:
    """Return the probe of an evolution's plan; the score is the sum of one candidate's noisy votes.

    Args:
        plan: of an evolution.
    """
    charge = plan.charge(CHARGE)
    candidates = np.arange(_CANDIDATES, dtype=np.float64)[:, None]
    exact = {there: _votes(plan, candidates, there) for there in (False, True)}

    def answer(run: QueryRun, there: bool) -> float:
        noisy = (noisy_votes(run, charge.event.noise_multiplier, exact[there]) for _ in range(charge.count))
        return float(sum(votes[0] for votes in noisy))

    return Probe("a unit with all its records nearest to one candidate", answer)


def _votes(plan: QueryPlan, candidates: Floats, canary: bool) -> Floats:
    """Return the exact votes; the others' are spread over the candidates by their numbers."""
    index = made_units(plan, _OTHERS, canary)
    _, units = index.rows_of(np.arange(index.num_units))
    own = len(units) - _OTHERS
    places = np.concatenate([np.zeros(own), np.arange(_OTHERS) % len(candidates)])
    return exact_votes(candidates[places.astype(np.int64)], units, candidates)
