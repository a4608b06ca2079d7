"""Every start and resume of a run has random numbers of its own; a seed, for tests, repeats them."""

import torch

from dpllm.engines.processes import Processes
from dpllm.training.run import RunEntropy
from tests.training.test_run import ledger_of, plan_of


def numbers(folder, seed=None):
    """Three draws, a key, and some noise."""
    plan = plan_of(seeded=seed is not None)
    entropy = RunEntropy(plan, Processes(), ledger_of(folder, plan), seed)
    assert entropy.first == 0
    entropy.noise.begin(0)
    noise = torch.zeros(50)
    entropy.noise.add_share_("w", noise, 1.0, 0, 1)
    steps = entropy.draws()
    return [next(steps).tolist() for _ in range(3)], entropy.deal_key(2), noise.tolist()


def test_two_starts_share_no_number_and_a_seed_repeats_all(tmp_path):
    """Draws, division and noise are three streams."""
    first, second = (numbers(tmp_path / name) for name in "ab")
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert numbers(tmp_path / "c", seed=5) == numbers(tmp_path / "d", seed=5)


def test_the_key_differs_between_steps(tmp_path):
    """Units of equal numbers go to other processes in the next step."""
    plan = plan_of(seeded=True)
    entropy = RunEntropy(plan, Processes(), ledger_of(tmp_path, plan), 5)
    assert [entropy.deal_key(step) for step in (0, 1, 7)] == [5, 6, 12]


def test_generators_depend_on_the_rows_only_within_a_step(tmp_path):
    """After a step, or one that failed, they are where two runs of one seed have them, whatever the rows drew."""
    states = []
    for name, drawn, ends in (("a", 1, "end_step"), ("b", 9, "end_step"), ("c", 4, "give_up_step")):
        plan = plan_of(seeded=True)
        entropy = RunEntropy(plan, Processes(), ledger_of(tmp_path / name, plan), 5)
        with torch.random.fork_rng():
            entropy.begin_step()
            torch.rand(drawn)
            getattr(entropy, ends)()
            states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])
