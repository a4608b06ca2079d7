"""Writes that raise no version counter are seen, wherever they come between two updates, and closures and replaced
parameters are refused: nothing but the noisy gradient reaches the weights."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from dpllm.training.checks.watch import WatchError
from dpllm.training.checks.written import Written
from tests.conftest import tiny_llama_config
from tests.training.checks.test_watch import FromStep, run_of, take
from tests.training.test_run import loss_of, network
from tests.training.test_trainer import arguments, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

PAST = "was written between two updates past PyTorch's version counters"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (1024,), (2050, 3), (1 << 10, 1 << 11)])
@pytest.mark.parametrize("place", [0, -1])
def test_one_changed_number_is_seen_and_equal_ones_are_not(dtype, shape, place):
    """At either end of a tensor of any size, in company of others."""
    tensors = [torch.ones(3), torch.ones(shape).to(dtype), torch.zeros(5, 5).t()]
    written = Written()
    written.take(tensors)
    written.compare([one.clone() for one in tensors])
    assert not written.found()
    flat = tensors[1].data.view(-1)
    flat[place] = 1 - flat[place] if dtype != torch.bool else ~flat[place]
    written.compare(tensors)
    flat[place] = 1
    written.compare(tensors)
    assert written.found(), "the flag stays"


def test_numbers_that_change_their_places_are_seen():
    """Within a tensor, and between tensors."""
    for first, second in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 0), (0, 4000)), ((0, 1500), (0, 1501))]:
        tensors = [torch.arange(5000.0), torch.arange(9.0) + 7]
        written = Written()
        written.take(tensors)
        (a, i), (b, j) = first, second
        tensors[a].data[i], tensors[b].data[j] = tensors[b][j].clone(), tensors[a][i].clone()
        written.compare(tensors)
        assert written.found(), (first, second)


@pytest.mark.parametrize("width", [2048, 4096])
def test_rows_that_change_their_places_are_seen(width):
    """The embeddings of two tokens: every column of a matrix keeps its sum."""
    table, written = torch.arange(70.0 * width).view(70, width), Written()
    written.take([table])
    table.data[[3, 20]] = table[[20, 3]].clone()
    written.compare([table])
    assert written.found()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [2, 9, 4096])
def test_signs_that_flip_are_seen(dtype, count):
    """Two flipped highest bits of 64 would cancel modulo 2^64."""
    tensor, written = torch.linspace(0.5, 1.5, count, dtype=dtype), Written()
    written.take([tensor])
    tensor.data.neg_()
    written.compare([tensor])
    assert written.found()


@pytest.mark.parametrize("step", [0, 1, 2, 4])
def test_a_write_through_data_between_two_steps_is_refused(step, tmp_path):
    """In the step after it, also where that is none of the steps 1, 2, 4, 8."""
    model = network()
    run, optimizer = run_of(tmp_path, model, num_steps=8)
    take(run, optimizer, step)
    model[0].weight.data[0, 0] += 1e-6
    with pytest.raises(WatchError, match=PAST):
        take(run, optimizer)


def test_a_write_through_data_in_the_forward_pass_is_refused_before_the_update(tmp_path):
    """By the model, the loss or the collator."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, 2)
    before = model[2].weight.clone()

    def writing(module, inputs):
        module[0].weight.data[0, 0] += 1e-3 * float(inputs["rows"].mean())
        return loss_of(module, inputs)

    with pytest.raises(WatchError, match=PAST):
        take(run, optimizer, 1, writing)
    assert torch.equal(before, model[2].weight)


def test_a_write_through_data_after_the_last_update_is_found_at_the_end(tmp_path):
    """The write is found before the run counts as finished."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, 4)
    model[2].bias.data += 1e-6
    with pytest.raises(WatchError, match=PAST):
        run.finish()


@pytest.mark.parametrize("step", [1, 3])
def test_a_gradient_that_is_written_through_data_is_refused(step, tmp_path):
    """`p.grad.data` has no counter; the guard of the first update finds more."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, step)
    run.step(run.choose(np.arange(8)), loss_of)
    model[0].weight.grad.data.add_(1)
    with pytest.raises(WatchError, match=r"through \.grad\.data"):
        optimizer.step()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_of_the_optimizer_is_refused(by_name, tmp_path):
    """It runs after the gradients were compared and before they are used."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    before = model[0].weight.clone()

    def closure():
        model[0].weight.grad.add_(100)
        return torch.zeros(())

    run.step(run.choose(np.arange(8)), loss_of)
    with pytest.raises(WatchError, match=r"optimizer\.step\(\) was called with a closure"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert torch.equal(before, model[0].weight)


def test_a_parameter_that_takes_anothers_place_is_refused(tmp_path):
    """The optimizer trains the old one, and the new one would be saved."""
    model = network()
    run, optimizer = run_of(tmp_path, model)
    take(run, optimizer, 4)
    model[2] = nn.Linear(10, 1)
    with pytest.raises(WatchError, match=r"2\.bias is another parameter than when the run was attached"):
        run.finish()


def test_a_head_that_is_replaced_at_the_end_of_training_is_refused(tmp_path):
    """Fitted by a callback to the rows, for instance."""

    def act(model):
        model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)

    model = LlamaForCausalLM(tiny_llama_config())
    run = trainer(tmp_path, model, callbacks=[FromStep("on_train_end", 4, act)], args=arguments(tmp_path))
    with pytest.raises(WatchError, match=r"lm_head\.weight is another parameter"):
        run.train()
