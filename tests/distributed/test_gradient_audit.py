"""The gradient audit on every engine: nothing is refuted, and it would have been."""

import math

import numpy as np
import pytest
from scipy import stats

from dpllm.audit.result import CONSISTENT
from tests.distributed.auditing import DESIGN, NOISE_MULTIPLIER
from tests.distributed.setups import ENGINES
from tests.distributed.world import run
from tests.tiers import deep_case

QUICK = ("fsdp2",)
ALL = [engine if engine in QUICK else deep_case(engine) for engine in ENGINES]  # tests.audit has one process


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The observations of both processes on an engine; one start for several engines."""
    known: dict[bool, list] = {}

    def of(engine):
        quick = engine in QUICK
        if quick not in known:
            engines = [other for other in ENGINES if (other in QUICK) == quick]
            folder = tmp_path_factory.mktemp("audit")
            known[quick] = run(folder, "tests.distributed.auditing:every_engine", fresh=not quick, engines=engines)
        return [result[engine] for result in known[quick]]

    return of


@pytest.mark.parametrize("engine", ALL)
def test_an_audit_sees_sound_releases_on_every_engine_and_could_refute_others(engine, ranks):
    """The processes toss the same coins and see the same releases; separate ones would include a canary on one of them.

    Projections are C where a canary is included and 0 where it is not, each with a standard deviation of σC, in units
    of C. The area under the curve is that of a Gaussian sum, Φ(μ/√2), and the bound goes a good part of the way to ε.
    """
    (coins, seen, result), (others_coins, others_seen, _) = ranks(engine)
    assert coins.shape == (DESIGN.num_blocks, DESIGN.num_canaries) and 0.4 < coins.mean() < 0.6
    assert np.array_equal(coins, others_coins) and np.allclose(seen, others_seen, rtol=1e-5)
    projected = seen[:, 0] / 0.5
    for kind, mean in ((coins, 1.0), (~coins, 0.0)):
        error = NOISE_MULTIPLIER / kind.sum() ** 0.5
        assert abs(projected[kind].mean() - mean) < 6 * error
        assert abs(projected[kind].std() / NOISE_MULTIPLIER - 1) < 6 / (2 * kind.sum()) ** 0.5
    total = next(attack for attack in result.attacks if attack.name == "total")
    assert result.verdict == CONSISTENT
    expected = stats.norm.cdf(1 / NOISE_MULTIPLIER / math.sqrt(2))
    assert abs(total.auroc.value - expected) < 1.3 * (total.auroc.high - total.auroc.low)  # 7 standard errors
    # In simulated audits of this design the bound is 0.32 of ε, with a standard deviation of 0.02.
    assert 0.15 * result.claimed_epsilon < result.epsilon_lower <= result.claimed_epsilon
