"""Attacks on replays: what a recording cannot see must not enter a contribution, and nothing differs from a pass."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.ghost import known_code
from dpllm.ghost.errors import GhostError
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.sums import Sum

_UNITS = torch.arange(4)


@pytest.fixture(autouse=True)
def code_of_tests_is_recorded(monkeypatch):
    """As if a known package did what these models and losses do: the first of two lines of defence is off."""
    monkeypatch.setattr(known_code, "_AROUND", known_code._AROUND | {"tests"})


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.shift = np.zeros(1)  # that a recording does not know

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)) + float(self.shift[0]))


def _rows(count, *shape):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


_X = _rows(20, 4, 4)


def _squares(model):
    return lambda batch: model(batch["x"]).square().sum(1)


def _clipped_sum(clipper, loss, inputs, units):
    """The clipped sum of a microbatch."""
    clipper.run(loss, inputs, units)
    sums = []
    for parameter in clipper.parameters.values():
        total = Sum.of(parameter)
        clipper.add_clipped_sum_(parameter, total)
        sums.append(total.filled().flatten().clone())
    return torch.cat(sums)


def _sums(replay, losses, inputs, module=_Net, before=lambda number, model: None, calls=14, replays=None):
    """The clipped sums of microbatches; ``losses`` and ``inputs`` make those of the model and of a call's number."""
    torch.manual_seed(0)
    model = module().double()
    loss = losses(model)
    clipper = GhostClipper(model, 0.5, NormMethod(replay=replay))
    try:
        found = []
        for number in range(calls):
            before(number, model)
            found.append(_clipped_sum(clipper, loss, inputs(number), _UNITS))
        if replay and replays is not None:
            replays += [one.replayed for one in clipper._replay._shapes.values()]
        return found
    finally:
        clipper.remove()


def _assert_exact(losses, inputs, **how):
    """Every clipped sum has the bits that it has without replay."""
    wanted, found = (_sums(replay, losses, inputs, **how) for replay in (False, True))
    for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert torch.equal(one, other), number


def test_passes_are_replayed_and_exact():
    """The harness of this file sees replays where nothing speaks against them."""
    replays = []
    _assert_exact(_squares, lambda number: {"x": _X[number]}, replays=replays)
    assert replays == [8]


@pytest.mark.parametrize("replay", [False, True])
def test_units_that_the_caller_changes_in_place(replay):
    """A clipper keeps no tensor of the caller's units: one that is filled anew for each microbatch gives the bound."""
    torch.manual_seed(0)
    model = nn.Linear(16, 32).double()
    large = torch.cat([100 * torch.ones(2, 16), 1e-3 * torch.ones(2, 16)]).double()
    rows = {"x": large[[0, 2, 1, 3]]}  # the units 0, 1, 0, 1: a large and a small one
    loss = _squares(model)
    clipper = GhostClipper(model, 0.5, NormMethod(replay=replay, algorithm="gram"))
    try:
        buffer = torch.tensor([0, 1, 0, 1])
        for _ in range(8):
            wanted = _clipped_sum(clipper, loss, rows, buffer)
        buffer.copy_(torch.tensor([1, 0, 1, 0]))
        for _ in range(8):
            found = _clipped_sum(clipper, loss, rows, torch.tensor([0, 1, 0, 1]))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
            assert float(found.norm()) <= 2 * 0.5 * (1 + 1e-6)
    finally:
        clipper.remove()


def test_another_loss_over_rows_of_the_same_shape():
    """A recording is of one loss function; another one, over rows of the same shape, is not replaced by it."""

    def run(replay):
        torch.manual_seed(0)
        model = _Net().double()
        losses = _squares(model), lambda batch: model(batch["x"]).abs().sum(1)
        clipper = GhostClipper(model, 0.5, NormMethod(replay=replay))
        try:
            return [_clipped_sum(clipper, losses[n >= 8], {"x": _X[n]}, _UNITS) for n in range(18)]
        finally:
            clipper.remove()

    assert all(map(torch.equal, run(False), run(True)))


def test_a_loss_made_anew_in_each_call_is_not_recorded():
    """A closure over facts of its own rows is another function each time: no recording takes facts of earlier rows."""

    def run(replay):
        torch.manual_seed(0)
        model = _Net().double()
        clipper = GhostClipper(model, 0.5, NormMethod(replay=replay))
        found = []
        try:
            for number in range(14):
                used = 2 if number < 8 else 3
                loss = lambda batch, used=used: model(batch["x"]).square()[:, :used].sum(1)  # noqa: E731
                found.append(_clipped_sum(clipper, loss, {"x": _X[number]}, _UNITS))
            return found
        finally:
            clipper.remove()

    assert all(map(torch.equal, run(False), run(True)))


def test_one_tensor_as_two_inputs():
    """Where one tensor was given twice, later inputs may be two: each is read."""

    def losses(model):
        return lambda batch: (model(batch["x"]) - batch["y"]).square().sum(1)

    _assert_exact(losses, lambda number: {"x": _X[number], "y": _X[number if number < 8 else number + 1]})


def _used(number, counts=(2, 2, 2, 2), later=(1, 2, 3, 4)):
    return torch.tensor(counts if number < 8 else later)


def _split(model):
    def loss(batch):
        first, second = torch.tensor_split(model(batch["x"]).square(), batch["n"][:1], dim=1)
        return 2 * first.sum(1) + second.sum(1)

    return loss


def _applied(model):
    def loss(batch):
        used: list[float] = []
        batch["n"].clone().apply_(lambda value: used.append(value) or value)
        squares = model(batch["x"]).square()
        return torch.stack([squares[row, : int(n)].sum() for row, n in enumerate(used)])

    return loss


def _addressed(model):
    def loss(batch):
        used = ctypes.c_int64.from_address(batch["n"].data_ptr()).value
        return model(batch["x"]).square()[:, :used].sum(1)

    return loss


_SCRIPT = """
def first_entries(squares: Tensor, used: Tensor) -> Tensor:
    counts: List[int] = used.tolist()
    sums: List[Tensor] = []
    for row in range(len(counts)):
        sums.append(squares[row, :counts[row]].sum())
    return torch.stack(sums)
"""


@pytest.mark.parametrize("losses", [_split, _applied, _addressed])
def test_values_that_are_read_past_operations(losses):
    """Numbers of the rows that C++ or Python reads from memory, equal in the recorded passes, are not replayed."""
    _assert_exact(losses, lambda number: {"x": _X[number], "n": _used(number)})


class _Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True).requires_grad_(False)

    def forward(self, x, n):
        packed = nn.utils.rnn.pack_padded_sequence(self.a(x), n, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=4)[0]


def test_lengths_of_a_packed_sequence():
    """The lengths of packed sequences are read past operations, and are not those of the recorded rows."""
    rows = _rows(14, 4, 4, 4)
    _assert_exact(
        lambda model: lambda batch: model(batch["x"], batch["n"]).square().sum((1, 2)),
        lambda number: {"x": rows[number], "n": _used(number, (4, 4, 4, 4), (4, 3, 2, 1))},
        module=_Packed,
    )


class _Batch(dict):
    """Inputs with facts about their rows in an attribute."""


def test_attributes_of_the_inputs():
    """Facts about the rows in attributes of a mapping are not those of the recorded rows."""

    def inputs(number):
        batch = _Batch(x=_X[number])
        batch.lengths = _used(number).tolist()
        return batch

    def losses(model):
        return lambda batch: torch.stack(
            [row[:n].sum() for row, n in zip(model(batch["x"]).square(), batch.lengths, strict=True)]
        )

    _assert_exact(losses, inputs)


def test_inputs_that_the_model_changes():
    """A comparison does not run a pass over inputs that another run of it changed."""
    _assert_exact(
        lambda model: lambda batch: model(batch["x"].mul_(2)).square().sum(1),
        lambda number: {"x": _X[number].clone()},
    )


class _Counting(_Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


def test_buffers_that_the_model_changes():
    """A buffer changes once for each microbatch, as without replay."""
    counts = []

    def before(number, model):
        counts.append(float(model.count))

    for replay in (False, True):
        _sums(replay, _squares, lambda number: {"x": _X[number]}, module=_Counting, before=before)
    assert counts[:14] == counts[14:]


def test_a_recording_after_a_change_of_state_is_compared():
    """Each recording is compared from its first replay on, also one that follows a change of the model's state."""

    def before(number, model):
        if number == 9:
            model.eval()
        if number == 11:  # unseen, after the second recorded pass
            model.shift[0] = 2.0

    _assert_exact(_squares, lambda number: {"x": _X[number]}, before=before)


def test_a_hook_in_place_of_another():
    """A hook that takes the place of another one is seen, though their number is the same."""

    def before(number, model):
        if number in (0, 8):
            if number == 8:
                model.hook.remove()
            model.hook = model.a.register_forward_hook(lambda module, args, output: output + number)

    _assert_exact(_squares, lambda number: {"x": _X[number]}, before=before)


class _Buffered(_Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return (super().forward(x)[:, None] @ self.weights.flatten()[:, None].expand(4, 4)).squeeze(1)


def test_a_replay_that_fails_is_run_as_a_pass():
    """An operation that fails in a replay, since a tensor now has another shape, fails no step."""

    def before(number, model):
        if number == 8:
            model.weights.data = 2 * torch.ones(2, 2, dtype=torch.float64)

    _assert_exact(_squares, lambda number: {"x": _X[number]}, module=_Buffered, before=before)


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(
    "extra", [lambda x: torch.nested.nested_tensor([x[0], x[1]]), lambda x: x.to_sparse_csr()], ids=["nested", "csr"]
)
def test_inputs_without_strides(extra):
    """Inputs that are no strided tensors raise no error."""
    _assert_exact(_squares, lambda number: {"x": _X[number], "extra": extra(_X[number])})


def test_state_that_another_thread_writes():
    """A buffer that another thread fills during the pass has rows of this pass, never of a recorded one."""

    def losses(model):
        weights = torch.zeros(4, 4, dtype=torch.float64)

        def loss(batch):
            thread = threading.Thread(target=lambda: weights.copy_(batch["w"]))
            thread.start()
            thread.join()
            return (model(batch["x"]) * weights).square().sum(1)

        return loss

    same = torch.ones(4, 4, dtype=torch.float64)
    _assert_exact(losses, lambda number: {"x": _X[number], "w": same if number < 8 else _X[number]})


def test_state_that_a_pass_leaves_behind_is_found():
    """A comparison runs the replay before the pass: memory that the pass fills unseen does not make them alike."""

    def losses(model):
        memory = np.zeros((4, 4))
        weights = torch.from_numpy(memory)

        def loss(batch):
            memory[:] = rows[len(seen)]
            return (model(batch["x"]) * weights).square().sum(1)

        return loss

    rows, seen = [np.ones((4, 4)) if n < 8 else _X[n].numpy() for n in range(20)], []

    def inputs(number):
        seen[:] = range(number)
        return {"x": _X[number]}

    with pytest.raises(GhostError, match="differs from the pass"):
        _sums(True, losses, inputs)


def test_a_pass_that_cannot_be_compared_leaves_it_to_the_next():
    """The first replay is compared, also where the watch of the model's calls falls on its turn."""

    def before(number, model):
        if number == 4:  # so that the first replay falls on the eighth call
            for _ in range(2):
                model(_X[0])
        if number == 5:
            model.shift[0] = 2.0

    _assert_exact(_squares, lambda number: {"x": _X[number]}, before=before)


def test_numbers_of_numpy_memory_are_read():
    """A tensor over memory that the caller fills is read anew by each replay."""
    memory = np.zeros((4, 4))
    view = torch.from_numpy(memory)

    def before(number, model):
        memory[:] = _X[number].numpy()

    _assert_exact(lambda model: lambda batch: model(view).square().sum(1), lambda number: {}, before=before)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_with_a_scripted_module_is_not_recorded():
    """It may read values by itself, which no tape sees."""
    script = torch.jit.script(torch.nn.Tanh())
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), script, torch.nn.Linear(3, 1))
    clipper = GhostClipper(model, 1.0, NormMethod(replay=True))

    def loss_of(inputs):
        return model(inputs["x"]).square().sum(1)

    for number in range(10):
        clipper.run(loss_of, {"x": torch.full((2, 4), float(number))}, torch.arange(2))
    assert clipper.replays == 0


def _zeros(number):
    """Rows without zeros in the passes that are recorded and compared first, later with some."""
    used = torch.ones(4, 4, dtype=torch.bool) if number < 9 else torch.arange(16).view(4, 4) >= number - 6
    return {"x": _X[number].where(used, 0.0)}


@torch.library.custom_op("dpllm_tests::entries_kept", mutates_args=())
def entries_kept(x: torch.Tensor) -> torch.Tensor:
    return x[x != 0].clone()


def _of_sparse(x):
    return x.to_sparse().coalesce().values().shape[0]


def _of_nonzero(x):
    found = torch.empty(0, dtype=torch.long)
    torch.nonzero(x != 0, out=found)
    return found.shape[0]


def _of_bincount(x):
    found = torch.empty(0, dtype=torch.long)
    torch.ops.aten.bincount.out((x != 0).sum().view(1), out=found)
    return found.shape[0]


@pytest.mark.parametrize(
    "count", [_of_sparse, _of_nonzero, _of_bincount, lambda x: torch.ops.dpllm_tests.entries_kept(x).shape[0]]
)
def test_shapes_that_follow_from_values(count):
    """A number that Python takes from a shape is that of the rows, also where PyTorch does not mark the operation."""
    _assert_exact(lambda model: lambda batch: count(batch["x"]) * model(batch["x"]).square().sum(1), _zeros)


def test_attributes_of_a_tensor():
    """Facts about the rows in an attribute of a tensor are not those of the recorded rows."""

    def inputs(number):
        rows = _X[number].clone()
        rows.factor = 1.0 if number < 9 else 2.0
        return {"x": rows}

    _assert_exact(lambda model: lambda batch: batch["x"].factor * model(batch["x"]).square().sum(1), inputs)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_zero_with_a_sign(as_tensor):
    """The numbers 0.0 and -0.0 are two, among the inputs and where the loss reads them."""

    def inputs(number):
        zero = 0.0 if number < 9 else -0.0
        return {"x": _X[number], "z": torch.tensor(zero) if as_tensor else zero}

    _assert_exact(
        lambda model: lambda batch: (2 + math.copysign(1, batch["z"])) * model(batch["x"]).square().sum(1), inputs
    )


def test_a_generator_of_the_loss():
    """A comparison does not draw twice from a generator whose state it does not put back."""

    def losses(model):
        generator = torch.Generator().manual_seed(1)
        return lambda batch: (1 + torch.rand(4, generator=generator)) * model(batch["x"]).square().sum(1)

    _assert_exact(losses, lambda number: {"x": _X[number]})


class _TurnedInPlace(_Net):
    def forward(self, x):
        kept = x.clone()
        before = kept.t()
        after = kept.t_().t()
        return super().forward(x) + (before - after).square()


def test_a_tensor_that_is_turned_in_place():
    """A view taken before a tensor is transposed in place is not taken for the same view after it."""
    _assert_exact(
        _squares,
        lambda number: {"x": _X[number] + _X[number].T if number < 9 else _X[number]},  # alike in the first passes
        module=_TurnedInPlace,
    )


def test_numbers_of_tokens_of_sequences_that_come_packed():
    """A recurrent layer reads in C++ how many sequences have a token at each place; they are those of the rows."""
    weights = [torch.randn(16, *width, generator=torch.Generator().manual_seed(5)).double() for width in ((4,), (4,))]
    start = torch.zeros(1, 3, 4, dtype=torch.float64)

    def losses(model):
        def loss(batch):
            packed = torch.cat([batch["x"], batch["x"]])
            out = torch.lstm(packed, batch["sizes"], (start, start), weights, False, 1, 0.0, True, False)[0]
            return model(batch["x"] + out[4:]).square().sum(1)

        return loss

    def inputs(number):
        return {"x": _X[number], "sizes": torch.tensor([3, 3, 1, 1] if number < 9 else [3, 2, 2, 1])}

    _assert_exact(losses, inputs)


def test_an_overload_that_reads_values_past_operations():
    """An operation is known by its name also where the loss calls one of its overloads."""

    def losses(model):
        split = torch.ops.aten.tensor_split.tensor_indices_or_sections
        return lambda batch: len(split(batch["x"].flatten(), batch["at"])[0]) * model(batch["x"]).square().sum(1)

    _assert_exact(losses, lambda number: {"x": _X[number], "at": torch.tensor([3, 5] if number < 9 else [4, 6])})


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.drop = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Dropout(0.4)

    def forward(self, x):
        return self.b(self.drop(self.norm(self.a(x))))


def test_a_layer_norm_and_new_dropout_in_each_pass():
    """PyTorch returns None for gradients that nobody wants; each replay draws the masks that the pass would draw."""
    replays: list[int] = []
    rows = {"x": _X[0]}
    _assert_exact(_squares, lambda number: rows, module=_Normed, replays=replays)
    assert replays == [8]
    sums = _sums(True, _squares, lambda number: rows, module=_Normed)
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(sums))


class _Elsewhere(_Net):
    def __init__(self):
        super().__init__()
        self.config, self.names = types.SimpleNamespace(cap=1.0), ["one", "two"]  # as of transformers, and of PEFT

    def forward(self, x):
        return self.config.cap * len(self.names) * super().forward(x)


@pytest.mark.parametrize("what", ["a number of the config", "a list of names", "a hook of all modules"])
def test_settings_that_a_forward_pass_reads_elsewhere(what):
    """A soft cap in the config, active or merged adapters, hooks of all modules: the pass is recorded anew."""
    handles = []

    def change(number, model):
        if number == 10 and what == "a number of the config":
            model.config.cap = 0.5
        if number == 10 and what == "a list of names":
            model.names.pop()
        if number == 10 and what == "a hook of all modules":
            halve = lambda module, inputs, output: output / 2  # noqa: E731
            handles.append(nn.modules.module.register_module_forward_hook(halve))
        if number == 13:
            while handles:
                handles.pop().remove()

    try:
        _assert_exact(_squares, lambda number: {"x": _X[number]}, module=_Elsewhere, before=change)
    finally:
        while handles:
            handles.pop().remove()


class _DrawsAndReads(_Normed):
    def forward(self, x):
        out = super().forward(x)
        return out if bool((x > 0).all()) else 2 * out


def test_a_replay_that_stops_has_drawn_nothing():
    """Masks of dropout are those that are drawn without recordings, in all later passes too."""
    _assert_exact(
        _squares, lambda number: {"x": _X[number] if number == 10 else _X[number].abs()}, module=_DrawsAndReads
    )
