"""Passes that run from a recording: the same norms and sums, and no value of other rows."""

import copy
import functools
import os
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from dpllm import GhostClipper, GhostError, NormMethod, per_sequence_loss
from dpllm.ghost import known_code, triton_kernels
from dpllm.ghost.sums import Sum
from dpllm.ghost.tape import Tape
from dpllm.mechanism.per_layer import PerLayerClipping
from tests.conftest import tiny_llama_config
from tests.ghost.loop import row_gradients

PASSES = 12


@pytest.fixture(autouse=True)
def code_of_tests_is_recorded(monkeypatch):
    """As if a known package had these models and losses: of others no pass is recorded."""
    monkeypatch.setattr(known_code, "_AROUND", known_code._AROUND | {"tests"})


def rows_of(number, rows=4, tokens=6):
    generator = torch.Generator().manual_seed(number)
    return {"input_ids": torch.randint(3, 61, (rows, tokens), generator=generator)}


def language_loss(model, batch):
    return per_sequence_loss(model(input_ids=batch["input_ids"]).logits, batch["input_ids"])


class Both:
    """A model and its copy: one runs from recordings, the other does not.

    Args:
        model: the first.
        loss: of a model and a batch, one for each row.
        options: of `NormMethod`.
        clipping: of the clippers.
    """

    def __init__(self, model, loss, clipping=None, **options):
        self.models, self.loss, self.random = [model, copy.deepcopy(model)], loss, 0
        norm = None if clipping else 0.5
        self.loss_of = {id(m): lambda inputs, m=m: self.loss(m, inputs) for m in self.models}  # a recording is of one
        self.clippers = [
            GhostClipper(model, norm, NormMethod(replay=replay, **options), clipping)
            for model, replay in zip(self.models, (True, False), strict=True)
        ]

    def run(self, batch, units=None):
        """Clip a batch both ways, and make sure that every bit of norms and sums is the same."""
        units = torch.arange(len(next(iter(batch.values())))) if units is None else units
        found = []
        for model, clipper in zip(self.models, self.clippers, strict=True):
            torch.manual_seed(self.random)
            losses, result = clipper.run(self.loss_of[id(model)], batch, units)
            sums = []
            for parameter in clipper.parameters.values():
                clipper.add_clipped_sum_(parameter, total := Sum.of(parameter))
                sums.append(total.filled())
            found.append([losses, result.norms, result.factors, *sums])
        self.random += 1
        for one, other in zip(*found, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
        return found[0]

    @property
    def recorded(self):
        """The shapes with a recording."""
        return self.clippers[0].replays


def llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config(**changes)).train()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16)).train()


def adapted():
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
    return get_peft_model(llama(), config).train()


def checkpointed():
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


MODELS = {
    "full": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "LoRA with dropout": adapted,
    "checkpointed": checkpointed,
    "bfloat16": lambda: llama().bfloat16(),
    "layer norms": gpt2,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_replay_is_the_pass_bit_for_bit(kind, per_layer):
    """Rows of two shapes in turn, while the weights change: losses, norms, factors and sums of every pass."""
    both = Both(MODELS[kind](), language_loss, PerLayerClipping(0.5) if per_layer else None)
    for number in range(2 * PASSES):
        both.run(rows_of(number, tokens=6 + number % 2))
        with torch.no_grad():
            for model in both.models:
                for parameter in model.parameters():
                    parameter.mul_(0.99)
    assert both.recorded == 2 or (per_layer and both.recorded == 0)


def test_a_replay_is_the_loop_over_units():
    """In float64, of users with several rows and with a padding row, against autograd of single rows."""
    model = llama().double()
    units = torch.tensor([0, 1, 1, 2, -1, 0])
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    loss_of = functools.partial(language_loss, model)
    for number in range(PASSES):
        batch = rows_of(number, rows=6)
        _, result = clipper.run(loss_of, batch, units)
        sums = [Sum.of(p) for p in clipper.parameters.values()]
        for parameter, total in zip(clipper.parameters.values(), sums, strict=True):
            clipper.add_clipped_sum_(parameter, total)
    assert clipper.replays == 1
    clipper.remove()
    rows = row_gradients(model, language_loss, batch)
    kept = units >= 0
    wanted = torch.zeros(3, rows.shape[1], dtype=torch.float64).index_add(0, units[kept], rows[kept])
    torch.testing.assert_close(result.norms.double(), wanted.norm(dim=1), rtol=1e-6, atol=0)
    factors = (0.5 / wanted.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(torch.cat([s.filled().flatten() for s in sums]), factors @ wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.skipif(not triton_kernels.INTERPRETED, reason="the kernels need Triton's interpreter")
def test_launches_that_pytorch_does_not_see_are_replayed():
    """The fused kernels read their tensors by address: a replay gives them its own."""
    both = Both(llama(), language_loss, fused=True)
    for number in range(PASSES - 3):
        both.run(rows_of(number, rows=2, tokens=5))
    assert both.recorded == 1


# ------------------------------------------------------- values that Python reads


class Net(nn.Module):
    """Features of 4 to one number for each token; ``between`` changes what is between the layers."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(4, 5), nn.Linear(5, 1), between

    def forward(self, x):
        return self.last(self.between(torch.tanh(self.first(x))))


def squares(model, batch):
    return model(batch["x"]).square().sum((1, 2))


def features(number, shift=0.0):
    return {"x": torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(number)) + shift}


def test_a_number_that_the_model_reads_is_compared_in_each_replay():
    """Recorded over rows whose sum is positive, replayed over others: the pass runs as it would have."""
    both = Both(Net(lambda x: x * 3 if bool(x.detach().sum() > 0) else -x), squares)
    shifts = [9.0] * 6 + [-9.0, 9.0] * 4
    for number, shift in enumerate(shifts):
        both.run(features(number, shift))
    assert both.recorded == 1


def test_two_passes_that_read_other_numbers_are_recorded_again():
    """One of the first has rows as no later one: those after it are recorded, and replayed where they are alike."""
    both = Both(Net(lambda x: x * 3 if bool(x.detach().sum() > 0) else -x), squares)
    for number, shift in enumerate([9.0, -9.0, 9.0, -9.0] + [9.0] * PASSES + [-9.0, 9.0]):
        both.run(features(number, shift))
    assert both.recorded == 1


def test_a_shape_that_follows_from_values_is_compared_in_each_replay():
    """The number of positive features differs in some passes."""

    def between(x):
        count = torch.nonzero(x.detach().flatten() > -2).shape[0]
        return x * count

    both = Both(Net(between), squares)
    for number in range(PASSES):
        both.run(features(number))
    assert both.recorded == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist()[0],
        lambda x: float(x.numpy()[0]),
        lambda x: float(np.asarray(x)[0]),
        lambda x: float(torch.frombuffer(bytearray(x.untyped_storage()), dtype=torch.float32)[0]),
        lambda x: float(torch.from_dlpack(x)[0]) * 0 + float(np.from_dlpack(x)[0]),
    ],
    ids=["tolist", "numpy", "asarray", "storage", "dlpack"],
)
def test_a_model_that_reads_values_in_python_is_not_replayed(read):
    """The number would be that of the recorded rows, which no noise of a later step covers."""
    both = Both(Net(lambda x: x * (2 + read(x.detach().flatten().contiguous()))), squares)
    for number in range(PASSES):
        both.run(features(number))
    assert both.recorded == 0


def test_a_loss_that_reads_values_in_python_is_not_replayed():
    """The same for what the loss reads of the inputs."""
    both = Both(Net(), lambda model, batch: squares(model, batch) * (1 + abs(batch["x"].tolist()[0][0][0])))
    for number in range(PASSES):
        both.run(features(number))
    assert both.recorded == 0


def unseen_tensor(x):
    with _disable_current_modes():  # as a library would that PyTorch does not see
        return torch.tensor(x.detach().abs().mean().item())


def unseen_write(x):
    new = torch.empty_like(x.detach())
    with _disable_current_modes():
        return new.copy_(x.detach())


@pytest.mark.parametrize("made_of", [unseen_tensor, unseen_write])
def test_what_no_operation_made_is_not_replayed(made_of):
    """A tensor, or what a kernel of another library wrote to a new one: it could hold values of the recorded rows."""
    both = Both(Net(lambda x: x * made_of(x)), squares)
    for number in range(PASSES):
        both.run(features(number))
    assert both.recorded == 0


def test_a_table_that_grows_with_the_passes_is_not_replayed():
    """A tensor of the module that is replaced in each call holds values of the call before."""

    class Keeps(Net):
        def forward(self, x):
            self.kept = getattr(self, "kept", torch.ones(()))
            y = super().forward(x) * self.kept
            self.kept = self.kept + x.detach().mean().abs()
            return y

    clipper = GhostClipper(model := Keeps(), 0.5, NormMethod(replay=True))
    loss_of = functools.partial(squares, model)
    for number in range(PASSES):
        clipper.run(loss_of, features(number), torch.arange(3))
    assert clipper.replays == 0


# --------------------------------------------------------------- a model that changes


def test_a_model_that_changes_is_recorded_again():
    """Its mode, a frozen layer outside of the clipper, a parameter's dtype or a hook: as without recordings."""
    model = nn.Sequential(Net(), nn.Dropout(0.5))
    model[0].last.bias.requires_grad = False
    both = Both(model, squares)

    def hook(*_):
        return _[2] * 2

    changes = [
        lambda model: model.eval(),
        lambda model: model.train(),
        lambda model: model[0].first.register_forward_hook(hook),
        lambda model: setattr(model[0], "between", nn.Softplus()),
        lambda model: setattr(model[0].between, "forward", lambda x: x * 0.5),
        lambda model: model[0].last.bias.data.copy_(torch.ones(1)),
    ]
    for number, change in enumerate(changes):
        for model in both.models:
            change(model)
        for again in range(PASSES):
            both.run(features(100 * number + again))
        assert both.recorded == 1


def test_a_loss_that_changes_unseen_is_an_error():
    """A number in Python that grows: the replays 1, 2, 4, … are compared with the pass."""
    scale = [1.0]
    model = Net()
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))

    def loss(inputs):
        return squares(model, inputs) * scale[0]

    for number in range(PASSES):
        clipper.run(loss, features(number), torch.arange(3))
    assert clipper.replays == 1
    scale[0] = 2.0
    with pytest.raises(GhostError, match=r"differs from the pass itself.*replay: false in the recipe"):
        for number in range(PASSES):
            clipper.run(loss, features(number), torch.arange(3))


def test_an_error_in_a_recorded_pass_leaves_no_tape():
    """The passes after it are as without it."""
    both = Both(Net(), squares)

    def fails(model, batch):
        squares(model, batch)
        raise torch.OutOfMemoryError("made up")

    for number in range(PASSES):
        if number in (2, 3, 6):
            both.loss = fails
            for clipper, model in zip(both.clippers, both.models, strict=True):
                with pytest.raises(torch.OutOfMemoryError):
                    clipper.run(lambda inputs, m=model: fails(m, inputs), features(number), torch.arange(3))
                clipper.forget()
            both.loss = squares
        assert Tape.current is None
        both.run(features(number))
    assert both.recorded == 1


def test_losses_and_units_are_checked_as_before():
    """Shapes that do not fit are refused, with and without a recording."""
    clipper = GhostClipper(model := Net(), 0.5, NormMethod(replay=True))
    for number in range(PASSES):
        clipper.run(lambda inputs: squares(model, inputs), features(number), torch.arange(3))
    with pytest.raises(GhostError, match="unit_index has shape"):
        clipper.run(lambda inputs: squares(model, inputs), features(0), torch.arange(4))
    with pytest.raises(GhostError, match="one loss per row"):
        clipper.run(lambda inputs: squares(model, inputs).sum(), {"x": features(0)["x"], "n": 1}, torch.arange(3))
    with pytest.raises(GhostError, match="-1 marks a padding row"):
        clipper.run(lambda inputs: squares(model, inputs), features(0), torch.tensor([0, -2, 1]))
    with pytest.raises(ValueError, match="replay is 1"):
        NormMethod(replay=1)


def test_rows_that_are_held_are_joined_without_a_recording():
    """The last rows of a unit that has more rows than fit complete its gradient."""
    models = [Net(), Net()]
    found = []
    for model, replay in zip(models, (True, False), strict=True):
        clipper = GhostClipper(model, 0.5, NormMethod(replay=replay))
        for number in range(PASSES):
            clipper.run(lambda inputs, m=model: squares(m, inputs), features(number), torch.zeros(3, dtype=torch.long))
        clipper.hold(squares(model, features(50)))
        _, result = clipper.run(
            lambda inputs, m=model: squares(m, inputs), features(51), torch.zeros(3, dtype=torch.long)
        )
        found.append(result.norms)
    assert torch.equal(*found)


def test_a_loss_of_several_calls_is_replayed():
    """A loss of two calls of the model has two contributions to each parameter."""
    both = Both(Net(F.relu), lambda model, batch: squares(model, batch) + squares(model, {"x": batch["x"] * 2}))
    for number in range(PASSES):
        both.run(features(number))
    assert both.recorded == 1
