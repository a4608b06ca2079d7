"""From the observed releases to a verdict: what an attacker makes of them, and the bounds on ε that follow.

Place in the flow: above `dpllm.audit.gradient`. Each attack gives every canary a score, the higher, the likelier it was
there, without looking at its coin:

* *total*: its projection, added up over the steps of the block. The best there is against a Gaussian sum.
* *others*: less of the base units' gradient. Shows that a unit changes what others contribute (a loss averaged over the
  batch), or that something enters when few units are there.
* *repeated noise*: how far its projections in the two most similar releases of the block are apart. Where both carry
  the same noise, the difference shows without noise that it took part in one of them.
* *known order*: its projection in the one step where it would be if units came in the order of their numbers, or in
  that of a stock sampler with its default seed (`torch.utils.data.DistributedSampler`: seed 0). Where a block is one
  pass over the units.

Beside them the noise itself is tested, on directions in which no unit has a part: a standard deviation that is a tenth
too small shows there at once, while a lower bound on ε needs half of it to be missing.

The verdict holds with the confidence asked for whatever the number of attacks: the error is divided over them. A lower
bound above the claimed ε refutes the claim. One below it proves nothing: an order nobody knows, for instance, can't be
told from Poisson sampling by a handful of canaries.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from dpllm.audit.bounds import CONFIDENCE, AuditError, one_run_bounds, trial_bounds
from dpllm.audit.gradient import Design, Observations
from dpllm.audit.power import NoiseTest, power
from dpllm.audit.result import INCLUSION, RATES, AttackResult, AuditResult, allowed_rates, tpr_confidence
from dpllm.audit.roc import auroc, shown_rates, tpr_at
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.plan import PrivacyPlan


def judge_releases(
    seen: Observations, plan: PrivacyPlan, design: Design, setup: str, confidence: float = CONFIDENCE
) -> AuditResult:
    """Attack what was observed.

    The claim is ε of the steps of one block, by the plan's accountant, under zero-out.

    Guarantee: where what the plan says is true of every block, the verdict is FAIL with a probability of at most
    1 - ``confidence``.

    Args:
        seen: of `dpllm.audit.gradient.observe`.
        plan: of the run.
        design: of the audit.
        setup: what ran, for people.
        confidence: of the verdict.

    Raises:
        AuditError: too few blocks for anything to be shown.
    """
    history = [(plan.event, design.steps_per_block)]
    tried = scores_of(seen, plan, design)
    coins = seen.included_RM.ravel()
    several = design.num_canaries > 1
    bounded = len(tried) * (2 if several else 1)
    tests = bounded + (seen.noise_RTD is not None)  # the error is divided over the test of the noise, too
    others = int((~coins).sum())
    rates = shown_rates(RATES, others)
    level = tpr_confidence(confidence, len(tried), len(rates))
    blocks_R = np.arange(design.num_blocks)
    one_each = blocks_R, blocks_R % design.num_canaries
    attacks = []
    for name, score_RM in tried.items():
        scores = score_RM.ravel()
        bounds = trial_bounds(score_RM[one_each], seen.included_RM[one_each], plan.delta, confidence, history, tests)
        if several:
            bounds = bounds + one_run_bounds(scores, coins, plan.delta, confidence, history, tests)
        tpr = {rate: tpr_at(scores, coins, rate, level) for rate in rates}
        attacks.append(AttackResult(name=name, auroc=auroc(scores, coins), tpr=tpr, bounds=tuple(bounds)))
    return AuditResult(
        claimed_epsilon=epsilon(history, plan.delta),
        delta=plan.delta,
        unit=plan.unit,
        adjacency="zero-out",
        canary_kind="units whose gradient is known",
        num_canaries=len(coins),
        num_included=int(coins.sum()),
        inclusion=INCLUSION,
        repetitions=1,
        confidence=confidence,
        attacks=tuple(attacks),
        tpr_bounds=allowed_rates(history, rates, others, level),
        power=power(
            history,
            plan.delta,
            in_one_run=len(coins) if several else 0,
            in_trials=design.num_blocks,
            confidence=confidence,
            tests=tests,
        ),
        noise=None
        if seen.noise_RTD is None
        else NoiseTest.of(seen.noise_RTD, plan.noise_stddev, (1 - confidence) / tests),
        details={
            "audited": setup,
            "blocks": f"{design.num_blocks:,} of {design.steps_per_block} step(s), {design.num_canaries} canaries each",
            "each step": f"q = {plan.sampling_rate:g}, σ = {plan.noise_multiplier:g}, C = {plan.clip_norm:g}",
        },
    )


def scores_of(seen: Observations, plan: PrivacyPlan, design: Design) -> dict[str, NDArray[np.float64]]:
    """Return (R, M) scores of every attack that makes sense for so many steps.

    Raises:
        AuditError: the observations are not those of the design.
    """
    expected = (design.num_blocks, design.steps_per_block, design.num_canaries)
    if seen.canary_RTM.shape != expected:
        raise AuditError(f"The observations have shape {seen.canary_RTM.shape}, the design says {expected}")
    canary_RTM = seen.canary_RTM
    found = {
        "total": canary_RTM.sum(1),
        "others": np.repeat(-seen.base_RT.sum(1)[:, None], design.num_canaries, axis=1),
    }
    if design.steps_per_block > 1:
        blocks_R = np.arange(design.num_blocks)
        first_RM, second_RM = (canary_RTM[blocks_R, seen.alike_R2[:, which]] for which in (0, 1))
        found["repeated noise"] = np.abs(first_RM - second_RM)
        if design.steps_per_block == math.ceil(plan.population / plan.expected_batch_size):
            for name, order_N in known_orders(plan.population).items():
                place_N = np.argsort(order_N) // plan.expected_batch_size
                found[f"known order ({name})"] = np.stack(
                    [canary_RTM[:, place_N[unit], number] for number, unit in enumerate(design.canaries)], axis=1
                )
    return found


def known_orders(num_units: int) -> dict[str, NDArray[np.int64]]:
    """Return the orders in which units may come for all to know: order[i] is the unit at place i.

    >>> known_orders(4)["by number"].tolist()
    [0, 1, 2, 3]
    """
    stock = torch.randperm(num_units, generator=torch.Generator().manual_seed(0)).numpy()
    return {"by number": np.arange(num_units), "DistributedSampler's": stock}
