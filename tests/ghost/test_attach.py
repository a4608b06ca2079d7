"""Attaching leaves the model as it was for everybody else: classes, names, copies, hooks, errors, and removal."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from dpllm import GhostClipper, GhostError, per_sequence_loss
from tests.conftest import tiny_llama_config
from tests.ghost import loop
from tests.ghost.loop import flat, perturbed, row_gradients
from tests.mutations import kills
from tests.scarce import Gate, Interrupted, more_than


class Scale(nn.Module):
    """Runs row by row because of its first parameter, and has a product with the second."""

    def __init__(self):
        super().__init__()
        self.shift, self.mix = nn.Parameter(torch.rand(2, 4)), nn.Parameter(torch.rand(4, 4))

    def forward(self, h):
        return F.linear(h + self.shift[0], self.mix) * self.shift[1].exp()


class Net(nn.Module):
    """Tokens to one number each; ``change`` is applied to the features between the layers."""

    def __init__(self, change=None):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.scale = nn.Embedding(11, 4), nn.LayerNorm(4), Scale()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)
        self.change = change

    def forward(self, ids):
        h = self.scale(torch.tanh(self.norm(self.table(ids))))
        h = self.first(h) if self.change is None else self.change(self.first, h)
        return self.last(torch.tanh(h))


IDS = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(1))


def losses(model, ids=IDS):
    return model(ids).square().sum((1, 2))


def warmed(call, model=None):
    """A model whose next call is the given one, and its clipper."""
    model = (model or Net()).double()
    clipper = GhostClipper(model, 0.05)
    for _ in range(1, call):
        clipper.backward(losses(model))
        model.zero_grad()
    return model, clipper


def assert_is_the_loop(model, clipper, change):
    """Norms and sum are those of autograd on another model that was changed in the same way."""
    other = Net().double()
    change(other)
    parameters = list(other.parameters())
    rows = torch.stack(
        [flat(torch.autograd.grad(losses(other, row[None]).sum(), parameters), parameters) for row in IDS]
    )
    result = clipper.backward(losses(model))
    torch.testing.assert_close(result.norms.double(), rows.norm(dim=1), rtol=1e-6, atol=0)
    found = flat([p.grad for p in model.parameters()], parameters)
    torch.testing.assert_close(found, result.factors.double() @ rows, rtol=1e-5, atol=1e-9)


def classes(model):
    return [type(module) for module in model.modules()]


@kills(
    "a tapped class has a name of its own",
    "dpllm/ghost/taps.py",
    '"__module__": home, ',
    "",
)
def test_classes_keep_their_names_and_come_back():
    """Libraries go by names: wrap policies, ``_no_split_modules``, ``architectures``."""
    model = Net()
    before, keys = classes(model), list(model.state_dict())
    model, clipper = warmed(1, model)
    assert classes(model) == before
    for _ in range(2):
        clipper.backward(losses(model))
        for module, kind in zip(model.modules(), before, strict=True):
            assert isinstance(module, kind)
            assert type(module).__name__ == kind.__name__ and type(module).__qualname__ == kind.__qualname__
            assert repr(module).startswith(kind.__name__)
            # The compiler treats classes of PyTorch's own modules in another way.
            assert type(module).__module__ == kind.__module__ or kind.__module__.startswith("torch.")
        assert list(model.state_dict()) == keys
    clipper.remove()
    assert classes(model) == before
    assert not any(name.startswith("_tap") for module in model.modules() for name in vars(module))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


@kills(
    "parameters change their order beside copies of rows",
    "dpllm/ghost/attach.py",
    "                module._parameters[name] = copy[row]  # type: ignore[assignment]\n",
    "                del module._parameters[name]\n                module.__dict__[name] = copy[row]\n",
)
def test_parameters_keep_their_order():
    """Optimizers and their checkpoints go by it; a part of them is replaced while it runs row by row."""
    model, clipper = warmed(1)
    names, ids = [name for name, _ in model.named_parameters()], [id(p) for p in model.parameters()]
    for _ in range(2):
        clipper.backward(losses(model))
        assert [name for name, _ in model.named_parameters()] == names
        assert [id(p) for p in model.parameters()] == ids
    clipper.remove()


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"dpllm" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": through_a_file,
}


@kills(
    "a copy of a tapped module is tapped",
    "dpllm/ghost/taps.py",
    '    while hasattr(kind, "_tap_kind"):\n        kind = kind._tap_kind\n',
    "    kind = type(module)\n",
)
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_attached_model_is_an_ordinary_model(how, calls):
    """It trains by autograd, and can have a clipper of its own; the model keeps its clipper."""
    if how == "deepcopy":
        model, clipper = warmed(calls + 1)
        expected = losses(model).detach()
    else:  # classes of this module can be pickled, and the file may name them
        model = LlamaForCausalLM(tiny_llama_config())
        clipper = GhostClipper(model, 0.05)
        for _ in range(calls):
            clipper.backward(llama_losses(model))
            model.zero_grad()
        expected = llama_losses(model).detach()
    loss_of = losses if how == "deepcopy" else llama_losses
    other = COPIES[how](model)
    assert classes(other) == original(model)
    torch.testing.assert_close(loss_of(other), expected)
    loss_of(other).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    other.zero_grad()
    own = GhostClipper(other, 0.05)
    norms = own.backward(loss_of(other)).norms
    torch.testing.assert_close(clipper.backward(loss_of(model)).norms, norms)
    clipper.remove()
    own.remove()


def original(model):
    """The classes that the modules have without a clipper."""
    other = Net() if isinstance(model, Net) else LlamaForCausalLM(tiny_llama_config())
    return classes(other)


TOKENS = torch.randint(3, 61, (3, 6), generator=torch.Generator().manual_seed(1))


def llama_losses(model):
    return per_sequence_loss(model(input_ids=TOKENS).logits, TOKENS)


def test_an_own_forward_of_a_module_is_in_its_copies():
    """As accelerate puts one on modules that it moves."""
    model = Net().double()
    another_forward("scale", model)
    clipper = GhostClipper(model, 0.05)
    clipper.backward(losses(model))
    expected = losses(model).detach()
    other = copy.deepcopy(model)
    clipper.remove()
    torch.testing.assert_close(losses(other), expected)
    losses(other).sum().backward()
    assert all(p.grad is not None for p in other.parameters())


class Failing(nn.Module):
    """Raises in its last calls."""

    def __init__(self, number, error):
        super().__init__()
        self.left, self.error = number, error

    def forward(self, h):
        self.left -= 1
        if self.left <= 0:
            raise self.error("the module failed")
        return h


@kills(
    "an exception in the first call leaves classes swapped",
    "dpllm/ghost/weights_check.py",
    "            tapped.ladder.detach()  # and the next call settles again\n",
    "",
    case="3-OutOfMemoryError",
)
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_exception_in_the_first_call_restores_every_class(number, error):
    """Whichever of its passes it ends; then the call can be repeated, or the clipper removed."""
    model = Net(lambda layer, h: failing(layer(h)))
    failing, before = Failing(number, error), classes(model)
    clipper = GhostClipper(model, 0.05)
    with pytest.raises((RuntimeError, GhostError), match="the module failed"):
        losses(model)
    assert classes(model) == before
    assert all(p.grad is None for p in model.parameters())
    failing.left = 100
    assert clipper.backward(losses(model)).norms.shape == (4,)
    clipper.remove()
    assert classes(model) == before


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize("end", ["forget", "remove"])
def test_a_call_that_ctrl_c_broke_off_is_ended(end, passes):
    """PyTorch runs no hooks then; the next call begins again, and is the loop."""

    class Pressed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(3, 4), Interrupted(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.last(self.middle(self.first(x)))[:, 0] ** 2

    def of(model, batch):
        return model(batch["x"])

    model, batch = perturbed(Pressed()), {"x": torch.randn(5, 3).double()}
    clipper = GhostClipper(model, 0.5)
    for _ in range(passes):
        clipper.backward(of(model, batch))
    model.middle.pressed = True
    with pytest.raises(KeyboardInterrupt):
        of(model, batch)
    model.middle.pressed = False
    model.zero_grad()
    getattr(clipper, end)()
    assert not torch.overrides._get_current_function_mode_stack()
    if end == "remove":
        loop.assert_is_the_loop(model, of, batch)
        return
    result = clipper.backward(of(model, batch))
    clipper.remove()
    parameters = list(model.parameters())
    found, rows = flat([p.grad for p in parameters], parameters), row_gradients(model, of, batch)
    torch.testing.assert_close(result.norms.double(), rows.norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, result.factors.double() @ rows, rtol=1e-4, atol=1e-6)


def test_remove_leaves_the_model_as_it_was():
    """Ordinary training gives the gradients that it gave before."""
    model = Net().double()
    losses(model).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    clipper = GhostClipper(model, 0.5)
    clipper.backward(losses(model))
    clipper.remove()
    model.zero_grad()
    losses(model).sum().backward()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_model_that_is_refused_keeps_nothing():
    """It can then be clipped in another way: one unit at a time, or with parameters frozen."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(7, 4, max_norm=1.0))
    with pytest.raises(GhostError, match="max_norm"):
        GhostClipper(model, clip_norm=1.0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())
    model[0](torch.randn(2, 4)).sum().backward()


def test_evaluation_between_calls_changes_nothing():
    """generate() and evaluation under no_grad may run at any time, of the model and of its parts."""
    model, clipper = warmed(1)
    expected = clipper.backward(losses(model)).norms
    for _ in range(2):
        pending = losses(model)
        with torch.no_grad():
            value = losses(model.eval(), IDS[:2])
            model.train().first(torch.randn(2, 4).double())
        assert not value.requires_grad
        torch.testing.assert_close(clipper.backward(pending).norms, expected)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_second_clipper_of_a_model_is_named(calls):
    """As when the cell of a notebook that makes it runs again."""
    model, first = warmed(calls + 1)
    before = classes(Net())
    second = GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match=r"remove\(\)"):
        second.backward(losses(model))
    first.remove()
    second.backward(losses(model))
    assert all(p.grad is not None for p in model.parameters())
    second.remove()
    assert classes(model) == before


def test_a_clipper_of_a_part_of_the_model_is_named():
    """Its modules have taps already."""
    model, clipper = warmed(2)
    part = GhostClipper(model.first, 1.0)
    with pytest.raises(GhostError, match=r"remove\(\)"):
        part.backward(model.first(torch.randn(3, 4).double()).square().sum(1))
    part.remove()
    clipper.backward(losses(model))
    clipper.remove()
    assert classes(model) == classes(Net())


# ------------------------------------------------------------------------------------------------- memory and errors


@kills(
    "a model whose later comparison failed counts as settled",
    "dpllm/ghost/weights_check.py",
    "            self._layouts.clear()\n            self.flat.clear()\n            raise",
    "            raise",
)
def test_a_first_call_of_several_rows_that_runs_out_of_memory_is_settled_again():
    """After one of a single row, which fits."""
    torch.manual_seed(0)
    gate = Gate(more_than(4))
    model = nn.Sequential(nn.Linear(4, 8), gate, nn.Linear(8, 1)).double()
    clipper, x = GhostClipper(model, 0.1), torch.randn(3, 4, 4).double()

    def of(x):
        return model(x).square().sum((1, 2))

    one = clipper.backward(of(x[:1])).norms
    with pytest.raises(torch.OutOfMemoryError):
        of(x)
    clipper.forget()
    torch.testing.assert_close(clipper.backward(of(x[:1])).norms, one)
    gate.refuse = more_than(100)
    torch.testing.assert_close(clipper.backward(of(x)).norms[:1], one)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_runs_out_of_memory_leaves_nothing_behind(where):
    """No tensors, no ``.grad``; halves of the rows then give the sum of the whole."""
    torch.manual_seed(0)
    gate = Gate(lambda *_: False)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), gate, nn.Linear(8, 8), nn.Linear(8, 1)).double()
    x, clipper, kept = torch.randn(6, 3, 4).double(), GhostClipper(model, 0.1), []

    def of(x):
        y = model(x)
        kept.append(weakref.ref(y))
        return y.square().sum((1, 2))

    clipper.backward(of(x))
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    gate.refuse = more_than(9, where)
    gc.collect()
    before = tensors()
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            clipper.backward(of(x))
        clipper.forget()
        gc.collect()
        assert tensors() <= before and not any(ref() is not None for ref in kept)
        assert all(p.grad is None for p in model.parameters())
    for half in x.split(3):
        clipper.backward(of(half))
    for parameter, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total)
    clipper.remove()


def tensors():
    """How many tensors with several rows are in memory."""
    return sum(isinstance(found, torch.Tensor) and found.ndim == 3 for found in gc.get_objects())


def test_no_activation_outlives_its_pass():
    """Also under autocast, where casts are kept for other layers that read the same tensor."""
    model, seen = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 1)), []
    model[1].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    clipper = GhostClipper(model, 1.0)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss_B = model(torch.randn(3, 5, 4)).float().square().sum((1, 2))
        clipper.backward(loss_B)
        del loss_B
        gc.collect()
        assert seen and not any(ref() is not None for ref in seen)


# ---------------------------------------------------------------------------------------- hooks and forwards of others


def on_hook(model):
    model.first.register_forward_hook(lambda module, args, output: output * 2, prepend=True)


@pytest.mark.parametrize("call", [1, 3, 4])
def test_a_hook_that_was_registered_later_changes_the_output_behind_the_tap(call):
    """In front of ours, it changed the output before the gradient of it was taken for the module's own."""
    model, clipper = warmed(call)
    on_hook(model)
    assert_is_the_loop(model, clipper, on_hook)


def uses_before(model):
    model.first.register_forward_pre_hook(lambda module, args: (args[0] + module.weight.mean(0),))


def uses_after(model):
    model.first.register_forward_hook(lambda module, args, out: out + module.weight.sum(), prepend=True)


@pytest.mark.parametrize("change", [uses_before, uses_after])
def test_a_hook_may_use_a_parameter(change):
    """From the first call on; in a later one it is a use that was missed, and refused by name."""
    model, clipper = warmed(1)
    change(model)
    assert_is_the_loop(model, clipper, change)
    model, clipper = warmed(3)
    change(model)
    with pytest.raises(GhostError, match=r"first\.weight"):
        clipper.backward(losses(model))
    assert all(p.grad is None for p in model.parameters())


def twice(module, old, x):
    return 2 * old(x)


def another_forward(name, model):
    module = model.get_submodule(name)
    module.forward = functools.partial(twice, module, module.forward)


@pytest.mark.parametrize("name", ["first", "norm", "table", "scale"])
def test_a_forward_that_was_put_on_a_module_is_the_one_that_counts(name):
    """As accelerate puts one on modules that it moves; that of the class gave another gradient."""
    model = Net().double()
    another_forward(name, model)
    clipper = GhostClipper(model, 0.05)
    for _ in range(3):
        assert_is_the_loop(model, clipper, functools.partial(another_forward, name))
        model.zero_grad()
    clipper.remove()


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_forward_that_is_put_on_a_module_later_counts(call):
    """It calls the forward that was there, which is tapped from the first call on."""
    model, clipper = warmed(call)
    another_forward("first", model)
    assert_is_the_loop(model, clipper, functools.partial(another_forward, "first"))
    clipper.remove()
    losses(model).sum().backward()


def in_vmap(layer, h):
    return torch.func.vmap(layer)(h)


def in_grad(layer, h):
    return layer(h) + torch.func.grad(lambda x: layer(x).sum())(h).sum(-1, keepdim=True)


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("change", [in_vmap, in_grad])
def test_a_module_within_a_transform_is_refused_by_name(change, call):
    """It ended in an error of PyTorch about its own internals."""
    model, clipper = warmed(call)
    model.change = change
    with pytest.raises(GhostError, match=r"torch\.func"):
        losses(model)
    model.change = None
    assert_is_the_loop(model, clipper, lambda _: None)
