"""Only passes through code of known packages are recorded; code of one's own runs as without recordings."""

from __future__ import annotations

import collections
import functools
import importlib
import math
import textwrap
import types

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_pre_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from transformers import LlamaForCausalLM, cache_utils, masking_utils
from transformers.integrations import sdpa_attention
from transformers.models.llama import modeling_llama

import dpllm
from dpllm import GhostClipper, NormMethod
from dpllm.ghost import known_code
from dpllm.ghost.known_code import foreign
from dpllm.models import losses
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


class OwnHook(ModelHook):
    def post_forward(self, module, output):
        return output


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class OwnConfig(type(tiny_llama_config())):
    @property
    def of_ones_own(self):
        return 1


def with_hook_of_accelerate(model):
    add_hook_to_module(model.lm_head, OwnHook())


def with_hooks_of_accelerate(model):
    add_hook_to_module(model.lm_head, SequentialHook(ModelHook(), OwnHook()))


def with_autograd_function(model):
    model.model.norm.forward = OwnFunction.apply


def with_hook_after_gradients(model):
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def with_config(model):
    model.model.norm.config = OwnConfig()


def with_function_in_config(model):
    model.config.more = {"function": own_forward}


def with_namespace(model):
    model.model.norm.more = types.SimpleNamespace(functions={own_forward})


def with_queue(model):
    model.model.norm.more = collections.deque([functools.partial(own_forward)])


def with_context_of_checkpoints(model):
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": own_forward})


CHANGES = [
    with_hook_of_accelerate,
    with_hooks_of_accelerate,
    with_autograd_function,
    with_hook_after_gradients,
    with_config,
    with_function_in_config,
    with_namespace,
    with_queue,
    with_context_of_checkpoints,
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
    """A method of a class, a function of its file, an attention function that was registered."""
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
    assert foreign(llama()) is None


class OwnCallable:
    def __call__(self, x):
        return x


class OwnCache(cache_utils.DynamicCache):
    """A cache of a user's own."""


REPLACEMENTS = {
    "partial function": (modeling_llama, "rotate_half", functools.partial(own_forward)),
    "callable object": (modeling_llama, "rotate_half", OwnCallable()),
    "autograd function": (modeling_llama, "rotate_half", OwnFunction.apply),
    "cached function": (modeling_llama, "rotate_half", functools.lru_cache(own_forward)),
    "partial method": (modeling_llama.LlamaRMSNorm, "forward", functools.partialmethod(own_forward)),
    "object as method": (modeling_llama.LlamaRMSNorm, "forward", OwnCallable()),
    "class": (modeling_llama, "DynamicCache", OwnCache),
    "method of a cache": (cache_utils.DynamicCache, "update", own_forward),
    "helper of attention": (sdpa_attention, "repeat_kv", own_forward),
    "function of PyTorch": (torch.nn.functional, "scaled_dot_product_attention", own_forward),
    "operation of PyTorch": (torch, "matmul", own_forward),
    "helper of losses": (losses, "_token_mean", own_forward),
    "helper of masks": (masking_utils, "prepare_padding_mask", own_forward),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_whatever_replaces_a_packages_own_is_found(monkeypatch, name):
    """Also what is no plain function, and in files whose functions models share."""
    where, attribute, value = REPLACEMENTS[name]
    monkeypatch.setattr(where, attribute, value)
    assert "tests.ghost.test_known_code" in foreign(llama())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_function_in_a_package_is_found(monkeypatch):
    """The same function as before, which torch.jit compiled."""
    monkeypatch.setattr(modeling_llama, "rotate_half", torch.jit.script(modeling_llama.rotate_half))
    assert "torch.jit" in foreign(llama())


def test_the_files_and_tables_that_are_looked_at_exist():
    """One that moves in a later version of PyTorch or transformers would be passed over."""
    for name in known_code._FILES:
        importlib.import_module(name)
    for name, table in known_code._TABLES:
        assert len(getattr(importlib.import_module(name), table)) > 0
    assert all(hasattr(nn.modules.module, name) for name in known_code._GLOBAL_HOOKS)


def test_torch_compile_elsewhere_in_the_process_is_no_code_of_the_model():
    """It wraps two methods of all modules for good."""
    assert float(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(()))) == 2
    assert foreign(llama()) is None


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_full_backward_pre_hook])
def test_a_hook_on_all_modules_is_found(register):
    """After their forward pass, or before their backward pass."""
    handle = register(hook)
    try:
        assert "hook" in foreign(llama())
    finally:
        handle.remove()  # it is of the process
    assert foreign(llama()) is None


def test_a_hook_on_saved_tensors_is_found():
    """One of a user's own; PyTorch's, which moves them to the CPU, is known."""
    assert not known_code.foreign_modes()
    with torch.autograd.graph.saved_tensors_hooks(own_forward, own_forward):
        assert known_code.foreign_modes()
    with torch.autograd.graph.save_on_cpu():
        assert not known_code.foreign_modes()


def test_hooks_of_saving_are_no_code_of_a_pass():
    """They run when a model is saved or loaded."""
    model = llama()
    model.register_state_dict_post_hook(own_forward)
    model.register_load_state_dict_pre_hook(own_forward)
    assert foreign(model) is None


class Raises:
    def __getattr__(self, name):
        raise RuntimeError(name)

    @property
    def __dict__(self):
        raise RuntimeError("no attributes")

    @property
    def __class__(self):
        raise RuntimeError("no class")

    def __call__(self):
        raise RuntimeError


def test_odd_objects_do_not_end_the_search():
    """Containers that hold themselves or thousands of others, classes without a module, objects that raise."""
    model, around, named = llama(), [], {}
    around.append(around)
    named["self"] = named
    model.model.norm.more = [around, named, functools.reduce(lambda inner, _: [inner], range(5000), 1), transformers]
    assert foreign(model) is None
    for odd in (Raises(), type("Odd", (), {"__module__": None})(), type("Odd", (), {"__module__": 7})()):
        model.model.norm.more = [odd]
        assert isinstance(foreign(model), str)
    model.model.norm.more = [types.FunctionType(own_forward.__code__, {})]
    assert "own_forward" in foreign(model)


FILES = "bert bloom distilbert falcon gemma3 gpt2 gpt_neox mamba modernbert mixtral opt phi3 qwen3 reformer roberta t5"


@pytest.mark.parametrize("name", FILES.split())
def test_models_of_transformers_have_no_other_code(name):
    """Every class of a model's file, without making the model."""
    file = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    classes = [one for one in vars(file).values() if isinstance(one, type) and one.__module__ == file.__name__]
    assert classes and list(known_code._Search().of(classes)) == []


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
    assert "OwnLoss" in foreign(None, OwnLoss)
    assert "OwnFunction" in foreign(None, functools.partial(dpllm.per_sequence_loss, OwnFunction.apply))
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
    loss_of = functools.partial(RowLosses(default_row_loss(model), packed=False), model)

    def run():
        for number in range(8):
            clipper.run(loss_of, rows_of(number) | {"labels": rows_of(number)["input_ids"]}, torch.arange(2))
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
    loss_of = functools.partial(RowLosses(default_row_loss(model), packed=False), model)
    for mode, recorded in ((Seen(), 0), (torch.device("cpu"), 1)):
        with mode:
            for number in range(8):
                clipper.run(loss_of, rows_of(number) | {"labels": rows_of(number)["input_ids"]}, torch.arange(2))
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
    loss_of = functools.partial(RowLosses(default_row_loss(model), packed=False), model)

    def norms(number):
        _, result = clipper.run(loss_of, rows_of(number) | {"labels": rows_of(number)["input_ids"]}, torch.arange(2))
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


def attach(model):
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    loss_of = functools.partial(RowLosses(default_row_loss(model), packed=False), model)

    def run(times=8, tokens=6):
        for number in range(times):
            batch = rows_of(number, tokens)
            clipper.run(loss_of, batch | {"labels": batch["input_ids"]}, torch.arange(2))
        return clipper.replays

    return run


def test_a_class_that_is_changed_later_is_seen_before_a_pass_is_recorded(monkeypatch, caplog):
    """No attribute of the model changes: only passes over rows of another length would be recorded with it."""
    run = attach(llama())
    assert run() == 1
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: x)
    with caplog.at_level("WARNING"):
        assert run(tokens=7) == 0
    assert "lambda" in caplog.text


CHANGED = {
    "config": lambda model: setattr(model.config, "of_ones_own", 2.0),
    "another config": lambda model: setattr(model, "config", tiny_llama_config()),
    "list": lambda model: model.lm_head.factors.append(2.0),
    "number that becomes an array": lambda model: setattr(model.lm_head, "share", torch.ones(3)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_numbers_elsewhere_that_change_are_seen_at_once(name):
    """In the config, which a model may read in each pass, and in lists."""
    model = llama()
    model.config.of_ones_own, model.lm_head.factors, model.lm_head.share = 1.0, [1.0], 0.5
    run = attach(model)
    assert run() == 1
    CHANGED[name](model)
    assert run(1) == 0 and run() == 1


def test_numbers_that_change_with_each_pass_end_the_recordings(caplog):
    """Otherwise each pass would be recorded anew, at twice the time."""
    model = llama()
    clipper = GhostClipper(model, 0.5, NormMethod(replay=True))
    loss_of = functools.partial(RowLosses(default_row_loss(model), packed=False), model)
    with caplog.at_level("WARNING"):
        for number in range(80):
            model.lm_head.calls = number
            clipper.run(loss_of, rows_of(0) | {"labels": rows_of(0)["input_ids"]}, torch.arange(2))
    assert clipper.replays == 0
    assert len([one for one in caplog.records if "attributes of its modules change" in one.message]) == 1
