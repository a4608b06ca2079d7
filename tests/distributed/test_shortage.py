"""Memory that runs out on one of two processes: neither waits for the other, and the update is the same."""

import pytest
import torch

from dpllm.privacy.private_folder import read_diagnostics
from tests.distributed import world
from tests.distributed.shortage import LIMITS, STEPS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shortage")


@pytest.fixture(scope="module")
def ranks(folder):
    """The results of each of two processes."""
    return world.run(folder / "world", "tests.distributed.shortage:everything", size=2, root=folder)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", LIMITS)
def test_every_process_ends_with_the_undisturbed_parameters(ranks, folder, name, direction):
    """Rank 1 divides its microbatches and rank 0 does not; the sums are added up once, at the end of each step."""
    undisturbed = ranks[0]["never, forward"]
    for seen in (rank[f"{name}, {direction}"] for rank in ranks):
        torch.testing.assert_close(seen["parameters"], undisturbed["parameters"], rtol=1e-5, atol=1e-6)
        assert seen["units"] == [30, 0, 30] and seen["num_steps"] == STEPS
        assert (seen["divided"][0] > 0) == (name != "never") and seen["divided"][1:] == [0, 0]
        assert seen["max_tokens"] == ranks[0][f"{name}, {direction}"]["max_tokens"]
        assert (seen["max_tokens"] < 2000) == (name != "never")
    counted = read_diagnostics(folder / f"{name} {direction}")
    assert sum(counted.values()) == ranks[0][f"{name}, {direction}"]["divided"][0]


def test_the_smallest_of_the_budgets_is_taken(ranks):
    """Three rows fit on rank 0 and four on rank 1; all processes must cut in the same way."""
    assert [rank["auto"]["max_tokens"] for rank in ranks] == [3 * 11] * 2
    torch.testing.assert_close(ranks[1]["auto"]["parameters"], ranks[0]["never, forward"]["parameters"])


def test_a_sharded_model_needs_a_number(ranks):
    """Its processes pass through each layer together, so none of them can try separately."""
    for rank in ranks:
        kind, message = rank["sharded"]
        assert kind == "ConfigError" and "FullySharded" in message and "dpllm plan memory" in message
