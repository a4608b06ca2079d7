"""Microbatches and forms of the norms through the Trainer: they change speed and memory, never the update."""

import pytest
import torch

from dpllm.config import ConfigError
from dpllm.ghost import NormMethod
from dpllm.privacy.private_folder import read_diagnostics
from tests.training.test_trainer import arguments, privacy, trainer, update_of

pytestmark = pytest.mark.usefixtures("rows_not_compared")


def test_microbatches_by_tokens_give_the_same_update(tmp_path):
    """A budget of tokens in place of rows changes how often the model runs, and nothing else."""
    updates, calls = [], []
    for name, budget in (("rows", None), ("few", 16), ("many", 400)):
        torch.manual_seed(0)
        run = trainer(
            tmp_path / name,
            config=privacy(noise_multiplier=0.0, clip_norm=0.05, expected_batch_size=64),
            args=arguments(tmp_path / name, max_steps=1, optim="sgd"),
            max_tokens_per_microbatch=budget,
        )
        seen = []
        run.model.register_forward_pre_hook(
            lambda _, a, kw, s=seen: s.append(kw["input_ids"].numel()), with_kwargs=True
        )
        updates.append(update_of(run))
        calls.append(seen)
    for update in updates[1:]:
        assert float((update - updates[0]).norm()) <= 1e-4 * float(updates[0].norm())
    assert max(calls[1]) <= 16 and max(calls[2]) <= 400 and len(calls[1]) > len(calls[0]) > len(calls[2])
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch"):
        trainer(tmp_path / "none", max_tokens_per_microbatch=0)


def test_a_shortage_of_memory_in_the_middle_of_training(tmp_path, caplog):
    """All steps are taken and charged once; the report counts the shortage, and the log has the remedy."""
    run = trainer(tmp_path, max_tokens_per_microbatch="auto")
    sizes = []

    def before_layer(_, args):
        sizes.append(args[0].shape[:-1].numel())
        if sizes[-1] > 32:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    run.model.model.layers[1].mlp.register_forward_pre_hook(before_layer)
    run.train()
    assert run.ledger.num_steps == 4 and max(sizes) > 32 >= sizes[-1]
    assert "microbatches were split in half and retried" in caplog.text
    counted = read_diagnostics(run.ledger.path.parent)
    assert counted["microbatches taken again in halves for lack of memory"] >= 1
    with pytest.raises(ConfigError, match="max_tokens"):
        trainer(tmp_path / "none", max_tokens_per_microbatch="most")


def test_every_form_gives_the_same_update(tmp_path):
    """Two steps at σ = 0 under activation checkpointing: norms from Gram matrices or tiles, in one pass or two."""
    updates = []
    for number, norm_method in enumerate(
        (None, NormMethod("gram", backward_passes=2), NormMethod("tiled", backward_passes=1), NormMethod("instance"))
    ):
        torch.manual_seed(0)
        folder = tmp_path / str(number)
        run = trainer(
            folder,
            config=privacy(noise_multiplier=0.0, clip_norm=0.05, seed=3),
            args=arguments(folder, max_steps=2, optim="sgd", gradient_checkpointing=True),
            norm_method=norm_method,
        )
        updates.append(update_of(run))
    for update in updates[1:]:
        assert float((update - updates[0]).norm()) <= 1e-4 * float(updates[0].norm()) > 0
