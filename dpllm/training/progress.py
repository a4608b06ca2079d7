"""The bar of a private training: steps, time left, throughput and ε so far.

Place in the flow: in place of the Trainer's own bar, outside of notebooks. The first step also has checks that come
once, so the time left is computed from the steps after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from dpllm.privacy.rounding import epsilon_to_log, format_epsilon

_SHARE = 100  # ε is computed again after this many times the time that it took


@dataclass(frozen=True)
class Batch:
    """The expected batch of a step: public, unlike the number of units that a step draws.

    Attributes:
        units: expected number of units of privacy, or of rows where rows are drawn.
        tokens: of that many, at the mean length of the rows.
    """

    units: int
    tokens: float


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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar, from the step at which a resumed run goes on."""
        super().on_train_begin(args, state, control, **kwargs)
        self._first = None
        self.current_step = state.global_step
        if self.training_bar is not None:
            self.training_bar.smoothing = 0  # the mean of all steps, and not of the last ones
            self.training_bar.unit = "step"
            self.training_bar.initial = self.training_bar.n = state.global_step
            self.training_bar.set_postfix_str("the first step has checks that come once")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        bar = self.training_bar
        if bar is None:
            return
        now = time.time()
        words = [self._epsilon_now(now, state)]
        if self._first is None:
            self._first = (state.global_step, now)
            bar.initial, bar.start_t = state.global_step, now
        else:
            rate = (state.global_step - self._first[0]) / max(now - self._first[1], 1e-9)
            words += [f"{self._batch.units * rate:,.0f} units/s", f"{self._batch.tokens * rate:,.0f} tokens/s"]
        bar.set_postfix_str(", ".join(words), refresh=False)
        super().on_step_end(args, state, control, **kwargs)

    def _epsilon_now(self, now: float, state: TrainerState) -> str:
        """Return ε, computed again at the end and when this takes a small share of the time; else with its step."""
        if now >= self._next or state.global_step >= state.max_steps:
            self._spent, self._counted = _words(epsilon_to_log(self._epsilon())), state.global_step
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


def _words(epsilon: float) -> str:
    return f"ε {format_epsilon(epsilon)}"
