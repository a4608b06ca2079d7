"""Two checks on the first batch: every use of a parameter is seen, and rows are independent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpllm.ghost.errors import GhostError

_ROW_ARGUMENTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "attention_mask", "pixel_values", "input_features")


def rows_of_call(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """The number of rows in a call of the model: the first dimension of its main input, or of its first tensor."""
    for name in _ROW_ARGUMENTS:
        if isinstance(kwargs.get(name), Tensor):
            return kwargs[name].shape[0]
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.ndim > 0:
            return value.shape[0]
    return None


class FunctionalUses(TorchFunctionMode):
    """Watches one forward pass for uses of trainable parameters outside the modules that hold them.

    A hook on a module can't see ``F.linear(x, other.weight)``: the gradient of that use would silently be missing
    from norm and sum.
    """

    def __init__(self, model: nn.Module, name_of: dict[int, str]) -> None:
        """Watch the trainable parameters, whose names are given by their ids."""
        super().__init__()
        self._model = model
        self._trainable = set(name_of.values())
        self._name_of: dict[int, str | None] = dict(name_of)
        self._active: list[Any] = []
        self._found: dict[str, str] = {}
        self._off = False

    def start(self, active: list[Any]) -> None:
        """Begin to watch; ``active`` is the live stack of sites being run."""
        self._active = active
        self.__enter__()

    def stop(self) -> None:
        """Stop watching."""
        self.__exit__(None, None, None)

    @staticmethod
    @contextlib.contextmanager
    def suspended(uses: FunctionalUses | None) -> Iterator[None]:
        """Look away while a rule runs modules on its own account."""
        if uses is None:
            yield
            return
        before, uses._off = uses._off, True
        try:
            yield
        finally:
            uses._off = before

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # What is taken from detach() or .data has no gradient in ordinary training either.
        if not self._off and isinstance(result, Tensor) and func not in (Tensor.detach, Tensor.data.__get__):  # type: ignore[attr-defined]
            for value in (*args, *kwargs.values()):
                if isinstance(value, nn.Parameter):
                    self._look(value, func)
        return result

    def _look(self, value: nn.Parameter, func: Any) -> None:
        name = self._name(value)
        own = {self._name(p) for p in self._active[-1].site.trainable.values()} if self._active else set()
        if name is not None and name not in own:
            self._found.setdefault(name, getattr(func, "__name__", str(func)))

    def _name(self, value: nn.Parameter) -> str | None:
        """The name of a trainable parameter, None for another one.

        While a module of a sharded model runs, other tensors stand in for its parameters; they are known by the place
        they stand in.
        """
        if id(value) not in self._name_of:
            for name, live in self._model.named_parameters():
                self._name_of.setdefault(id(live), name if name in self._trainable else None)
            self._name_of.setdefault(id(value), None)
        return self._name_of[id(value)]

    def raise_if_any(self) -> None:
        """Raise for the first use that was found."""
        for name, function in self._found.items():
            raise GhostError(
                f"{name} is used by {function}() outside the module that holds it, where its per-row gradient can't "
                f"be seen. Call the module "
                "instead of using its weight, or freeze the parameter."
            )


class RowProbe:
    """Receives the gradients of one row's loss; any gradient in another row is an error."""

    def __init__(self, row: int) -> None:
        """Probe this row."""
        self.row = row

    def look(self, name: str, value_B: Tensor) -> None:
        """Check what one use of a parameter received."""
        others = value_B.detach().flatten(1).clone()
        others[self.row] = 0
        touched = (torch.isfinite(others) & (others != 0)).any(1)
        if bool(touched.any()):
            other = int(torch.nonzero(touched)[0])
            raise GhostError(
                f"The loss of row {self.row} depends on row {other} of the batch (seen at {name}), so a unit can't "
                f"be bounded. Remove what couples "
                "rows: batch statistics, in-batch negatives, several units packed into one row, a loss normalised "
                "over the batch."
            )
