"""The order of calls: before a draw, a step, a save and the end all processes compare their next call.

Place in the flow: under `dpllm.training.run`. A process that is one call ahead of the others, or takes a step over
other units, would add sums of different draws, and a unit could be in two shares of one step. All calls therefore begin
with one small collective of the same shape, in which processes that are out of step find each other and stop, before
any charge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch

from dpllm.engines.processes import DisagreementError, Processes, told_by_rank

_DRAW, _STEP, _SAVE, _END = 1.0, 2.0, 3.0, 4.0
_NAMES = {
    _DRAW: "draws the units of step {}",
    _STEP: "takes step {}",
    _SAVE: "checks the weights before a save or the end, where step {} is next",
    _END: "ends the run, where step {} is next",
}


class Turns:
    """The order of draws, steps, saves and the end, the same on every process. Rank 0 draws for all.

    Args:
        processes: all processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        """Begin without a draw."""
        self._processes = processes

    def draw(self, draw_on_main: Callable[[], np.ndarray], step: int) -> np.ndarray:
        """Return the units of a step, drawn by rank 0 only and sent to the others. Called by all processes together.

        Args:
            draw_on_main: makes the draw; called on rank 0.
            step: the number of steps charged so far.

        Raises:
            DisagreementError: the processes are at different points of the run; on every process.
        """
        drawn = draw_on_main() if self._processes.is_main else np.empty(0, dtype=np.int64)
        everywhere = self._meet(_DRAW, step, [float(len(drawn))])
        count = int(everywhere[0][2])
        return self._processes.int64s_from_main(drawn, count)

    def step(self, unit_ids: np.ndarray, step: int, mode: str, error: Exception | None = None) -> None:
        """Check that all processes take one step, over the same units and in one mode, before it is computed.

        Args:
            unit_ids: (U,) the units of the step.
            step: the number of steps before this one.
            mode: settings that determine the computation and may change from step to step.
            error: the reason why this process cannot take the step.

        Raises:
            DisagreementError: they differ; on every process.
            Exception: the error of the first process that has one; on every process.
        """
        if self._processes.size == 1:
            self._processes.raise_found(error, [float(error is not None)])
            return
        units, settings = np.ascontiguousarray(unit_ids, dtype=np.int64).tobytes(), mode.encode()
        mine = [float(len(unit_ids)), *_words(units), *_words(settings), float(error is not None)]
        everywhere = self._meet(_STEP, step, mine)
        self._processes.raise_found(error, [one[7] for one in everywhere])
        for what, part in (("the units of this step", slice(2, 5)), ("autocast or training mode", slice(5, 7))):
            if any(one[part] != everywhere[0][part] for one in everywhere):
                modes = self._processes.gather(mode) if part.start == 5 else []
                shown = told_by_rank(modes or [_digest(one[3:5]) for one in everywhere])
                raise DisagreementError(
                    f"The processes differ in {what} ({shown}), so their sums would not belong to one draw. No "
                    "further step is charged. Pass every draw of PrivateRun.draws to PrivateRun.step unchanged, in "
                    "the same order and with the same settings on every process"
                )

    def save(self, step: int) -> None:
        """Check that all processes are about to compare their weights, before a save or the end.

        Args:
            step: the number of steps charged so far.

        Raises:
            DisagreementError: the processes are at different points of the run; on every process.
        """
        self._meet(_SAVE, step, [])

    def end(self, step: int) -> None:
        """Check that all processes end the run.

        Args:
            step: the number of steps charged so far.

        Raises:
            DisagreementError: the processes are at different points of the run; on every process.
        """
        self._meet(_END, step, [])

    def _meet(self, kind: float, step: int, rest: list[float]) -> list[list[float]]:
        """Return the numbers of all processes, after checking that all are at the same point."""
        try:
            everywhere = self._processes.gather_numbers([kind, float(step), *(rest + [0.0] * 6)[:6]])
        except RuntimeError as error:  # of the connection: a process ended, and the system closed its end
            words = " ".join(str(error.__cause__ or error).split())[:200]
            raise DisagreementError(
                f"This process {_NAMES[kind].format(step + 1)}, and another one has ended or cannot be reached "
                f"({words}). No further step is charged. Call next() on "
                "PrivateRun.draws, PrivateRun.step and PrivateRun.finish on every process, not only on the main one"
            ) from error
        if any(one[:2] != everywhere[0][:2] for one in everywhere):
            names = [_NAMES.get(one[0], "makes another call") for one in everywhere]
            shown = told_by_rank([name.format(int(one[1]) + 1) for name, one in zip(names, everywhere, strict=True)])
            raise DisagreementError(
                f"The processes are at different points of the run ({shown}): one of them took an extra draw, left a "
                "step out, or stopped by itself. No further step is charged. Call next() on PrivateRun.draws, "
                "PrivateRun.step and PrivateRun.finish equally often, and in the same order, on every process; decide "
                "on a stop on one process and send the decision to the others"
            )
        return everywhere


def dealing_key(processes: Processes, secret: Callable[[], int]) -> int:
    """Return 128 bits shared by all processes, for `dpllm.training.microbatches.deal`."""
    return processes.from_main(secret) & (2**128 - 1)


def mode_now(training: bool) -> str:
    """Return the settings that influence a forward pass and that a context manager may change."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    cast = [f"{kind} autocast {torch.get_autocast_dtype(kind)}" for kind in kinds if torch.is_autocast_enabled(kind)]
    return ", ".join([*cast, "training" if training else "evaluation mode"])


def _words(data: bytes) -> list[float]:
    """Return 96 bits of a hash as two numbers that float64 represents exactly."""
    digest = hashlib.sha256(data).digest()
    return [float(int.from_bytes(digest[at : at + 6], "little")) for at in (0, 6)]


def _digest(numbers: list[float]) -> str:
    return "".join(f"{int(number):012x}" for number in numbers)[:12]
