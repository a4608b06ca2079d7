"""Show a run on the screen: its phases, and its training's bar with steps, remaining time, throughput and ε so far.

The program of recipes announces phases on every process; the first one prints. Outside of notebooks, `StepProgress`
replaces the Trainer's own bar. The first step also includes one-time checks, so the remaining time is
computed from the steps after it; the elapsed time counts from the start of the training.

Within a long step a terminal shows the completed share. It depends on the number of drawn units, which ε
does not cover, so it goes to a terminal only; output that is redirected to a file only says that the step is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from tqdm import auto, tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from dpllm.engines.processes import Processes
from dpllm.privacy.rounding import up_significant
from dpllm.training.step import Progress, unseen


class Phases:
    """The phases of one run.

    Args:
        console: console to print to; a quiet one prints nothing.
        bars: whether progress bars are shown.
    """

    def __init__(self, console: Console, bars: bool = True) -> None:
        """Begin without a phase."""
        self.console, self.bars = console, bars
        self._name: str | None = None
        self._since = 0.0

    def begin(self, name: str, words: str = "") -> None:
        """End the previous phase, and print the name of the next one.

        Args:
            name: name of the phase.
            words: text after the name.
        """
        self.end()
        Processes.mark(name)
        self._name, self._since = name, time.monotonic()
        self.console.print(f"\n{name}", style="bold", end="" if words else "\n")
        if words:
            self.console.print(f": {words}", markup=False)

    def say(self, text: str) -> None:
        """Print a line of the current phase."""
        self.console.print(f"  {text}", style="dim", markup=False)

    def end(self, words: str = "") -> None:
        """End the current phase, if there is one, and print its time.

        Args:
            words: the result, in a few words.
        """
        if self._name is None:
            return
        self.say(f"{time.monotonic() - self._since:.1f} s{f': {words}' if words else ''}")
        self._name = None

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that advances a bar by a number of parts."""
        hidden = self.console.quiet or not self.bars
        with auto.tqdm(total=total, unit=unit, dynamic_ncols=True, leave=False, disable=hidden) as shown:

            def moved(parts: int) -> None:
                shown.update(parts)

            yield moved


_ON_A_TERMINAL, _IN_A_FILE = 1.0, 30.0
"""Seconds between two messages about a step that is under way."""
_SHARE = 100  # ε is computed again after this many times the time that it took


@dataclass(frozen=True)
class Batch:
    """The expected batch of a step: public, unlike the number of units that a step draws.

    Attributes:
        units: expected number of units of privacy, or of rows where rows are drawn.
        tokens: tokens of that many units, at the mean length of the rows.
    """

    units: int
    tokens: float


class StepBar(tqdm):
    """A bar whose remaining time is computed from the steps after the first one.

    Attributes:
        measured: number of the steps after the first one, and their seconds.
    """

    measured: tuple[int, float] = (0, 0.0)

    @property
    def format_dict(self) -> dict[str, Any]:
        """Return the figures that are shown, with the rate of the measured steps; before them the rate is unknown."""
        figures = super().format_dict
        steps, seconds = self.measured
        if steps and seconds > 0:
            return {**figures, "rate": steps / seconds}
        return {**figures, "rate": None, "initial": figures["n"]}


class StepProgress(ProgressCallback):
    """The Trainer's bar with throughput and ε.

    Args:
        batch: the expected batch of a step.
        epsilon: returns ε spent so far.
    """

    def __init__(self, batch: Batch, epsilon: Callable[[], float]) -> None:
        """Store the sources of the figures."""
        super().__init__()
        self._batch, self._epsilon = batch, epsilon
        self._first: tuple[int, float] | None = None  # the step from which time counts
        self._spent, self._next = "", 0.0  # ε in words, and the time from which it is computed again
        self._counted = 0  # the steps that this ε counts
        self._figures: list[str] = []
        self._shown = 0.0  # the time of the last message

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar, from the step at which a resumed run continues."""
        self._first, self._figures = None, []
        self.current_step = state.global_step
        if state.is_world_process_zero:
            bar: Any = StepBar(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)
            bar.set_postfix_str(f"step {state.global_step + 1}: one-time checks")
            self.training_bar = bar

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note that a step is under way."""
        self._shown = time.time()

    def moved(self, done: float) -> None:
        """Show that a step is still running, if the last message is old.

        Args:
            done: completed share of the step, from 0 to 1.
        """
        bar: Any = self.training_bar
        now = time.time()
        if bar is None:
            return
        on_terminal = getattr(bar.fp, "isatty", bool)()
        if now < self._shown + (_ON_A_TERMINAL if on_terminal else _IN_A_FILE):
            return
        self._shown = now
        how_far = f"{done:.0%}" if on_terminal else "under way"
        bar.set_postfix_str(", ".join([*self._figures, f"step {bar.n + 1}: {how_far}"]))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar."""
        bar = self.training_bar
        if bar is None:
            return
        now = time.time()
        words = [self._epsilon_now(now, state)]
        if self._first is None:
            self._first = (state.global_step, now)
        else:
            bar.measured = (state.global_step - self._first[0], max(now - self._first[1], 1e-9))
            rate = bar.measured[0] / bar.measured[1]
            words += [f"{self._batch.units * rate:,.0f} units/s", f"{self._batch.tokens * rate:,.0f} tokens/s"]
        self._figures = words
        bar.set_postfix_str(", ".join(words), refresh=False)
        super().on_step_end(args, state, control, **kwargs)

    def _epsilon_now(self, now: float, state: TrainerState) -> str:
        """Return ε, recomputed at the end and whenever that takes a small share of the time; else with its step."""
        if now >= self._next or state.global_step >= state.max_steps:
            self._spent, self._counted = _words(self._epsilon()), state.global_step
            self._next = now + _SHARE * (time.time() - now)
        return self._spent if self._counted == state.global_step else f"{self._spent} after step {self._counted}"

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the line, and take the ε in it, which was computed just now."""
        if logs is not None and "epsilon" in logs:
            self._spent, self._counted = _words(logs["epsilon"]), state.global_step
        super().on_log(args, state, control, logs=logs, **kwargs)


def progress_of(callbacks: Iterable[Any]) -> Progress:
    """Return the function that shows a step's progress: that of the bar, if there is one among the callbacks."""
    return next((one.moved for one in callbacks if isinstance(one, StepProgress)), unseen)


def _words(epsilon: float) -> str:
    return f"ε {up_significant(epsilon)}"
