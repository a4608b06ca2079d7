"""Fetch and collate the next microbatch in a thread while the current one runs.

`dpllm.training.microbatches` cuts a step's units, and `dpllm.training.out_of_memory.Portions` passes the microbatches
to the step. The thread is used only where the data set and the collator are known to share nothing with the model and
the loss (`dpllm.training.read_rows.shares_nothing`), or where the user declares it
(``TrainingRows(fetch_ahead=True)``): two readers of one file might get the bytes of another record, and a unit would be
counted twice. Within a step, only this thread calls the data set and the collator, one call after another.

Data sets and collators that draw from PyTorch's global generators, or that run a model, must not run concurrently with
a pass: dropout would take numbers from a seed that the data set has set, and activation checkpointing would not draw
the same mask for a layer again. `FetchThread.shares` records this.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpllm.config import ConfigError

_Result = TypeVar("_Result")

PATIENCE = 5.0
"""Seconds that the end of a failed step waits for a fetch."""
_SHARED = (
    "The data set or the collator drew from PyTorch's global generators, or used a model's parameter, while a "
    "microbatch ran, so dropout may have drawn its masks from a seed that they set. The step is charged, and none of "
    "its results is released. Set TrainingRows(fetch_ahead=False), so that rows are read between passes"
)
_AT_EXIT = 30.0  # seconds that the end of the program waits for it: PyTorch aborts after Python has ended
_ONE_AT_A_TIME = threading.Lock()  # an abandoned fetch must not run concurrently with one of a later step


class FetchThread:
    """Runs functions one after another in its own thread, which starts with the first and ends with `close`.

    An exception of a function is raised where its result is requested. The thread is a daemon, so a data set that never
    returns does not keep the interpreter from ending.

    Args:
        device: device of the microbatches, current in the thread: pinned memory would otherwise be registered with the
            first GPU by every process of a machine.

    Attributes:
        shares: whether a function drew from PyTorch's global generators or used a parameter, as a model's pass does.

    >>> thread = FetchThread(torch.device("cpu"))
    >>> thread.submit(lambda: 2 + 3, alone=True).result()
    5
    >>> thread.close()
    """

    def __init__(self, device: torch.device) -> None:
        """Store the device; no thread starts yet."""
        self._device = device
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], Any], bool] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.shares = False

    def submit(self, function: Callable[[], _Result], alone: bool) -> Future[_Result]:
        """Run a function after those submitted earlier, even to threads that were closed before they had ended.

        Args:
            function: runs in the thread.
            alone: whether nothing else runs meanwhile, since the caller waits for the result at once. Otherwise the
                result is a ConfigError if the function uses what a model's pass uses too.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dpllm fetch", daemon=True)
            self._thread.start()
        future: Future[_Result] = Future()
        self._tasks.put((future, function, alone))
        return future

    def close(self, patience: float | None = None) -> None:
        """Start no further function, and wait for the one that runs. Nothing can be submitted afterwards.

        Args:
            patience: the largest number of seconds to wait. None: until it returns.
        """
        self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(patience)
            if self._thread.is_alive():
                atexit.register(self._thread.join, _AT_EXIT)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None and not self._closed:
            future, function, alone = task
            try:
                with _ONE_AT_A_TIME, _Sharing() as found:
                    result = function()
                self.shares |= found.shares
                if found.shares and not alone:
                    raise ConfigError(_SHARED)
                future.set_result(result)
                del result
            except BaseException as error:
                future.set_exception(error)
            del task, future, function, found  # a result must not be kept until the next one


class _Sharing(TorchDispatchMode):
    """Records operations that a model's pass may disturb, or that may disturb it."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        of_all = kwargs.get("generator") in (None, torch.default_generator)
        draws = of_all and torch.Tag.nondeterministic_seeded in func.tags
        self.shares |= draws or any(isinstance(one, nn.Parameter) for one in (*args, *kwargs.values()))
        return func(*args, **kwargs)
