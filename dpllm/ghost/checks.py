"""Two checks on the first batch: every use of a parameter is seen, and rows are independent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
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

    def __init__(self, name_of: dict[int, str]) -> None:
        """Watch the parameters with these ids."""
        super().__init__()
        self._name_of = name_of
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
        if not self._off and isinstance(result, Tensor) and func is not Tensor.detach:
            own = {id(p) for p in self._active[-1].site.trainable.values()} if self._active else set()
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and id(value) in self._name_of and id(value) not in own:
                    self._found.setdefault(self._name_of[id(value)], getattr(func, "__name__", str(func)))
        return result

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
