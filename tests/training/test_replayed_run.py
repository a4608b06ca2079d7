"""A run whose passes run from recordings: the same weights, and the same report."""

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from dpllm import NormMethod
from dpllm.config import ConfigError, load_recipe
from dpllm.ghost import GhostClipper
from dpllm.ghost.replay import Replay
from dpllm.ghost.tape import Program
from tests.distributed import world
from tests.training.test_trainer import arguments, privacy, rows, small_trainer, trainer, users


@pytest.mark.parametrize(("level", "size"), [("rows", 2), ("users", 6)])
def test_the_weights_are_those_of_a_run_without_recordings(tmp_path, monkeypatch, level, size):
    """Every step at σ = 0, from the same draws; most microbatches ran from a recording."""
    weights, clippers, attached = [], [], GhostClipper.__init__
    monkeypatch.setattr(
        GhostClipper, "__init__", lambda self, *a, **k: (clippers.append(self), attached(self, *a, **k))[1]
    )
    for replay in (False, True):
        torch.manual_seed(0)
        config = privacy if level == "rows" else users
        run = trainer(
            tmp_path / str(replay),
            dataset=rows(who=[n % 8 for n in range(64)]),
            config=config(noise_multiplier=0.0, clip_norm=0.05, seed=3),
            args=arguments(tmp_path / str(replay), per_device_train_batch_size=size, max_steps=6, optim="sgd"),
            norm_method=NormMethod(replay=replay),
        )
        clippers.clear()
        run.train()
        weights.append([p.detach().clone() for p in run.model.parameters()])
    if level == "users":
        assert all(map(torch.equal, *weights))
    for one, other in zip(*weights, strict=True):  # with one row per unit, microbatches are rounded up
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
    assert max(clipper.replays for clipper in clippers) >= 1


def test_texts_of_many_lengths_have_few_shapes(tmp_path, monkeypatch):
    """Lengths and numbers of rows are rounded up, with padding rows: the same weights, and most passes replayed."""
    seen, norms = [], Replay.norms
    monkeypatch.setattr(Replay, "norms", lambda self, *a: (seen.append(self), norms(self, *a))[1])
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 61, (3 + n % 60,), generator=generator).tolist() for n in range(256)]
    weights = []
    for replay in (False, True):
        torch.manual_seed(0)
        run = trainer(
            tmp_path / str(replay),
            dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
            config=privacy(noise_multiplier=0.0, clip_norm=0.05, expected_batch_size=64, seed=3),
            args=arguments(tmp_path / str(replay), max_steps=8, optim="sgd"),
            norm_method=NormMethod(replay=replay),
            max_tokens_per_microbatch=128,
        )
        run.train()
        weights.append([p.detach().clone() for p in run.model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    passes = [(shape.seen, shape.replayed) for shape in seen[0]._shapes.values()]
    assert sum(replayed for _, replayed in passes) > 0.5 * sum(count for count, _ in passes)


class _Steps(TrainerCallback):
    """Keeps the weights after each step; generates and evaluates, and breaks off after a step, if asked to."""

    def __init__(self, between=False, last=None):
        self.between, self.last, self.weights = between, last, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        if self.between:
            model.eval()
            model.generate(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
            model.train()
            model(input_ids=torch.tensor([[3, 4, 5]] * 2))  # with a graph that nobody uses
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        if state.global_step == self.last:
            raise RuntimeError("power cut")


@pytest.fixture
def replays(monkeypatch):
    """Grows by one with each pass that is replayed."""
    calls, call = [], Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, inputs: (calls.append(1), call(self, inputs))[1])
    return calls


def _users_run(folder, replay, steps, resume=None, **options):
    """Users with two rows, and one with more rows than a microbatch has, at σ = 1, from the same draws and noise."""
    torch.manual_seed(0)
    run = small_trainer(
        folder,
        dataset=rows(who=[min(n // 2, 28) for n in range(64)]),
        config=users(noise_multiplier=1.0, clip_norm=0.05, seed=3, expected_batch_size=14, **options),
        args=arguments(
            folder, per_device_train_batch_size=4, max_steps=4, optim="sgd", save_strategy="steps", save_steps=1
        ),
        callbacks=[steps],
        norm_method=NormMethod(replay=replay),
    )
    run.train(resume_from_checkpoint=resume)
    return run


def test_what_a_loop_does_between_steps(tmp_path, replays):
    """Generation, a forward pass that nobody uses, and weights that are loaded: every step has the same bits."""
    kept = [_Steps(between=True) for _ in range(2)]
    for replay, steps in enumerate(kept):
        _users_run(tmp_path / str(replay), bool(replay), steps, clipping="quantile")
    assert len(kept[0].weights) == 4 and all(map(torch.equal, *(one.weights for one in kept)))
    assert len(replays) > 10


def test_a_run_is_resumed_with_and_without(tmp_path, replays):
    """Before and after: weights of each step, steps charged and ε do not depend on recordings."""
    found = []
    for before, after in ((True, False), (False, True)):
        folder, first, then = tmp_path / f"{before}{after}", _Steps(last=2), _Steps()
        with pytest.raises(RuntimeError, match="power cut"):
            _users_run(folder, before, first)
        assert bool(replays) == before
        replays.clear()
        run = _users_run(folder, after, then, resume=True)
        assert bool(replays) == after
        replays.clear()
        found.append(([*first.weights, *then.weights], run.ledger.num_steps, run.epsilon))
    assert len(found[0][0]) == 4 and all(map(torch.equal, *(weights for weights, _, _ in found)))
    assert found[0][1:] == found[1][1:]


def test_memory_that_runs_out_in_a_replay(tmp_path, monkeypatch, caplog):
    """The microbatch is run in halves, from recordings of their own; no unit is lost or counted twice."""
    weights, calls, call = [], [], Program.__call__

    def runs_out(self, inputs):
        calls.append(1)
        if len(calls) == 7:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return call(self, inputs)

    monkeypatch.setattr(Program, "__call__", runs_out)
    for replay in (False, True):
        steps = _Steps()
        _users_run(tmp_path / str(replay), replay, steps)
        weights.append(steps.weights[-1])
    assert len(calls) > 7 and "microbatches were split in half" in caplog.text
    torch.testing.assert_close(*weights, rtol=0, atol=1e-7)


def test_two_processes(tmp_path):
    """With recordings and without: the same bits on both processes, and the same steps charged."""
    ranks = world.run(tmp_path / "world", "tests.distributed.replaying:weights", root=tmp_path)
    wanted = ranks[0]["none"][0]
    for found in ranks:
        for kind in ("none", "both"):
            trained, replayed, charged = found[kind]
            assert torch.equal(trained, wanted) and (replayed > 0) == (kind == "both") and charged == 4


def test_a_recipe_switches_it_on(tmp_path):
    """`replay` is true or false; it is no part of what the ledger or the report says of the mechanism."""
    from tests.config.test_recipe import RECIPE

    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert load_recipe(path).replay is False and load_recipe(path, ["replay=true"]).replay is True
    with pytest.raises(ConfigError, match="replay must be true or false, got 1"):
        load_recipe(path, ["replay=1"])
    assert repr(NormMethod(replay=True)) == repr(NormMethod())  # a run may be resumed with and without
