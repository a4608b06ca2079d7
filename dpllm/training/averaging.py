"""Maintain the average of a run's private iterates, in float32 shards: update, save, load, show and release it.

The specification is `dpllm.mechanism.averages.Average`; this module has the state of a run.

Guarantee: the average is computed from weights that private steps have updated, and from nothing else. It is therefore
post-processing of the releases, and ε does not depend on it:

* It is updated inside the optimizer's step, right after the watch (`dpllm.training.checks.watch`) has accepted the
  gradient. Weights that anything else has written are an error before the next step or save.
* The weights after a step enter at most once, and the weights before the first step never enter.
* Only trained parameters enter: buffers and frozen parameters do not change during a run.
* A checkpoint contains checksums of the average, which a load compares. It can only be loaded before the first step of
  a start.

Each process stores the average of its fragments of the optimizer's weights (`dpllm.training.weight_shards`). A
checkpoint stores them by name and position, so any number of processes, also on a different engine, may continue.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dpllm.config import ConfigError
from dpllm.engines.checksums import Checksum, placed_sum, values
from dpllm.engines.processes import Processes
from dpllm.mechanism.averages import Average, average_of, is_average
from dpllm.models.run_weights import RunWeights
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError
from dpllm.privacy.ledger_reader import LedgerHead, noted_before
from dpllm.report.definition import RELEASED_WEIGHTS
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.weight_shards import WeightFragments

AVERAGE_FOLDER = "average"
"""Folder within a checkpoint: the average, next to the weights."""
CHANGED = (
    "The weights changed while the model held the run's average, and files saved after that hold the changed ones. "
    "The guarantee covers that only where the change depends on nothing but what the run released: confirm it, or save "
    "the average unchanged."
)
"""The open point of such a run."""
_STATE_FILE = "average.json"
_SHARDS = "rank_*.safetensors"
_STATE = {"average": str, "count": int, "last": int, "sizes": dict, "ledger": dict, "sums": dict}


class AverageError(ValueError):
    """The average of a checkpoint cannot be continued."""


def checked_average(value: Any) -> Average | None:
    """Return the average that an option describes (`dpllm.mechanism.averages.average_of`).

    Raises:
        ConfigError: the option is invalid.
    """
    try:
        return average_of(value)
    except ValueError as error:
        raise ConfigError(f"train.{error}") from error


def refuse_other_average(folder: Path, now: str | None) -> None:
    """Check that a continued run releases the same kind of weights as at its start; for one process.

    Args:
        folder: folder of the run.
        now: `Averaging.words` of this start. None: no average.

    Raises:
        ConfigError: the ledger names a different average, or none.
    """
    begun, noted = noted_before(folder / LEDGER_FILE, RELEASED_WEIGHTS)
    if begun and noted != now:
        raise ConfigError(
            f"The run in {folder} releases {noted or 'the weights after its last step'}, but train.average now asks "
            f"for {now or 'none'}. Resume with the train.average of the first start"
        )


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The parts of an attached run from which weights enter."""

    fragments: WeightFragments
    ledger: SharedLedger
    weights: RunWeights
    processes: Processes
    accept_restored: Callable[[], None]
    raises_versions: bool


class Averaging:
    """The average of one run.

    Attributes:
        average: the specification.
        count: number of steps whose weights have entered.
        is_shown: whether the model holds the average at the moment.

    Args:
        average: the specification.
        num_steps: T of the plan.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(self, average: Average, num_steps: int) -> None:
        """Begin without weights."""
        if not is_average(average):
            raise ConfigError(f"the average is {average!r}: pass average_of(...) from dpllm.mechanism.averages")
        if type(num_steps) is not int or num_steps < 1:
            raise ConfigError(f"num_steps of the average is {num_steps!r}: pass the plan's num_steps")
        self.average, self._num_steps = average, num_steps
        self.count, self.is_shown = 0, False
        self._last = 0  # the step whose weights entered last
        self._values: dict[str, Tensor] = {}
        self._shown: Checksum | None = None  # of the model while it holds the average
        self._source: _Source | None = None

    @property
    def words(self) -> str:
        """Description of the released weights, for report and card."""
        return self.average.words(self._num_steps)

    def attach(
        self,
        parameters: Mapping[str, nn.Parameter],
        module: nn.Module,
        *,
        deepspeed: Any,
        weights: RunWeights,
        ledger: SharedLedger,
        num_steps: int,
        processes: Processes,
        accept_restored: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow an attached model; the caller calls `update` after each update. Called by all processes together.

        Args:
            parameters: the clipped parameters by name.
            module: the module inside its engine's wrapper.
            deepspeed: DeepSpeed's engine; None: another engine.
            weights: initial and final weights of the run.
            ledger: ledger of the run; a loaded average must belong to the same run.
            num_steps: T of the run's plan.
            processes: all processes.
            accept_restored: called when the weights are in the model again, where the watch would see a write.

        Raises:
            ConfigError: this object holds weights of another run, or was made for a different T; on every process.
            EngineError: averages do not support the way in which the engine shards the weights.
        """
        processes.together(lambda: self._refuse_other_run(ledger, num_steps))
        fragments = WeightFragments(parameters, module, deepspeed, processes)
        self._source = _Source(
            fragments=fragments,
            ledger=ledger,
            weights=weights,
            processes=processes,
            accept_restored=accept_restored,
            raises_versions=deepspeed is not None,  # ZeRO-3 writes the shards of a whole parameter
        )

    def _refuse_other_run(self, ledger: SharedLedger, num_steps: int) -> None:
        if self.count and self._source is not None and self._source.ledger is not ledger:
            raise ConfigError(
                f"This Averaging holds weights of the run in {self._source.ledger.path.parent}, which another run's ε "
                "does not cover. Make an Averaging for each run; to resume a run, call load with its checkpoint"
            )
        if num_steps != self._num_steps:
            raise ConfigError(
                f"This Averaging was made for {self._num_steps} steps, but the run's plan has {num_steps}. Make "
                f"it with num_steps={num_steps}"
            )

    # ------------------------------------------------------------------ steps

    def update(self) -> None:
        """Let the weights after the last charged step enter, unless they have already entered or come too early."""
        source = self._attached()
        step = source.ledger.num_steps
        if step <= self._last or not self.average.enters(step, self._num_steps):
            return
        self.count, self._last = self.count + 1, step
        rate = self.average.rate(self.count)
        with torch.no_grad():
            for name in source.fragments.starts:
                present = source.fragments.read(name)
                if self.count == 1:
                    self._values[name] = present.clone()
                else:
                    self._values[name].lerp_(present, rate)

    # ------------------------------------------------------------------ the model

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Put the average into the model while the block runs; on all processes together.

        Before the first weights have entered, the model keeps its own weights.
        """
        if self.is_shown or not self.count:
            yield
            return
        self._show()
        try:
            yield
        finally:
            self._hide()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Put the weights after the last step into the model while the block runs; on all processes together."""
        if not self.is_shown:
            yield
            return
        self._hide()
        try:
            yield
        finally:
            self._show()

    def release(self) -> None:
        """Copy the averaged weights into the model. Call it on every process after training.

        The weights that it replaces are recognised as left by this run.
        """
        if self.count and not self.is_shown:
            self._attached().weights.leave()
            self._show()

    def _show(self) -> None:
        source = self._attached()
        source.fragments.show(self._values)
        self._shown = Checksum(source.fragments.present())
        self.is_shown = True
        source.weights.leave()  # a later run in this process that starts from the average starts from this release

    def _hide(self) -> None:
        source = self._attached()
        shown, now = values([self._shown or Checksum([]), Checksum(source.fragments.present())])
        source.fragments.restore()
        self.is_shown = False
        if shown != now or source.raises_versions:
            source.accept_restored()
        if shown != now:
            with contextlib.suppress(LedgerError):  # the run has ended, and its report names the files that existed
                source.ledger.append_open_point(CHANGED)

    def _attached(self) -> _Source:
        if self._source is None:
            raise ConfigError("The average follows no model: pass it to PrivateRun.attach(averaging=...) first")
        return self._source

    # ---------------------------------------------------------- checkpoints

    def save(self, checkpoint: str | Path) -> None:
        """Write this process's part into a checkpoint's folder; on all processes together.

        Raises:
            OSError: the disk failed, on this process.
        """
        source = self._attached()
        folder = Path(checkpoint) / AVERAGE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        sums = self._sums_of(self._values) if self.count else {}
        if source.processes.is_main:
            state: dict[str, Any] = {
                "average": self.words,
                "count": self.count,
                "last": self._last,
                "sizes": source.fragments.sizes,
            }
            state |= {"ledger": source.ledger.head.to_dict(), "sums": sums}
            (folder / _STATE_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        if self._values and source.fragments.is_owner:
            starts = {name: str(start) for name, start in source.fragments.starts.items()}
            parts = {name: values.cpu().contiguous() for name, values in self._values.items()}
            save_file(parts, folder / f"rank_{source.processes.rank:05d}.safetensors", metadata=starts)

    def load(self, checkpoint: str | Path) -> None:
        """Continue the average of a checkpoint; on all processes together, after `attach`.

        The number of processes and the engine may differ from those that saved it.

        Raises:
            AverageError: a step was charged since this start or resume; or the checkpoint holds no average, a different
                one, an incomplete one, or changed values; on every process.
            LedgerError: the average belongs to another run, whose ε this ledger does not state; on every process.
        """
        source, folder = self._attached(), Path(checkpoint) / AVERAGE_FOLDER
        if source.ledger.num_steps != source.ledger.num_steps_before:
            raise AverageError(
                f"{checkpoint} cannot be loaded as the average of the weights: this run has already taken steps, which "
                "the loaded average would not contain. Load it after attach, before the first draw"
            )
        state = source.processes.together(lambda: self._state_in(folder, source.fragments))
        head = LedgerHead.of(state["ledger"])
        source.ledger.require_prefix(head, f"The average in {checkpoint}")
        values = source.processes.together(lambda: self._values_in(folder, state, source.fragments))
        sums = self._sums_of(values) if state["count"] else {}
        if sums != state["sums"] or not 0 <= state["count"] <= state["last"] <= head.num_steps:
            raise AverageError(
                f"The values in {folder} are not those that the run saved: they were edited or are damaged. Resume "
                "from another checkpoint"
            )
        self.count, self._last, self._values = state["count"], state["last"], values

    def _sums_of(self, values: Mapping[str, Tensor]) -> dict[str, int]:
        """Return a checksum of each whole parameter's values, the same on all processes, which call it together.

        Replicas hold the same fragments. If their values differ, the checksums match no average.
        """
        source = self._attached()
        here = {(name, start): placed_sum(values[name], start) for name, start in source.fragments.starts.items()}
        parts = {part for found in source.processes.gather(here) for part in found.items()}
        total = dict.fromkeys((name for (name, _), _ in sorted(parts)), 0)
        for (name, _), one in parts:
            total[name] = (total[name] + one) % 2**64
        return total

    def _state_in(self, folder: Path, fragments: WeightFragments) -> dict[str, Any]:
        """Return the state of a saved average, after comparing it with this one."""
        try:
            state = json.loads((folder / _STATE_FILE).read_text(encoding="utf-8"))
        except OSError as error:
            raise AverageError(
                f"{folder.parent} holds no average of the weights ({error.strerror}), so the average cannot be "
                "continued. Resume from a checkpoint that was made with train.average, or start a new run"
            ) from error
        except ValueError as error:
            state = {"error": error}
        known = isinstance(state, dict) and set(state) == set(_STATE)
        if not known or any(type(state[name]) is not kind for name, kind in _STATE.items()):
            raise AverageError(
                f"{folder / _STATE_FILE} was not written by this version of dpllm: it is incomplete, edited or from "
                "another version. Resume from another checkpoint"
            )
        if state["average"] != self.words or state["sizes"] != fragments.sizes:
            raise AverageError(
                f"{folder} holds {state['average']}, which does not match {self.words} of this model. Resume "
                "with the model and the train.average of the first start"
            )
        return state

    @staticmethod
    def _values_in(folder: Path, state: Mapping[str, Any], fragments: WeightFragments) -> dict[str, Tensor]:
        """Return this process's part of a saved average."""
        if not state["count"]:
            return {}
        values = {name: torch.full_like(fragments.read(name), torch.nan) for name in fragments.starts}
        found = dict.fromkeys(values, 0)
        for path in sorted(folder.glob(_SHARDS)):
            try:
                for name, count in _read(path, values, fragments.starts).items():
                    found[name] += count
            except (SafetensorError, ValueError, RuntimeError) as error:
                raise AverageError(f"{path} cannot be read ({error}). Resume from another checkpoint") from error
        lacking = [name for name, count in found.items() if count != values[name].numel()]
        if lacking:
            raise AverageError(
                f"{folder} does not hold the whole average of {lacking[0]} ({found[lacking[0]]} of "
                f"{values[lacking[0]].numel()} entries of this process). Resume from another checkpoint"
            )
        return values


def _read(path: Path, values: Mapping[str, Tensor], starts: Mapping[str, int]) -> dict[str, int]:
    """Copy from one process's file, and return the number of entries of each parameter."""
    with safe_open(path, framework="pt") as file:
        saved = {name: int(start) for name, start in (file.metadata() or {}).items()}
        return {
            name: _fill(values[name], starts[name], file.get_slice(name), saved[name])
            for name in saved.keys() & values.keys()
        }


def _fill(values: Tensor, start: int, saved: Any, saved_start: int) -> int:
    """Copy the entries that a saved fragment shares with a fragment of this process; return their number."""
    (length,) = saved.get_shape()
    first, end = max(start, saved_start), min(start + values.numel(), saved_start + length)
    if first >= end:
        return 0
    values[first - start : end - start].copy_(saved[first - saved_start : end - saved_start])
    return end - first
