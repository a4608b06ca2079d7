"""Random choices of the independence checks: rows, orders, and random states of passes.

Place in the flow: below `dpllm.training.checks.independence`. The choices come from the operating system. Where all
processes take the same rows (tensor parallelism), they have to choose alike: then rank 0's entropy is shared for the
duration of a check. The choices have no part in the mechanism.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Iterator

from dpllm.engines.processes import Processes

_BYTES = 32
_alike: list[random.Random] = []  # the innermost last


def source() -> random.Random:
    """Return the source of the next choices: the operating system's, or within `alike` the shared one.

    >>> 0 <= source().getrandbits(4) < 16
    True
    """
    return _alike[-1] if _alike else secrets.SystemRandom()


@contextlib.contextmanager
def alike(processes: Processes, are_same: bool) -> Iterator[None]:
    """Let all processes make the same choices within the block. Called by all of them together.

    Args:
        processes: all processes.
        are_same: whether they take the same rows; if false, or in a single process, nothing changes.
    """
    if not are_same or processes.size == 1:
        yield
        return
    _alike.append(random.Random(processes.from_main(lambda: secrets.token_bytes(_BYTES))))
    try:
        yield
    finally:
        _alike.pop()
