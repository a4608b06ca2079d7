"""The average of the weights on every engine: in shards, right, saved, loaded elsewhere, and shown for a moment."""

from __future__ import annotations

import pytest

from tests.distributed.world import run
from tests.tiers import deep_case

QUICK = [
    ("ddp", "float32", "ema"),
    ("fsdp2", "float32", "ema"),
    ("zero1", "float32", "ema"),
    ("zero2", "bfloat16", "ema"),
    ("zero3", "bfloat16", "ema"),
]
REST = [
    ("ddp", "bfloat16", "tail"),
    ("fsdp2", "bfloat16", "tail"),
    ("fsdp2-hybrid", "float32", "tail"),
    ("zero1", "bfloat16", "tail"),
    ("zero2", "float32", "tail"),
    ("zero2-offload", "float32", "tail"),
    ("zero3", "float32", "tail"),
    ("zero3-persistent", "float32", "tail"),
    ("zero3-offload", "float32", "tail"),
]
every_engine = pytest.mark.parametrize("engine", [*QUICK, *(deep_case(one) for one in REST)], ids="-".join)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What both ranks found, by engine; one pair of processes for many of them."""
    known: dict[bool, list] = {}

    def of(engine):
        rest = engine in REST
        if rest not in known:
            folder, engines = tmp_path_factory.mktemp("averages"), REST if rest else QUICK
            arguments = {"engines": engines, "runs": folder}
            known[rest] = run(folder, "tests.distributed.averaging:every_engine", fresh=rest, **arguments)
        return [rank["-".join(engine)] for rank in known[rest]]

    return of


@every_engine
def test_the_average_is_that_of_the_weights_after_each_step(engine, outcomes):
    """In float32 from the optimizer's own weights, shown in the model's dtype; in shards where the engine shards."""
    ranks = outcomes(engine)
    for found in ranks:
        assert found["differs"] <= (2**-8 if engine[1] == "bfloat16" and engine[0] != "fsdp2" else 1e-6)
        assert found["moved by the last step"] > 1e-3 and found["dtypes"] == {"torch.float32"}
    held, entries = sum(found["held"] for found in ranks), ranks[0]["entries"]
    assert held == (2 * entries if engine[0] in ("ddp", "fsdp2-hybrid") else entries)


@every_engine
def test_a_checkpoint_of_it_is_loaded_by_any_engine(engine, outcomes):
    """To the bit on the same one; on another one, what was released there."""
    for found in outcomes(engine):
        assert found["loaded"] and found.get("of another engine", 0.0) <= 2**-8


@every_engine
def test_weights_are_put_back_to_the_bit_after_it_was_shown(engine, outcomes):
    """So that the watch, which compares bits, accepts the next step."""
    for found in outcomes(engine):
        assert found["restored"] and found["moved when shown"] > 1e-4
