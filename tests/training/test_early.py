"""Gradients that are finished within the backward pass: the same sum, each entry's noise once, nothing after a failure.

The expected sums come from a float64 loop of autograd over single units. The noise is a different constant for each
call of its source, so that each parameter shows which call it got.
"""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from dpllm import GhostClipper, NormMethod, PrivacyConfig, make_plan
from dpllm.engines import SingleProcess
from dpllm.engines.base import EarlyGradients
from dpllm.engines.ddp import DataParallel
from dpllm.engines.guard import EngineError, UpdateError
from dpllm.ghost.sums import Sum
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentStream
from dpllm.privacy.ledger import Ledger
from dpllm.training.step import Release, private_step
from tests.conftest import tiny_llama_config
from tests.ghost.test_group_wise import always
from tests.mechanism.test_per_layer import model_of, named_layers, trainable
from tests.mutations import kills
from tests.scarce import BreaksOff, Gate
from tests.training.test_step import Rows, loss_of

N, B, C = 40, 4, 0.5
METHODS = {"groups": (1, "per-layer"), "two passes": (2, "flat")}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    always(monkeypatch)


class Calls:
    """A source of noise: its k-th call gives every entry k times the deviation."""

    def __init__(self):
        self.count = 0

    def add_(self, grad, noise_stddev):
        self.count += 1
        grad.add_(self.count * noise_stddev)

    def normal_like(self, total):
        raise AssertionError("independent noise is added")


class Watched(EarlyGradients):
    """Counts finished gradients."""

    count = 0

    def finish(self, *args):
        super().finish(*args)
        self.count += 1


class Stepping:
    """Private steps of one microbatch, on a new model."""

    def __init__(self, folder, method="groups", model=None, noise_multiplier=0.0):
        passes, kind = METHODS[method]
        self.model = model_of("untied") if model is None else model
        privacy = {"noise_multiplier": noise_multiplier, "clip_norm": C, "expected_batch_size": B, "clipping": kind}
        self.plan = make_plan(PrivacyConfig(**privacy), N, 5)
        self.ledger = Ledger.create(folder / "ledger.jsonl", self.plan)
        self.parameters = trainable(self.model)
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.0)
        self.engine = SingleProcess(self.optimizer)
        self.engine.early = Watched(self.engine._gradient, self.engine.guard)
        self.clipper = GhostClipper(
            self.model, clipping=self.plan.mechanism.clipping, norm_method=NormMethod(backward_passes=passes)
        )
        self.calls = Calls()
        self.noise = IndependentStream(self.calls)

    def take(self, units, max_rows=8):
        """Return the counts of a step, and its gradients times b."""
        self.optimizer.zero_grad()
        batch, loss = Rows().batches(units, max_rows), loss_of(self.model)
        done = private_step(self.clipper, batch, loss, self.plan, self.engine, self.ledger, self.noise)
        return done, {name: p.grad * B for name, p in self.parameters.items()}


def clipped_in_a_loop(model, units, layers):
    """The sum over units of their gradients, each layer scaled to a norm of at most C / √G."""
    parameters = trainable(model)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for unit in units:
        (microbatch,) = Rows().batches([unit])
        loss = loss_of(model)(microbatch.inputs).sum()
        grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        for layer in layers:
            norm = float(torch.cat([grads[name].flatten() for name in layer]).norm())
            for name in layer:
                total[name] += min(1.0, C / len(layers) ** 0.5 / norm) * grads[name]
    return total


def layers_of(method, kind, model):
    names = list(trainable(model))
    return named_layers(kind, names) if method == "groups" else [names]


def assert_same(found, expected):
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["untied", "tied", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_the_gradients_are_those_of_a_loop_over_single_units(tmp_path, method, kind):
    """In the first step, which the guard checks, and in the second; of a tied layer, what is left until the end."""
    model, units = model_of(kind), [3, 8, 21]
    expected = clipped_in_a_loop(model, units, layers_of(method, kind, model))
    run = Stepping(tmp_path, method, model)
    for number in range(2):
        _, found = run.take(units)
        assert_same(found, expected)
        assert run.engine.guard.done == (number == 1)
        run.optimizer.step()
    late = kind == "tied"  # its one parameter of two uses
    assert run.engine.early.count == 2 * (len(run.parameters) - late)


@kills(
    "a gradient that is finished in the backward pass gets no noise",
    "dpllm/training/step.py",
    "        self._last = True\n        return",
    "        return",
)
def test_an_empty_step_is_noise(tmp_path):
    """A step without units has a microbatch of padding."""
    run = Stepping(tmp_path, noise_multiplier=1.0)
    _, found = run.take([])
    assert run.engine.early.count == len(found)
    assert sorted(round(float(g.mean() / C)) for g in found.values()) == list(range(1, len(found) + 1))


def noise_in(found, clipped):
    """Return the calls of the source whose noise the gradients have."""
    numbers = []
    for name, gradient in found.items():
        noise = (gradient - clipped[name]) / C
        number = round(float(noise.mean()))
        torch.testing.assert_close(noise, torch.full_like(noise, number), rtol=1e-6, atol=1e-6)
        numbers.append(number)
    return numbers


@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("method", METHODS)
def test_each_entry_gets_the_noise_of_one_call(tmp_path, method, kind):
    """Of a call that no other parameter and no other step got, whether its gradient is finished early or late."""
    model, units = model_of(kind), [3, 8]
    clipped = clipped_in_a_loop(model, units, layers_of(method, kind, model))
    run = Stepping(tmp_path, method, model, noise_multiplier=1.0)
    for number in range(2):
        _, found = run.take(units)
        first = number * len(found)
        assert sorted(noise_in(found, clipped)) == list(range(first + 1, first + len(found) + 1))
        run.engine.guard.done = True


def scarce(run, tokens, when):
    """Let memory run out once in a backward pass of more tokens, in front of the first block."""
    refused = []

    def refuse(direction, passing):
        if direction == "backward" and passing > tokens and when() and not refused:
            refused.append(run.engine.early.count)
            return True
        return False

    run.model.model.embed_tokens.register_forward_hook(lambda module, args, output: gate(output))
    gate = Gate(refuse)
    return refused


@kills(
    "gradients of a pass that ran out of memory are kept",
    "dpllm/training/step.py",
    "                release.drop()\n",
    "",
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_checked", [True, False], ids=["first step", "later step"])
def test_after_memory_ran_out_each_unit_and_each_noise_is_there_once(tmp_path, is_checked, method):
    """The gradients finished before are dropped with their noise; the halves are summed up as any two microbatches."""
    model, units = model_of("untied"), [3, 8, 21, 30]
    clipped = clipped_in_a_loop(model, units, layers_of(method, "untied", model))
    run = Stepping(tmp_path, method, model, noise_multiplier=1.0)
    run.engine.guard.done = not is_checked
    run.clipper._checked.rows = True
    refused = scarce(run, 20, lambda: run.engine.early.count > 0)
    done, found = run.take(units)
    assert refused and 0 < refused[0] < len(found) and done.num_divided == 1 and done.num_units == 4
    assert sorted(noise_in(found, clipped)) == list(range(refused[0] + 1, refused[0] + len(found) + 1))
    assert run.engine.early.count == refused[0], "halves are collected late"


def test_a_pass_that_fails_otherwise_leaves_no_gradient(tmp_path):
    """And the engine takes no other step."""
    run = Stepping(tmp_path, noise_multiplier=1.0)

    def fail(grad):
        if run.engine.early.count > 0:  # not in the passes that compare the taps before
            raise RuntimeError("a fault")

    run.model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: output.requires_grad_().register_hook(fail) and None
    )
    run.clipper._checked.rows = True
    with pytest.raises(RuntimeError, match="a fault"):
        run.take([3, 8])
    assert all(p.grad is None for p in run.parameters.values())
    with pytest.raises(ValueError, match="half-way"):
        run.take([3, 8])


@pytest.mark.parametrize("runs_out", [False, True])
@pytest.mark.parametrize("tampered", [False, True])
def test_the_guard_checks_them_in_the_first_step(tmp_path, tampered, runs_out):
    """In the dtype of the model: sums handed in early are compared with the optimizer's gradients, dropped ones not."""
    run = Stepping(tmp_path, model=LlamaForCausalLM(tiny_llama_config()).bfloat16(), noise_multiplier=1.0)
    run.noise = IndependentStream(NoiseSource(1))
    run.clipper._checked.rows = True
    refused = scarce(run, 20, lambda: runs_out and run.engine.early.count > 0)
    run.take([3, 8, 21, 30])
    assert bool(refused) == runs_out and 0 < run.engine.early.count <= len(run.parameters)
    if not tampered:
        run.optimizer.step()
        assert run.engine.guard.done
        return
    for parameter in run.parameters.values():
        parameter.grad.mul_(0.5)
    with pytest.raises(UpdateError, match="private sum"):
        run.optimizer.step()


@pytest.mark.parametrize("method", METHODS)
def test_memory_may_run_out_while_the_first_gradient_is_made(tmp_path, method):
    """The guard of the first step forgets the sum that was handed in for it: the step is the private one."""
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = Stepping(folder, method, noise_multiplier=1.0)
        run.noise = IndependentStream(NoiseSource(1))
        run.clipper._checked.rows = True
        with BreaksOff(number, torch.OutOfMemoryError("none left"), within="finish") as broken:
            done, _ = run.take([3, 8, 21, 30])
        if run.engine.early.count or broken.at is None:  # the first one was made
            break
        run.optimizer.step()
        assert run.engine.guard.done and done.num_divided == 1 and done.num_units == 4
    assert number > 5


@pytest.mark.parametrize("method", METHODS)
def test_one_sum_in_float32_exists_at_a_time(tmp_path, method):
    """Of a bfloat16 model: the rest are gradients of 2 bytes an entry."""
    run = Stepping(tmp_path, method, LlamaForCausalLM(tiny_llama_config()).bfloat16(), noise_multiplier=1.0)
    run.engine.guard.done = True
    refs, alive = [], []

    class Watching(Calls):
        def add_(self, grad, noise_stddev):
            super().add_(grad, noise_stddev)
            assert grad.dtype == torch.float32
            gc.collect()
            refs.append(weakref.ref(grad.untyped_storage()))
            alive.append(sum(ref() is not None for ref in refs))

    run.noise = IndependentStream(Watching())
    run.take([3, 8])
    assert run.engine.early.count == len(alive) == len(run.parameters) and set(alive) == {1}
    assert {p.grad.dtype for p in run.parameters.values()} == {torch.bfloat16}


class Another(IndependentStream):
    """A stream that is not known to be independent."""


@pytest.mark.parametrize("case", ["several microbatches", "another stream", "another engine", "rows that continue"])
def test_other_steps_finish_their_gradients_after_the_pass(tmp_path, case):
    """The sums of earlier microbatches could not be restored, and correlated noise can be drawn once only."""
    model, units = model_of("untied"), [3, 8, 21, 30]
    clipped = clipped_in_a_loop(model, units, layers_of("groups", "untied", model))
    run = Stepping(tmp_path, model=model)
    if case == "another stream":
        run.noise = Another(run.calls)
    if case == "another engine":
        run.engine.early, early = None, run.engine.early
        assert DataParallel(run.optimizer).early is None
    if case == "rows that continue":
        (microbatch,) = Rows().batches(units[:1])
        microbatch = microbatch.__class__(**{**vars(microbatch), "continues": True})
        release = Release(run.clipper, run.plan, run.engine, run.noise, 0)
        assert release.finish_early(microbatch, last=True) is None
        return
    _, found = run.take(units, max_rows=2 if case == "several microbatches" else 8)
    assert_same(found, clipped)
    assert (early if case == "another engine" else run.engine.early).count == 0


def test_a_second_release_of_a_parameter_is_refused():
    """Finished twice; or beside sums of other microbatches."""
    parameter = nn.Parameter(torch.zeros(3))
    engine = SingleProcess(torch.optim.SGD([parameter], lr=0.1))

    def add_to(parameter, total):
        total.add_(torch.ones(3))

    engine.early.finish(parameter, add_to, 0.5)
    with pytest.raises(EngineError, match="finished twice"):
        engine.early.finish(parameter, add_to, 0.5)
    with pytest.raises(EngineError, match="another microbatch"):
        engine.collect({"p": parameter}, add_to, last=False, scale=0.5)
    engine._sums[parameter] = Sum.of(parameter)
    with pytest.raises(EngineError, match="another microbatch"):
        engine.collect({"p": parameter}, add_to, last=True, scale=0.5)
    assert parameter.grad is None
    engine._sums.clear()
    engine.collect({"p": parameter}, add_to, last=True, scale=0.5)
    assert np.allclose(parameter.grad, 0.5) and engine.early.take(parameter) is None
