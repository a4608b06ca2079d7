"""Independence of rows by value on two processes: one verdict, no deadlock."""

from __future__ import annotations

import pytest

from tests.distributed.world import run
from tests.tiers import deep_case


@pytest.mark.parametrize("engines", [["ddp", "fsdp2"], deep_case(["zero3"])], ids="-".join)
def test_every_rank_reaches_the_same_verdict_on_every_engine(engines, tmp_path):
    """Sound steps pass; a coupled loss is refused with one message on all ranks, also where one rank alone has it.

    So is a loss with one coin for all rows.
    """
    here, there = run(tmp_path, "tests.distributed.independence:verdicts", engines=engines)
    for engine in engines:
        charged, largest, coupled, on_one, coin = here[engine]
        assert charged == 3 and largest < 2e-6
        assert "of a row depends on other rows" in coupled and "of a row depends on other rows" in on_one
        assert there[engine][0] == 3 and there[engine][2:] == (coupled, on_one, coin)
        assert "draws random numbers that all rows of a microbatch share" in coin


def test_every_rank_goes_on_after_a_late_difference_on_one(tmp_path):
    """With the same steps and no deadlock; the open point is that of the report on rank 0."""
    here, there = run(tmp_path, "tests.distributed.independence:late", engine="ddp")
    assert here[:2] == there[:2] == (9, "")
    (point,) = [one for one in here[2] if "since the start or resume" in one]
    assert "before step 9" in point and "the loss of a row alone and in a batch" in point
