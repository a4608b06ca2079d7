"""A run whose passes run from recordings: the same weights, and the same report."""

import pytest
import torch
from datasets import Dataset

from dpllm import NormMethod
from dpllm.config import ConfigError, load_recipe
from dpllm.ghost import GhostClipper
from dpllm.ghost.replay import Replay
from tests.training.test_trainer import arguments, privacy, rows, trainer, users


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


def test_a_recipe_switches_it_on(tmp_path):
    """`replay` is true or false; it is no part of what the ledger or the report says of the mechanism."""
    from tests.config.test_recipe import RECIPE

    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert load_recipe(path).replay is False and load_recipe(path, ["replay=true"]).replay is True
    with pytest.raises(ConfigError, match="replay must be true or false, got 1"):
        load_recipe(path, ["replay=1"])
    assert repr(NormMethod(replay=True)) == repr(NormMethod())  # a run may be resumed with and without
