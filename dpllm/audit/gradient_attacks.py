"""From the observed releases to a verdict: the scores of an attacker, and the bounds on ε that follow.

Place in the flow: above `dpllm.audit.gradient`. Each attack gives every canary a score without using its coin; the
higher the score, the likelier the canary was present:

* *total*: its projection, added up over the steps of the block. This is the best attack on a Gaussian sum.
* *others*: minus the projection on the base units' gradient. It shows that a unit changes the contribution of others (a
  loss averaged over the batch), or that an extra term enters when few units are present.
* *repeated noise*: the distance between its projections in the two most similar releases of the block. If both carry
  the same noise, the difference shows without noise that the canary took part in one of them.
* *known order*: its projection in the one step that it would be in if units came in the order of their numbers, or in
  the order of a stock sampler with its default seed (`torch.utils.data.DistributedSampler`: seed 0). It is used when a
  block is one pass over the units.

The noise itself is also tested, on directions to which no unit contributes. There, a standard deviation that is a tenth
too small shows at once, while a lower bound on ε shows it only when half of the noise is missing.

The verdict holds with the requested confidence for any number of attacks: the error is divided over them. A lower bound
above the claimed ε refutes the claim. A bound below it proves nothing: for example, a few canaries cannot distinguish
an unknown order from Poisson sampling.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from dpllm.audit.bounds import CONFIDENCE, AuditError, one_run_bounds, trial_bounds
from dpllm.audit.gradient import Design, Observations
from dpllm.audit.power import NoiseTest, power
from dpllm.audit.result import RATES, AttackResult, AuditedCanaries, AuditResult, allowed_rates, tpr_confidence
from dpllm.audit.roc import auroc, shown_rates, tpr_at
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.plan import PrivacyPlan


def judge_releases(
    seen: Observations, plan: PrivacyPlan, design: Design, setup: str, confidence: float = CONFIDENCE
) -> AuditResult:
    """Run all attacks on the observations.

    The claim is ε of the steps of one block, by the plan's accountant, under zero-out.

    Guarantee: if every block follows the plan, the verdict is FAIL with a probability of at most 1 - ``confidence``.

    Args:
        seen: the observations of `dpllm.audit.gradient.observe`.
        plan: the plan of the run.
        design: the design of the audit.
        setup: a description of the audited stack, for people.
        confidence: confidence of the verdict.

    Raises:
        AuditError: there are too few blocks to show anything.
    """
    history = [(plan.event, design.steps_per_block)]
    tried = scores_of(seen, plan, design)
    coins = seen.included_RM.ravel()
    several = design.num_canaries > 1
    bounded = len(tried) * (2 if several else 1)
    tests = bounded + (seen.noise_RTD is not None)  # the test of the noise also gets a share of the error
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
        canaries=AuditedCanaries(kind="units whose gradient is known", num=len(coins), num_included=int(coins.sum())),
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
    """Return (R, M) scores of every attack that applies to this number of steps.

    Raises:
        AuditError: the observations are not those of the design.
    """
    expected = (design.num_blocks, design.steps_per_block, design.num_canaries)
    if seen.canary_RTM.shape != expected:
        raise AuditError(f"The observations have shape {seen.canary_RTM.shape}, but the design needs {expected}")
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
    """Return the public orders in which units may come: order[i] is the unit at position i.

    >>> known_orders(4)["by number"].tolist()
    [0, 1, 2, 3]
    """
    stock = torch.randperm(num_units, generator=torch.Generator().manual_seed(0)).numpy()
    return {"by number": np.arange(num_units), "DistributedSampler's": stock}
