"""The thread that fetches and collates the next microbatch while the present one runs.

Place in the flow: between `dpllm.training.microbatches`, which cuts a step's units, and
`dpllm.training.out_of_memory.Portions`, which hands the microbatches to the step. The data set and the collator are
called by this thread only, one call after another, from the first microbatch of a step to its last.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


class FetchThread:
    """Runs functions one after another in a thread of its own, which starts with the first and ends with `close`.

    An exception of a function is raised where its result is asked for. The thread is a daemon: a data set that never
    returns does not keep the interpreter from ending.

    Args:
        device: device of the microbatches, current in the thread: pinned memory would otherwise be registered with the
            first GPU by every process of a machine.

    >>> thread = FetchThread(torch.device("cpu"))
    >>> thread.submit(lambda: 2 + 3).result()
    5
    >>> thread.close()
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without a thread."""
        self._device = device
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Run a function after those submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dpllm fetch", daemon=True)
            self._thread.start()
        future: Future[_Result] = Future()
        self._tasks.put((future, function))
        return future

    def close(self) -> None:
        """Wait until the running function returns, and end the thread. Nothing can be submitted to it afterwards."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread: the model's operations use the cores meanwhile
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None:
            future, function = task
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del task, future, function  # a result must not be kept until the next one
