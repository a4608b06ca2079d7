"""Step 5: a whole private step, and the rows' independence as this device measures it.

The step draws units, runs its microbatches, adds noise, watches weights and state, compares rows, and ends with AdamW.
It is timed next to the same loop without privacy on the same rows. The other figures stop at the clipped sum.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from throughput import Settings, build_model
from torch import Tensor, nn

from dpllm import PrivacyConfig, PrivateRun, TrainingRows, make_plan, per_sequence_loss
from dpllm.data.units import UnitIndex
from dpllm.ghost import NormMethod
from dpllm.training.checks.differences import Bound, Precision
from dpllm.training.checks.independence import IndependenceCheck, IndependenceError
from gpu.record import Figures, brief
from gpu.setting import Setting, free_memory, synchronize

MICROBATCHES, STEPS, WARMUP = 8, 5, 2
GOALS = {1: 0.93, 4: 0.97}
"""Speed that a whole step should reach, as a share of the same step without privacy, by row of the target table."""


@dataclass
class Loop:
    """A training loop on made-up rows of nearly the same length.

    Attributes:
        settings: the model, and the rows and tokens of a microbatch.
        setting: the run.
        microbatches: microbatches of a step, on average.
        autocast: whether the forward pass runs under autocast to bfloat16.
    """

    settings: Settings
    setting: Setting
    microbatches: int
    autocast: bool = False

    def __post_init__(self) -> None:
        """Draw the rows, from a fixed seed."""
        tokens = self.settings.tokens
        rng = np.random.default_rng(0)
        self.num_rows = 4 * self.settings.batch * self.microbatches
        vocabulary = 97 if self.setting.toy else 32_000
        self.ids = rng.integers(3, vocabulary, (self.num_rows, tokens))
        self.lengths = np.array([tokens - n % 5 for n in range(self.num_rows)])

    @property
    def rows_per_step(self) -> int:
        """Rows of a step, on average."""
        return self.settings.batch * self.microbatches

    def fetch(self, numbers: Any) -> list[Any]:
        """Rows by number."""
        return [self.ids[int(n), : self.lengths[int(n)]] for n in numbers]

    @staticmethod
    def collate(rows: list[Any]) -> dict[str, Tensor]:
        """Pad rows with token 0, which no row has."""
        ids = nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    def loss(self, model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """One loss per row."""
        device = self.setting.device
        inputs = {name: value.to(device) for name, value in inputs.items()}
        labels = inputs.pop("labels")
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            logits = model(**inputs).logits
        return per_sequence_loss(logits, labels)

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and its optimizer."""
        free_memory()
        model = build_model(self.settings)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def plain(self, steps: int) -> list[float]:
        """Train without privacy; return each step's seconds for a row."""
        model, optimizer = self.fresh()
        seconds, rng = [], np.random.default_rng(1)
        for _ in range(steps):
            begin = self._now()
            for _ in range(self.microbatches):
                numbers = rng.choice(self.num_rows, self.settings.batch, replace=False)
                losses_B = self.loss(model, self.collate(self.fetch(numbers)))
                (losses_B.sum() / self.rows_per_step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append((self._now() - begin) / self.rows_per_step)
        return seconds

    def private(self, steps: int, after_first: Callable[[PrivateRun], None], fused: bool | None = None) -> list[float]:
        """Train privately; return each step's seconds for a row.

        Args:
            steps: their number.
            after_first: called with the run after its first step.
            fused: False: the PyTorch forms instead of the Triton kernels.
        """
        model, optimizer = self.fresh()
        privacy = PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=self.rows_per_step, delta=1e-5)
        rows = TrainingRows(
            units=UnitIndex.one_row_per_unit(self.num_rows),
            lengths=self.lengths,
            fetch=self.fetch,
            collate=self.collate,
            max_rows=self.settings.batch,
            fetch_ahead=True,
        )
        seconds = []
        with tempfile.TemporaryDirectory(dir=self.setting.folder) as folder:
            run = PrivateRun.start(f"{folder}/run", make_plan(privacy, self.num_rows, steps + 1), rows)
            run.attach(
                model,
                optimizer,
                norm_method=NormMethod(fused=fused),
                start_is_independent=True,
                schedule_is_independent=True,
            )
            try:
                for units in run.draws(steps):
                    begin = self._now()
                    done = run.step(units, self.loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    seconds.append((self._now() - begin) / max(1, done.num_units))  # a small draw may be empty
                    if len(seconds) == 1:
                        after_first(run)
                    if len(seconds) > WARMUP and self.setting.is_over():
                        break
            finally:
                run.detach()
        return seconds

    def _now(self) -> float:
        synchronize(self.setting.device)
        return time.perf_counter()


def measure(figures: Figures, setting: Setting, number: int) -> None:
    """Time a whole step of row ``number`` of the target table without and with privacy, each by itself."""
    _, settings = setting.row(number)
    microbatches, steps = (2, 3) if setting.toy else (MICROBATCHES, STEPS)
    loop = Loop(settings, setting, microbatches)
    figures["goal"] = GOALS[number]
    try:
        figures["plain_ms"] = [1e3 * one for one in loop.plain(steps - 1)[1:]]
        figures["plain_peak_bytes"] = _peak(setting)
        figures.say(f"non-private: {statistics.median(figures['plain_ms']):.2f} ms a row")
    except Exception as error:  # the private loop is measured all the same
        figures.require(False, f"non-private: {brief(error)}")
    seconds = compared(figures, loop, steps)
    figures["first_step_s"] = seconds[0] * loop.rows_per_step
    figures["private_ms"] = [1e3 * one for one in seconds[WARMUP:]]  # the second step compares rows again
    figures["private_peak_bytes"] = _peak(setting)
    own = statistics.median(figures["private_ms"])
    figures.say(f"dpllm: {own:.2f} ms a row, first step {figures['first_step_s']:.1f} s")
    if figures.get("plain_ms"):
        figures["speed_ratio"] = statistics.median(figures["plain_ms"]) / own
        ratios = f"speed {figures['speed_ratio']:.3f} (goal {GOALS[number]})"
        if figures["plain_peak_bytes"]:
            figures["memory_ratio"] = figures["private_peak_bytes"] / figures["plain_peak_bytes"]
            ratios += f", memory {figures['memory_ratio']:.3f}"
        figures["summary"] = f"whole step {ratios}; rows {figures['rows']}"
        figures.say(figures["summary"])


def row_differences(figures: Figures, setting: Setting, precision: str) -> None:
    """Print how far a row's loss and gradient norm alone and with other rows differ, at the width of 1B.

    Args:
        figures: the figures.
        setting: the run.
        precision: "float32", or "autocast" for float32 weights under autocast to bfloat16.
    """
    _, settings = setting.row(1)
    settings = replace(settings, dtype="float32")
    compared(figures, Loop(settings, setting, 2, autocast=precision == "autocast"), steps=1)
    figures["summary"] = f"rows {figures['rows']}"


def compared(figures: Figures, loop: Loop, steps: int) -> list[float]:
    """Run the private loop, keep the differences of its first comparison of rows, and return each step's seconds.

    If the comparison refuses the step, the loop runs again without a bound, and then without the comparison. If the
    Triton kernels fail, it runs again with the PyTorch forms. Each is WRONG, and the figures exist.
    """

    def keep(run: PrivateRun) -> None:
        figures["first_step_peak_bytes"] = _peak(loop.setting)  # with the comparison of rows
        free_memory()
        seen = run.row_differences
        if seen is None:
            return
        allowed = figures.get("rows_allowed", seen.tolerance)
        figures.update(rows_loss=seen.loss, rows_norm=seen.norm, rows_allowed=allowed)
        figures["rows"] = f"loss {seen.loss:.1e}, norm {seen.norm:.1e}, allowed {allowed:.0e}"
        figures.say(f"rows alone and together: {figures['rows']}")

    figures["rows"] = "not compared"
    fused = None if loop.setting.fused else False
    checks: list[Callable[[Figures], contextlib.AbstractContextManager]] = [as_it_is, without_bound, without_comparison]
    while True:
        if fused is False:
            figures.say("dpllm: PyTorch forms")
        try:
            with checks[0](figures):
                return loop.private(steps, keep, fused)
        except IndependenceError as error:
            problem = f"the comparison of rows refuses this model: {brief(error)}"
            del checks[0]
        except Exception as error:
            if fused is False:
                raise
            problem, fused = f"dpllm: {brief(error)}", False
        figures.require(False, problem)  # after the exception, which holds the model's memory, is gone


def as_it_is(figures: Figures) -> contextlib.AbstractContextManager:
    """Change nothing."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def without_bound(figures: Figures) -> Iterator[None]:
    """Let the comparison of rows accept any difference, and keep the usual bound in the figures."""
    usual = Precision.bound

    def any_difference(self: Precision) -> Bound:
        figures["rows_allowed"] = usual(self).relative
        return Bound(float("inf"))

    with mock.patch.object(Precision, "bound", any_difference):
        yield


@contextlib.contextmanager
def without_comparison(figures: Figures) -> Iterator[None]:
    """Leave the comparison of rows out."""
    with mock.patch.object(IndependenceCheck, "before_step", lambda *_, **__: None):
        yield


def _peak(setting: Setting) -> int:
    return torch.cuda.max_memory_allocated() if setting.device.type == "cuda" else 0
