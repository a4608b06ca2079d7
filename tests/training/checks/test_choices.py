"""Random choices of checks: the operating system's, or the same on processes that take the same rows."""

from types import SimpleNamespace

from dpllm.engines.processes import Processes
from dpllm.training.checks import choices


def drawn():
    return choices.source().getrandbits(64)


def test_processes_with_the_same_rows_choose_alike():
    """And only within the block, and only if they take the same rows."""
    others: list[bytes] = []

    def from_main(entropy):
        others.append(others[0] if others else entropy())
        return others[0]

    two = SimpleNamespace(size=2, from_main=from_main)
    seen = []
    for _ in range(2):
        with choices.alike(two, are_same=True):
            seen.append([drawn(), drawn()])
    assert seen[0] == seen[1] and seen[0][0] != seen[0][1] and len(others[0]) == 32
    with choices.alike(two, are_same=False):
        assert drawn() not in seen[0]
    with choices.alike(Processes(), are_same=True):
        assert drawn() not in seen[0]
    assert drawn() not in seen[0]
