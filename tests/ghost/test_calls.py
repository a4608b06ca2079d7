"""Losses from several calls of the model: every use counts, for one pass and for two."""

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, GhostError, per_sequence_loss
from dpllm.ghost import NormMethod
from tests.conftest import tiny_llama_config
from tests.ghost.loop import assert_is_the_loop, perturbed

PASSES = [1, 2, "auto"]


class Net(nn.Module):
    """Rows of tokens to one number per row."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))).mean((1, 2))


def pair(model, batch):
    """A loss of two calls that depends on both."""
    better, worse = model(batch["x"]), model(batch["y"])
    return -torch.nn.functional.logsigmoid(better - worse) + 0.3 * worse.square()


def numbers(rows=5):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, t, 3, generator=generator, dtype=torch.float64) for name, t in (("x", 4), ("y", 6))}


@pytest.mark.parametrize("unit_index", [None, torch.tensor([1, 0, 1, 2, 3])], ids=["rows", "units"])
@pytest.mark.parametrize("passes", PASSES)
def test_two_calls_per_loss_match_the_loop(passes, unit_index):
    """A preference loss; the two calls have rows of different lengths."""
    assert_is_the_loop(
        perturbed(Net()), pair, numbers(), NormMethod(backward_passes=passes), unit_index, microbatches=2
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("passes", PASSES)
def test_two_calls_of_a_language_model_match_the_loop(passes, mode, checkpointing, monkeypatch):
    """Tied embeddings and head: four uses of one matrix. "auto" takes two passes where memory is short."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    from dpllm.ghost import parameters

    monkeypatch.setattr(parameters, "free_bytes", lambda device: 10)
    model = LlamaForCausalLM(tiny_llama_config(tie_word_embeddings=True, use_cache=False))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if mode == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.randint(3, 61, (2, 4, 7), generator=torch.Generator().manual_seed(5))

    def losses(model, batch):
        chosen, other = (per_sequence_loss(model(input_ids=batch[n]).logits, batch[n]) for n in ("x", "y"))
        return torch.nn.functional.softplus(chosen - other)

    assert_is_the_loop(perturbed(model), losses, {"x": ids[0], "y": ids[1]}, NormMethod(backward_passes=passes))


@pytest.mark.parametrize("passes", PASSES)
def test_a_call_that_no_loss_comes_from_changes_nothing(passes):
    """A call with gradients on, with other rows, whose output is discarded."""

    def losses(model, batch):
        model(batch["x"][:1])
        return model(batch["x"]).square()

    assert_is_the_loop(perturbed(Net()), losses, numbers(), NormMethod(backward_passes=passes))


@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize("passes", [1, 2])
def test_two_calls_with_different_numbers_of_rows_are_refused(passes, rows):
    """Gradients could not be assigned to rows."""
    model, batch = perturbed(Net()), numbers()
    clipper = GhostClipper(model, 1.0, NormMethod(backward_passes=passes))
    other = batch["y"].repeat(2, 1, 1)[:rows]
    with pytest.raises(
        GhostError, match=rf"works on {rows} rows, but there are 5 losses.*the same rows\. Otherwise freeze"
    ):
        clipper.backward(model(batch["x"]) + model(other)[:5])


def test_two_passes_over_a_call_from_before_the_last_backward_are_refused():
    """Without the check, an uncounted use would be missing from the sum."""
    model, batch = perturbed(Net()), numbers()
    clipper = GhostClipper(model, 1.0, NormMethod(backward_passes=2))
    early = model(batch["x"])
    clipper.backward(model(batch["y"]))
    with pytest.raises(GhostError, match="used more"):
        clipper.backward(early + model(batch["y"]))


def test_calls_packed_differently_are_refused():
    """The boundaries of one call separate the rows."""
    model = perturbed(Net())

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x, cu_seq_lens_q):
            return self.net.last(torch.tanh(self.net.first(x)))[0, :, 0]

    packed = Packed()
    for parameter in model.norm.parameters():
        parameter.requires_grad_(False)
    clipper = GhostClipper(packed, 1.0)
    x = torch.randn(1, 8, 3, dtype=torch.float64)
    tokens = [packed(x, cu_seq_lens_q=torch.tensor([0, cut, 8])) for cut in (3, 5)]
    losses = torch.stack([tokens[0][:3].sum() + tokens[1][:5].sum(), tokens[0][3:].sum() + tokens[1][5:].sum()])
    with pytest.raises(GhostError, match="packed differently"):
        clipper.backward(losses)
