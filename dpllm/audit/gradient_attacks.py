"""Turn observed releases into a verdict: the scores of an attacker, and the bounds on ε that follow.

Each attack gives every canary a score without using its coin; the higher the score, the likelier the canary was
present:

* *total*: its projection, summed over the block's steps. This is the best attack on a Gaussian sum.
* *others*: minus the projection on the base units' gradient. It shows that a unit changes the contribution of others (a
  loss averaged over the batch), or that an extra term enters when few units are present.
* *repeated noise*: the distance between its projections in the two most similar releases of the block. If both carry
  the same noise, the difference shows without noise that the canary took part in one of them.
* *known order*: its projection in the one step that it would be in if units were ordered by number, or by a stock
  sampler with its default seed (`torch.utils.data.DistributedSampler`: seed 0). It is used when a block is one pass
  over the units.

Noise that is correlated over steps is decorrelated first: with the plan's strategy M, M times the releases of a start
has independent noise. An attack then weights the steps by the columns of M, in which a unit shows. Further attacks are:

* *one group*: the largest such sum over the steps of one group of units (in a fixed order: of those a pass apart);
* *others earlier*, *others later*: in which group the base units are. It shows that a unit changes the group of others;
* *threshold up*, *threshold down*: how far a clip threshold changed;
* *average*: the projection of the released average. It shows weights without noise among those that were averaged;
* *average, earlier noise known*: the same, without the part of all steps before each iterate, which the releases show.
  It shows iterates that lack only the noise of their own step.

The noise itself is also tested, on directions to which no unit contributes. There, a standard deviation that is a tenth
too small shows at once, while a lower bound on ε shows it only when half of the noise is missing. Blocks of several
steps also show noise that is too small in one direction over the steps, such as noise that is used twice.

The verdict holds with the requested confidence for any number of attacks: the error is divided over them. A lower bound
above the claimed ε refutes the claim. A bound below it proves nothing: for example, a few canaries cannot distinguish
an unknown order from Poisson sampling.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import linalg

from dpllm.audit.bounds import CONFIDENCE, AuditError, one_run_bounds, trial_bounds
from dpllm.audit.gradient import Design, Observations
from dpllm.audit.power import NoiseTest, power
from dpllm.audit.result import RATES, AttackResult, AuditedCanaries, AuditResult, allowed_rates, tpr_confidence
from dpllm.audit.roc import auroc, shown_rates, tpr_at
from dpllm.mechanism.averages import weights_of
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
        setup: a readable description of the audited stack.
        confidence: confidence of the verdict.

    Raises:
        AuditError: there are too few blocks to show anything.
    """
    history = [(plan.event, num_steps) for num_steps in design.starts]
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
        else NoiseTest.of(white(seen.noise_RTD, plan, design), plan.noise_stddev, (1 - confidence) / tests),
        details={
            "audited": setup,
            "blocks": f"{design.num_blocks:,} of {design.steps_per_block} step(s), {design.num_canaries} canaries each",
            "each step": f"{_drawn(plan)}, σ = {plan.noise_multiplier:g}, C = {plan.clip_norm:g}",
            **({} if design.average is None else {"released": design.average.words(design.steps_per_block)}),
        },
    )


def _drawn(plan: PrivacyPlan) -> str:
    if not plan.mechanism.noise.is_sampled:
        return f"b/N = {plan.sampling_rate:g} (units in a fixed order, not sampled)"
    return f"q = {plan.sampling_rate:g}"


def scores_of(seen: Observations, plan: PrivacyPlan, design: Design) -> dict[str, NDArray[np.float64]]:
    """Return (R, M) scores of every attack that applies to this number of steps.

    Raises:
        AuditError: the observations do not match the design.
    """
    expected = (design.num_blocks, design.steps_per_block, design.num_canaries)
    if seen.canary_RTM.shape != expected:
        raise AuditError(f"The observations have shape {seen.canary_RTM.shape}, but the design needs {expected}")
    canary_RTM = seen.canary_RTM
    strategy_TT = strategy(plan, design)
    gram_TT = strategy_TT.T @ strategy_TT
    shown_RTM, base_RT = (np.einsum("tv,rv...->rt...", gram_TT, x) for x in (canary_RTM, seen.base_RT))
    found = {"total": shown_RTM.sum(1), "others": _of_all(-base_RT.sum(1), design)}
    groups = plan.mechanism.noise.separation(plan.mechanism.draw)
    if groups > 1:
        group_RGM, base_RG = (_by_group(x, groups, design) for x in (shown_RTM, base_RT))
        found["one group"] = group_RGM.max(1)
        later_R = base_RG[:, 1:].mean(1) - base_RG[:, 0]
        found |= {"others later": _of_all(later_R, design), "others earlier": _of_all(-later_R, design)}
    if seen.moved_RT is not None:
        up_R = (seen.moved_RT @ gram_TT).sum(1)
        found |= {"threshold up": _of_all(up_R, design), "threshold down": _of_all(-up_R, design)}
    found |= _of_average(seen, design)
    if design.steps_per_block > 1:
        blocks_R = np.arange(design.num_blocks)
        first_RM, second_RM = (canary_RTM[blocks_R, seen.alike_R2[:, which]] for which in (0, 1))
        found["repeated noise"] = np.abs(first_RM - second_RM)
        if groups == 1 and design.steps_per_block == math.ceil(plan.population / plan.expected_batch_size):
            for name, order_N in known_orders(plan.population).items():
                place_N = np.argsort(order_N) // plan.expected_batch_size
                found[f"known order ({name})"] = np.stack(
                    [canary_RTM[:, place_N[unit], number] for number, unit in enumerate(design.canaries)], axis=1
                )
    return found


def strategy(plan: PrivacyPlan, design: Design) -> NDArray[np.float64]:
    """Return M of a block's steps, (T, T): a separate one for each start."""
    found_TT = np.zeros((design.steps_per_block, design.steps_per_block))
    first = 0
    for num_steps in design.starts:
        column = np.zeros(num_steps)
        given = plan.mechanism.noise.column(plan.num_steps)[:num_steps]
        column[: len(given)] = given
        one = slice(first, first + num_steps)
        found_TT[one, one] = linalg.toeplitz(column, np.zeros(num_steps))
        first += num_steps
    return found_TT


def white(noise_RTD: NDArray[np.float64], plan: PrivacyPlan, design: Design) -> NDArray[np.float64]:
    """Return M times the noise of each block: independent over steps, with standard deviation σC."""
    return np.einsum("ts,rsd->rtd", strategy(plan, design), noise_RTD)


def _of_all(score_R: NDArray[np.float64], design: Design) -> NDArray[np.float64]:
    """Return a block's score for each of its canaries."""
    return np.repeat(score_R[:, None], design.num_canaries, axis=1)


def _of_average(seen: Observations, design: Design) -> dict[str, NDArray[np.float64]]:
    """Return the scores of the released average, which is Σ_t a_t Σ_(s<=t) release_s if it averages the iterates."""
    if seen.average_RM is None or design.average is None:
        return {}
    own_T = weights_of(design.average, design.steps_per_block)
    earlier_T = np.cumsum(own_T[::-1])[::-1] - own_T
    earlier_RM = np.einsum("t,rtm->rm", earlier_T, seen.canary_RTM)
    found = {"average": seen.average_RM}
    return found | ({"average, earlier noise known": seen.average_RM - earlier_RM} if earlier_T.any() else {})


def _by_group(shown_RT: NDArray[np.float64], num_groups: int, design: Design) -> NDArray[np.float64]:
    """Return the sums over the steps of each group; the steps of each start cycle through the groups."""
    groups = [number % num_groups for num_steps in design.starts for number in range(num_steps)]
    return np.stack([shown_RT[:, np.array(groups) == group].sum(1) for group in range(num_groups)], axis=1)


def known_orders(num_units: int) -> dict[str, NDArray[np.int64]]:
    """Return the public orders in which units may come: order[i] is the unit at position i.

    >>> known_orders(4)["by number"].tolist()
    [0, 1, 2, 3]
    """
    stock = torch.randperm(num_units, generator=torch.Generator().manual_seed(0)).numpy()
    return {"by number": np.arange(num_units), "DistributedSampler's": stock}
