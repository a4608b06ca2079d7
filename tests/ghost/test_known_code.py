"""Only passes through code of known packages are recorded; code of one's own runs as without recordings."""

from __future__ import annotations

import functools
import math
import textwrap

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import dpllm
from dpllm import GhostClipper, NormMethod
from dpllm.ghost.known_code import foreign
from dpllm.models.tasks import default_row_loss
from dpllm.training.row_losses import RowLosses
from tests.conftest import tiny_llama_config


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config()).train()


def adapted():
    return get_peft_model(llama(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))


def language_loss(model, batch):
    return dpllm.per_sequence_loss(model(input_ids=batch["input_ids"]).logits, batch["input_ids"])


def rows_of(number, tokens=6):
    generator = torch.Generator().manual_seed(number)
    return {"input_ids": torch.randint(3, 61, (2, tokens), generator=generator)}


@pytest.mark.parametrize("make", [llama, adapted, lambda: nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))])
def test_models_of_known_packages_have_no_other_code(make):
    """With the hooks of a clipper on them."""
    clipper = GhostClipper(model := make(), 1.0)
    assert foreign(model) is None
    clipper.remove()


class Own(nn.Linear):
    """A layer of a user's own, which changes nothing."""


def own_forward(module, x):
    return x


def hook(module, args, output):
    return None


def with_hook(model):
    model.lm_head.register_forward_hook(hook)


def with_hook_of_gradients(model):
    model.lm_head.weight.register_hook(lambda grad: None)


def with_layer(model):
    model.lm_head = Own(8, 64)


def with_forward(model):
    model.model.norm.forward = functools.partial(own_forward, model.model.norm)


def with_decorated_forward(model):
    @torch.no_grad()
    @functools.wraps(model.model.norm.forward)
    def decorated(x):
        return x

    model.model.norm.forward = decorated


def with_parametrization(model):
    class Halved(nn.Module):
        def forward(self, weight):
            return weight / 2

    parametrize.register_parametrization(model.lm_head, "weight", Halved())


def with_list_of_functions(model):
    model.model.norm.more = [own_forward]


CHANGES = [
    with_hook,
    with_hook_of_gradients,
    with_layer,
    with_forward,
    with_decorated_forward,
    with_parametrization,
    with_list_of_functions,
]


@pytest.mark.parametrize("change", CHANGES)
def test_code_of_ones_own_is_found(change):
    """Wherever it was put on the model, and the name says where it was written."""
    change(model := llama())
    assert "tests.ghost.test_known_code" in foreign(model)


def test_code_that_replaces_a_packages_own_is_found(monkeypatch):
    """A method of a class, a function of its file, an attention function that was registered, a hook on all modules."""
    assert foreign(llama()) is None
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaRMSNorm, "forward", own_forward)
        assert "own_forward" in foreign(llama())
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "rotate_half", lambda x: x)
        assert "lambda" in foreign(llama())
    with monkeypatch.context() as patch:
        patch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "own", hook)
        assert "hook" in foreign(llama())
    handle = register_module_forward_hook(hook)
    assert "hook" in foreign(llama())
    handle.remove()
    assert foreign(llama()) is None


class OwnLoss:
    """A callable of a user's own."""

    def __call__(self, inputs):
        return inputs


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_losses_of_ones_own_are_found():
    """Also within a partial function, a closure, a bound method or a list, and functions that torch.jit compiled."""
    known = functools.partial(dpllm.per_sequence_loss, None)
    assert foreign(None, known) is None
    assert foreign(None, math.sqrt) is None
    assert "language_loss" in foreign(None, functools.partial(language_loss, llama()))
    assert "OwnLoss" in foreign(None, OwnLoss())
    assert "OwnLoss" in foreign(None, OwnLoss().__call__)
    assert "own_forward" in foreign(None, functools.partial(dpllm.per_sequence_loss, [own_forward]))
    assert "own_forward" in foreign(None, torch.no_grad()(own_forward))
    script = torch.jit.script(torch.nn.functional.relu)
    assert "torch.jit" in foreign(None, functools.partial(dpllm.per_sequence_loss, script))
    assert "torch.jit" in foreign(nn.Sequential(torch.jit.script(nn.Tanh())))
    assert "torch._dynamo" in foreign(None, torch.compile(dpllm.per_sequence_loss))


def test_with_code_of_ones_own_no_pass_is_recorded(caplog):
    """The run goes on without recordings and says once which code is at fault."""
    model = llama()
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    loss_of = functools.partial(language_loss, model)
    with caplog.at_level("WARNING"):
        for number in range(8):
            clipper.run(loss_of, rows_of(number), torch.arange(2))
    assert clipper.replays == 0
    assert len([one for one in caplog.records if "test_known_code.language_loss" in one.message]) == 1


def test_code_that_comes_later_ends_the_recordings():
    """A hook that is registered between two steps is a change of the model, which is looked at anew."""
    model = llama()
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    losses = functools.partial(RowLosses(default_row_loss(model), packed=False), model)

    def run():
        for number in range(8):
            clipper.run(losses, rows_of(number) | {"labels": rows_of(number)["input_ids"]}, torch.arange(2))
        return clipper.replays

    assert run() == 1
    handle = model.lm_head.register_forward_hook(hook)
    assert run() == 0
    handle.remove()


def test_under_a_mode_of_ones_own_no_pass_is_replayed():
    """It would see the operations of a replay, which are others than those of a pass."""

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = llama()
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    losses = functools.partial(RowLosses(default_row_loss(model), packed=False), model)
    for mode, recorded in ((Seen(), 0), (torch.device("cpu"), 1)):
        with mode:
            for number in range(8):
                clipper.run(losses, rows_of(number) | {"labels": rows_of(number)["input_ids"]}, torch.arange(2))
        assert clipper.replays == recorded


def test_a_file_with_the_name_of_one_of_pythons_is_not_known():
    """A user's own profile.py, imported in place of Python's."""
    names = {"__name__": "profile"}
    exec(compile("def loss(inputs): return inputs", "/home/somebody/profile.py", "exec"), names)
    assert foreign(None, names["loss"]) == "profile.loss"
    assert foreign(None, textwrap.dedent) is None


def test_a_number_of_a_module_that_changes_is_seen_at_once():
    """A dropout's share and the scale of an adapter are compared before each replay."""
    model = adapted()
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    losses = functools.partial(RowLosses(default_row_loss(model), packed=False), model)

    def norms(number):
        _, result = clipper.run(losses, rows_of(number) | {"labels": rows_of(number)["input_ids"]}, torch.arange(2))
        return result.norms

    for number in range(8):
        norms(number)
    assert clipper.replays == 1
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    before = norms(9)
    assert clipper.replays == 0 and bool(before.gt(0).all())
    for number in range(8):
        norms(number)
    assert clipper.replays == 1
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling["default"] *= 2
    torch.testing.assert_close(norms(9), 2 * before)  # the second factors are 0, and so are gradients of the first
    assert clipper.replays == 0


def test_a_number_that_becomes_a_tensor_is_a_change():
    """Tensors compare their entries, which is no answer to whether a module is as it was."""
    model = llama()
    model.lm_head.kept, model.lm_head.scale = None, 1.0
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    losses = functools.partial(RowLosses(default_row_loss(model), packed=False), model)
    for number in range(16):
        if number == 8:
            assert clipper.replays == 1
            model.lm_head.kept, model.lm_head.scale = torch.ones(3), torch.ones(3)
        clipper.run(losses, rows_of(number) | {"labels": rows_of(number)["input_ids"]}, torch.arange(2))
        assert number != 8 or clipper.replays == 0
    assert clipper.replays == 1


def test_numbers_that_change_with_each_pass_end_the_recordings(caplog):
    """Otherwise each pass would be recorded anew, at twice the time."""
    model = llama()
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    losses = functools.partial(RowLosses(default_row_loss(model), packed=False), model)
    with caplog.at_level("WARNING"):
        for number in range(80):
            model.lm_head.calls = number
            clipper.run(losses, rows_of(0) | {"labels": rows_of(0)["input_ids"]}, torch.arange(2))
    assert clipper.replays == 0
    assert len([one for one in caplog.records if "attributes of its modules change" in one.message]) == 1
