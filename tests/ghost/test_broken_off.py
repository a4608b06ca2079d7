"""A pass that an error or Ctrl-C breaks off, caught by a loop that goes on, such as the next cell of a notebook."""

import itertools

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, GhostError
from tests.scarce import BreaksOff, Interrupted


class Net(nn.Module):
    """Features of 4 to one number for each token; rows may be laid end to end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Interrupted(4, 5), nn.Linear(5, 1)

    def forward(self, x, cu_seq_lens_q=None):
        return self.last(torch.tanh(self.first(x)))


def losses(model, x, lengths):
    y = model(x, cu_seq_lens_q=torch.tensor([0, *lengths]).cumsum(0))
    return torch.stack([row.square().sum() for row in y[0, :, 0].split(lengths)])


def gradients(model, x, lengths):
    """Of each row, by autograd."""
    parameters = list(model.parameters())
    return torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(losses(model, x, lengths)[row], parameters)])
            for row in range(len(lengths))
        ]
    )


def flat(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("warm", [0, 3])
def test_the_call_after_one_that_ctrl_c_broke_off_begins_again(warm):
    """It had the lengths of the packed rows of the call before, and a unit entered the sum with 5.8 C."""
    model, x = Net(), torch.randn(1, 12, 4, generator=torch.Generator().manual_seed(1))
    rows, clipper = gradients(model, x, [1, 8, 2, 1]), GhostClipper(model, 1.0)
    for _ in range(warm):
        clipper.backward(losses(model, x, [4, 4, 4]))
        model.zero_grad()
    model.first.pressed = True
    with pytest.raises(KeyboardInterrupt):
        losses(model, x, [3, 3, 3, 3])
    model.first.pressed = False
    result = clipper.backward(losses(model, x, [1, 8, 2, 1]))
    torch.testing.assert_close(result.norms, rows.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(flat(model), result.factors @ rows, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("passes", [0, 1, 2])  # the first call is watched, the third is not
def test_gradients_can_be_set_to_zero_after_ctrl_c(passes):
    """The watch of functions hid them from ``zero_grad()``, and the units of a step begun again entered it twice."""
    model, x = Net(), torch.randn(3, 4)
    clipper, optimizer = GhostClipper(model, 1.0), torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(passes):
        clipper.backward(model(x).square()[:, 0])
    model.first.pressed = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.zero_grad()
    clipper.remove()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), KeyboardInterrupt()], ids=repr)
def test_a_sum_that_was_added_in_part_is_not_added_again(error):
    """Whichever operation it broke off at: the second attempt is exact, or an error until ``.grad`` is empty."""
    model, x, refused = nn.Sequential(Net(), nn.Linear(1, 2)), torch.randn(3, 2, 4, generator=torch.manual_seed(1)), 0
    clipper = GhostClipper(model, 0.1)

    def backward():
        clipper.backward(model(x).square().sum((1, 2)))

    backward()
    expected = flat(model)
    for number in itertools.count(1):
        model.zero_grad(set_to_none=False)  # a new sum may become .grad at once
        with BreaksOff(number, error) as broken:
            try:
                backward()
            except type(error):
                pass
        if broken.at is None:
            break
        try:
            backward()
        except GhostError as found:
            assert "while it added its sum" in str(found) and "zero_grad" in str(found)
            refused += 1
            model.zero_grad()
            backward()
        torch.testing.assert_close(flat(model), expected)
    assert number > 50 and refused > 3


def test_models_that_share_a_parameter_are_clipped_apart():
    """The clipper of one does not take the gradients of the other."""
    one, other, x = Net(), Net(), torch.randn(3, 4)
    other.last.weight = one.last.weight
    clipper, twin = GhostClipper(one, 1.0), GhostClipper(other, 1.0)
    with pytest.raises(GhostError):
        clipper.backward(one(x).square()[:, 0] + other(x).square()[:, 0])
    clipper.forget()
    twin.forget()
    clipper.backward(one(x).square()[:, 0])
    first = one.last.weight.grad.clone()
    twin.backward(other(x).square()[:, 0])
    assert not torch.equal(one.last.weight.grad, first)  # both add to it
