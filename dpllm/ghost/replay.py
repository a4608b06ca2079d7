"""Replays passes: forward, backward and norms of a microbatch from a recording, without modules, hooks and autograd.

Place in the flow: between a microbatch and its clip factors. A pass over rows of one shape runs the same operations
each time. After the first three passes over rows of a shape, later ones can run from a recording (`dpllm.ghost.tape`);
the time that the host spends on modules, hooks and autograd is saved. Clip factors, clipped sums and noise are computed
as without a recording.

Guarantee: a replay yields contributions that are functions of its own rows and of the weights alone, and norms of
these same contributions. So a unit's share of the clipped sum is bounded as in any other pass. What might carry a value
of other rows into a replay is refused when a pass is recorded, and the pass then runs as it did. The passes 1, 2, 4,
8, … that are replayed run both ways, and have to agree.

Recorded are passes of a model that runs on one device, without activation checkpointing of random operations, whose
contributions are all kept until the sum, whose rows are neither packed nor held, and whose code, that of its loss
included, is of packages that are known to take no number past PyTorch's operations (`dpllm.ghost.known_code`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels
from dpllm.ghost.contributions import Contribution, Instance, Lookup, Outer
from dpllm.ghost.errors import GhostError
from dpllm.ghost.instances import Block, Slot
from dpllm.ghost.known_code import foreign, foreign_modes
from dpllm.ghost.passes import Pass
from dpllm.ghost.tape import Program, ReadError, RefusedError, Tape, program_of

logger = logging.getLogger(__name__)

_SHAPES = 64
"""Shapes of microbatches for which a pass is recorded. Each holds a few megabytes of code, and no rows."""
_SIGHTINGS = 4096  # shapes that are counted
_TOLERANCE = 1e-2  # of a tensor's length: kernels of a GPU may add in another order each time, in 16 bits
_TRIES = 16  # passes over a shape in which recording is tried
_LOSSES = 4  # functions that compute losses
_PLAIN = (bool, int, float, str, type(None))
_SEVERAL = (dict, list, tuple)
_PARTS = 64  # of a list in an attribute that are compared
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATE_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_RESETS = 64  # changes of the model's state after which nothing is recorded
_REFUSALS = 3  # shapes that are refused before no other is tried

LossOf = Callable[[Mapping[str, Any]], Tensor]
Parts = tuple[Tensor, Tensor, Tensor]
"""Losses (B,), squared norms (G, U) and slack (G, U) of a pass."""


class Recordable(Protocol):
    """The interface of the book that replays need."""

    @property
    def is_recordable(self) -> bool:
        """Whether the last pass can be replayed: nothing of it was watched, packed, held or added up early."""
        ...

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on."""
        ...

    def last_pass(self) -> Pass:
        """Return the last pass."""
        ...

    def take_pass(self, one: Pass) -> None:
        """Put a replayed pass in the place of the last one."""
        ...


# ------------------------------------------------------------- contributions

_Make = Callable[[list[Tensor], list[Block]], Contribution]
"""Makes a contribution of its tensors and of the blocks of the pass."""


def _taken_apart(one: Contribution, blocks: list[Block]) -> tuple[list[Tensor], _Make]:
    """Return the tensors of a contribution, and what makes it of others; its block is appended to ``blocks``.

    Raises:
        RefusedError: of experts, whose shapes follow from the rows.
    """
    if isinstance(one, Outer):
        side = one.input_side
        return [one.left_BTL, one.right_BTR], lambda given, _: Outer(given[0], given[1], side)
    if isinstance(one, Lookup):
        entries = one.num_entries
        return [one.index_BT, one.right_BTR], lambda given, _: Lookup(given[0], given[1], entries)
    if not isinstance(one, Instance):
        raise RefusedError("tokens are routed to experts")
    if one.slot is None:
        return [one.value_U], lambda given, _: Instance(given[0])
    start, shape = one.slot.start, one.slot.shape
    place = next((at for at, block in enumerate(blocks) if block is one.slot.block), len(blocks))
    if place == len(blocks):
        blocks.append(one.slot.block)
    return [one.value_U], lambda given, of: Instance(given[0], Slot(of[place], start, shape, given[0]))


class _Layout:
    """How a pass is made of the outputs of a program; it holds no tensor of the recorded pass but the units of rows."""

    def __init__(self, one: Pass, used: list[int], make: list[tuple[int, int, _Make]]) -> None:
        """Remember what all passes of the shape have in common."""
        self._rows, self._norm_method, self._groups = one.rows, one.norm_method, one.groups
        self._used, self._make = used, make

    @classmethod
    def of(cls, one: Pass, parts: Parts) -> tuple[_Layout, list[Tensor]]:
        """Take a pass apart; return its layout, and its tensors in the order in which a program returns them.

        Raises:
            RefusedError: it has contributions whose shapes follow from the rows.
        """
        blocks: list[Block] = []
        found = [(key, *_taken_apart(c, blocks)) for key, several in one.contributions.items() for c in several]
        outputs = [*parts, *(block.buffer for block in blocks), *(t for _, tensors, _ in found for t in tensors)]
        make = [(key, len(tensors), make) for key, tensors, make in found]
        return cls(one, [block.used for block in blocks], make), outputs

    def made_of(self, outputs: list[Tensor]) -> tuple[Pass, Parts]:
        """Return the pass of a program's outputs, and its losses and norms."""
        one, at = Pass(self._rows, self._norm_method, groups=self._groups), 3 + len(self._used)
        blocks = [Block.of(buffer, used) for buffer, used in zip(outputs[3:at], self._used, strict=True)]
        for key, count, make in self._make:
            one.contributions[key].append(make(outputs[at : at + count], blocks))
            at += count
        return one, (outputs[0], outputs[1], outputs[2])


# --------------------------------------------------------------------- replays


class _State:
    """What a recording takes for granted of the model, besides values of its tensors.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember the present state."""
        own = [module.__dict__ for module in model.modules()]
        configs = {id(one["config"]): one["config"] for one in own if hasattr(one.get("config"), "__dict__")}
        # Of a configuration a forward may read numbers, as Gemma's does the soft cap of its logits.
        self._names = [(one, _plain_names(one)) for one in (*own, *map(vars, configs.values()))]
        self._several = [(one, name) for one, names in self._names for name in names if type(one[name]) in _SEVERAL]
        self._configured = [one for one in own if "config" in one]
        self._hooks = [one[name] for one in own for name in _HOOKS]
        self._hooks += [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]
        self._modules = [one["_modules"] for one in own]
        self._buffers, self._parameters = [one["_buffers"] for one in own], [one["_parameters"] for one in own]
        self._present = self._read()

    def is_present(self) -> bool:
        """Whether the model still has the state that was remembered."""
        try:
            return self._present == self._read()
        except (RuntimeError, TypeError, ValueError):  # a number is now a tensor, which compares its entries
            return False

    def _read(self) -> list[Any]:
        found: list[Any] = []
        for own, names in self._names:  # as a dropout's share
            found.append(len(own))
            found += map(own.get, names)
        for own, name in self._several:  # as the scales of adapters, or the names of those that are merged
            value = own.get(name)
            found.append(tuple(value.items()) if isinstance(value, dict) else tuple(value or ()))
        found += [id(own.get("config")) for own in self._configured]
        for hooks in filter(None, self._hooks):
            found += hooks  # numbers, given out once
        for modules in filter(None, self._modules):
            found += modules.values()
        for buffers in filter(None, self._buffers):
            found += map(id, buffers.values())
        for parameters in filter(None, self._parameters):
            for parameter in parameters.values():
                if parameter is not None:
                    found += (id(parameter), parameter.requires_grad, parameter.dtype)
        return found


@dataclass
class _Shape:
    """Microbatches of one shape.

    Attributes:
        unit_B: (B,) the units of the rows, one tensor for all passes.
        seen: passes so far.
        first: the tape of a pass.
        layout: how a pass is made of the program's outputs.
        program: the recording.
        replayed: passes that were replayed; one of them is compared until that succeeded.
        failed: passes that could not be recorded or, with a recording, in which it stopped.
        refused: whether no pass of it can be replayed.
    """

    unit_B: Tensor
    seen: int = 0
    first: Tape | None = None
    layout: _Layout | None = None
    program: Program | None = None
    replayed: int = 0
    failed: int = 0
    refused: bool = False


class Replay:
    """The recordings of one clipper.

    Args:
        model: that is trained.
        book: computes the norms of a pass.
    """

    def __init__(self, model: nn.Module, book: Recordable) -> None:
        """Begin without recordings."""
        self._model, self._book = model, book
        self._shapes: dict[tuple, _Shape] = {}
        self._losses: list[LossOf] = []
        self._state: _State | None = None
        self._refusals = self._resets = 0
        self.is_off = False

    @property
    def num_recorded(self) -> int:
        """The number of shapes with a recording."""
        return sum(one.program is not None for one in self._shapes.values())

    def norms(
        self,
        loss_of: LossOf,
        inputs: Mapping[str, Any],
        unit_B: Tensor,
        run: Callable[[Tensor], Parts],
    ) -> Parts:
        """Return losses and norms of a microbatch; its contributions are the book's last pass afterwards.

        Args:
            loss_of: computes the losses; a recording is of one of them.
            inputs: of the model and the loss.
            unit_B: (B,) the units of the rows, on the CPU.
            run: runs the pass with modules and autograd, for units that it is given.

        Raises:
            GhostError: a replay differs from the pass.
        """
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        shape = None if self.is_off else self._shape_of(loss_of, inputs, unit_B)
        if shape is None or shape.refused:
            return run(unit_B)
        if (self._state is None or not self._state.is_present()) and not self._begin_anew():
            return run(unit_B)
        shape.seen += 1
        if shape.program is None:
            return run(shape.unit_B) if shape.seen == 1 else self._recorded(loss_of, shape, tensors, run)
        if shape.replayed & (shape.replayed + 1) == 0:
            return self._compared(shape, tensors, run)
        found = self._replayed(shape, tensors)
        return run(shape.unit_B) if found is None else found

    def _begin_anew(self) -> bool:
        """Remember the model's state, and forget the recordings of another one; return whether passes are recorded."""
        self._resets += 1
        if self._resets > _RESETS:
            self._switch_off("attributes of its modules change from pass to pass")
        else:
            self._state = _State(self._model)
        for one in self._shapes.values():
            one.first = one.layout = one.program = None
            one.replayed = one.failed = 0
        return not self.is_off

    def _shape_of(self, loss_of: LossOf, inputs: Mapping[str, Any], unit_B: Tensor) -> _Shape | None:
        """Return the shape of a microbatch; None if it cannot be recorded."""
        described = _described(inputs)
        if described is None or not torch.is_grad_enabled() or unit_B.device.type != "cpu" or foreign_modes():
            return None
        if loss_of not in self._losses:
            if len(self._losses) == _LOSSES:
                self._switch_off("the loss is another function in each call; pass the same one each time")
                return None
            self._losses.append(loss_of)
        key = (self._losses.index(loss_of), *described, unit_B.numpy().tobytes(), _settings())
        if key not in self._shapes and len(self._shapes) < _SIGHTINGS:
            self._shapes[key] = _Shape(unit_B.clone())  # the caller may change its own
        return self._shapes.get(key)

    # ------------------------------------------------------------------ recording

    def _recorded(self, loss_of: LossOf, shape: _Shape, tensors: list[Tensor], run: Callable[[Tensor], Parts]) -> Parts:
        """Run a pass and record it; after the second one there is a program."""
        recorded = sum(one.first is not None or one.program is not None for one in self._shapes.values())
        if shape.first is None and recorded >= _SHAPES:
            return run(shape.unit_B)
        if (unknown := foreign(self._model, loss_of)) is not None:  # each time: a class may be changed
            self._switch_off(
                f"the model or the loss, or what it holds, runs code that a recording may not see: {unknown}"
            )
            return run(shape.unit_B)
        known = shape.first.constants if shape.first is not None else []
        random, versions = _RandomStates(), _versions(known)
        with Tape(tensors) as tape:
            parts = run(shape.unit_B)
        if not self._book.is_recordable:
            shape.failed += 1
            if shape.failed > _TRIES:
                self._refuse(shape, "its contributions are not all kept until the sum, or its rows are packed")
            return parts
        if versions != _versions(known):
            tape.refuse("a tensor that was there before changes during the pass, in another thread")
        if self._book.recomputes and random.moved:
            tape.refuse("random operations are run again by activation checkpointing")
        try:
            if tape.refused is not None:
                raise RefusedError(tape.refused)
            layout, outputs = _Layout.of(self._book.last_pass(), parts)
            tape.end(outputs)
            if shape.first is None:
                shape.first = tape
                return parts
            shape.program, shape.layout = program_of(shape.first, tape), layout
            shape.first, shape.failed = None, 0
        except ReadError as error:  # the later pass may be like the next, as one of two has rows of equal lengths
            shape.first, shape.failed = tape, shape.failed + 1
            if shape.failed > _REFUSALS:
                self._refuse(shape, str(error))
        except RefusedError as error:
            self._refuse(shape, str(error))
        return parts

    def _refuse(self, shape: _Shape, reason: str) -> None:
        shape.refused, shape.first, shape.layout, shape.program = True, None, None, None
        self._refusals += 1
        logger.debug("A pass is not replayed: %s", reason)
        if self._refusals == _REFUSALS and not any(one.program for one in self._shapes.values()):
            self._switch_off(reason)

    def _switch_off(self, reason: str) -> None:
        self.is_off = True
        self._shapes.clear()
        self._losses.clear()
        logger.warning("Passes of this model are not replayed but run as without replay: %s.", reason)

    # ------------------------------------------------------------------ replaying

    def _replayed(self, shape: _Shape, tensors: list[Tensor]) -> Parts | None:
        """Run a recording; None where it stopped."""
        assert shape.layout is not None and shape.program is not None, "the shape was recorded"
        random = _RandomStates() if shape.program.may_draw_and_stop else None
        outputs = self._outputs(shape, tensors)
        shape.replayed += 1
        if outputs is None:
            if random is not None:  # the pass draws the numbers that it would have drawn
                random.restore()
            self._stopped(shape)
            return None
        one, parts = shape.layout.made_of(outputs)
        self._book.take_pass(one)
        return parts

    def _stopped(self, shape: _Shape) -> None:
        """Note that a recording stopped; one that stops often is given up."""
        shape.failed += 1
        if 2 * shape.failed > _REFUSALS + shape.replayed:
            self._refuse(shape, "numbers that the model reads from the rows differ between passes")

    @staticmethod
    def _outputs(shape: _Shape, tensors: list[Tensor]) -> list[Tensor] | None:
        """Return what a recording computes; None where it stopped: the pass then shows whether the rows are at fault.

        Raises:
            OutOfMemoryError: memory ran out.
        """
        assert shape.program is not None, "the shape was recorded"
        try:
            with kernels.exact_matmul():
                return shape.program(tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any operation, of which a shape may have followed from the rows
            logger.debug("A replay stopped: %s", error)
            return None

    def _compared(self, shape: _Shape, tensors: list[Tensor], run: Callable[[Tensor], Parts]) -> Parts:
        """Run both ways; the pass that was not replayed is the book's last one.

        A pass that cannot be compared leaves the comparison to the next one.

        Raises:
            GhostError: they differ, and earlier replays were used.
        """
        # First the replay: what the pass leaves behind where no tape sees it would make both alike.
        random = _RandomStates()
        found = self._outputs(shape, tensors)
        if found is not None:
            found = [tensor.cpu() for tensor in found]  # the pass gets all the memory
        random.restore()
        parts = run(shape.unit_B)
        if not self._book.is_recordable:
            return parts
        shape.replayed += 1
        if found is None:
            self._stopped(shape)
            return parts
        if _agree(found, _Layout.of(self._book.last_pass(), parts)[1]):
            return parts
        if shape.replayed == 1:
            self._refuse(shape, "the first replay differed from the pass")
            return parts
        raise GhostError(
            f"Replay {shape.replayed} of a pass differs from the pass itself: model or loss changed in a way that a "
            "recording does not show, or keep state. The microbatch is not added to the sum. Switch replays off "
            "(replay: false in the recipe, NormMethod(replay=False) in Python)."
        )


def _plain_names(own: Mapping[str, Any]) -> list[str]:
    """Return the names of attributes that are numbers or words, or dictionaries or lists of these."""

    def is_plain(value: Any) -> bool:
        if type(value) in _SEVERAL:
            parts = value.values() if type(value) is dict else value
            return len(parts) <= _PARTS and all(type(one) in _PLAIN for one in parts)
        return type(value) in _PLAIN or value is own.get("forward")

    return [name for name, value in own.items() if name not in _STATE_OF_TORCH and is_plain(value)]


def _described(inputs: Mapping[str, Any]) -> list[Any] | None:
    """Return all of the inputs but the values of tensors; None where more than that may decide what a pass does."""
    described: list[Any] = []
    if type(inputs) is not dict:  # attributes of other mappings may hold facts about the rows
        own = {name: value for name, value in getattr(inputs, "__dict__", {"": ()}).items() if name != "data"}
        if not all(type(value) in _PLAIN for value in own.values()):
            return None
        described += (type(inputs), *own.items())
    storages: dict[int, int] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.requires_grad or value.is_nested or value.layout != torch.strided:
                return None
            if not all(attribute.startswith("_dpllm_") for attribute in value.__dict__):
                return None  # the attributes of others may hold facts about the rows
            shared = storages.setdefault(value.untyped_storage()._cdata, len(storages))  # one tensor may come twice
            aligned = value.data_ptr() % 16  # on which a kernel's program depends
            described += (name, value.shape, value.stride(), value.dtype, value.device, shared, aligned)
            described.append(value.storage_offset() if shared != len(storages) - 1 else None)
        elif type(value) in _PLAIN:
            described += (name, type(value), repr(value))  # 0.0 and -0.0 differ
        else:
            return None
    return described


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return how often PyTorch changed each tensor, in any thread."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class _RandomStates:
    """The states of PyTorch's generators, so that a pass can draw the same numbers again."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    @property
    def moved(self) -> bool:
        """Whether random numbers were drawn since."""
        now = _RandomStates()
        return not all(map(torch.equal, (self._cpu, *self._cuda), (now._cpu, *now._cuda)))

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def _settings() -> tuple:
    """Return the settings of the process on which the operations of a pass depend."""
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return (*autocast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())


def _agree(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether two passes gave the same: every bit on a CPU, up to the order of additions elsewhere."""
    if len(found) != len(wanted):
        return False
    for one, other in zip(found, wanted, strict=True):
        one = one.to(other.device)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        if not one.is_floating_point() or one.device.type == "cpu":
            same = torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            finite = torch.isfinite(one) & torch.isfinite(other)
            one, other = one.double().where(finite, 0), other.double().where(finite, 0)
            same = bool((one - other).norm() <= _TOLERANCE * other.norm())
        if not same:
            return False
    return True
