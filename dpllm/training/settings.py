"""The settings of a private run that `dpllm plan suggest` gives, with a reason for each: a point to start from.

Place in the flow: filled by `dpllm.training.suggested_run` from the plan and the model's weights, and corrected by a
rehearsal on public text (`dpllm.planning.rehearsal`). Nothing here depends on private records: of the private data,
only the public number of units enters.

The learning rate is 0.3 rms(W) / √T · r. AdamW moves each weight by about one learning rate in a random direction when
noise exceeds the signal, so after T steps the weights have moved by about √T learning rates: 0.3 of their own size.
Steps with r times the noise of independent noise follow the signal r times more slowly, and most of their noise
cancels. The constant 0.3 comes from fine-tunings of small models (`docs/correlated_noise.md` compares it with
measured rates).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpllm.config.yaml12 import read_yaml, write_yaml

WARM_UP_SHARE = 0.1
_MOVED = 0.3
_LARGEST_DECAY = 0.95
_AVERAGED_SHARE = 1 / 8


@dataclass(frozen=True)
class Setting:
    """One key of a recipe, and the suggested value.

    Attributes:
        key: dotted path.
        value: the suggestion.
        reason: one sentence or two.
        before: the value in the recipe, or the default.
    """

    key: str
    value: Any
    reason: str
    before: Any

    @property
    def differs(self) -> bool:
        """Whether the recipe has another value."""
        return bool(self.value != self.before)

    @property
    def override(self) -> str:
        """The setting as key=value.

        >>> Setting("privacy.noise", {"kind": "banded", "bands": 8}, "", None).override
        'privacy.noise={kind: banded, bands: 8}'
        """
        return f"{self.key}={flow(self.value)}"


@dataclass(frozen=True)
class Suggestion:
    """All suggested settings.

    Attributes:
        settings: one for each key.
        notes: remarks on them, one sentence or two each.
        guides: settings that stay as the recipe has them, with the value of the rule for a new recipe
            (`dpllm.privacy.defaults`). They are no part of `overrides`.
    """

    settings: tuple[Setting, ...]
    notes: tuple[str, ...] = ()
    guides: tuple[Setting, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """The settings that differ from the recipe, as key=value."""
        return [setting.override for setting in self.settings if setting.differs]

    @property
    def pasteable(self) -> str:
        """The same on one line, quoted for a shell."""
        return shlex.join(self.overrides)

    def value(self, key: str) -> Any:
        """Return the suggested value of a key."""
        return next(setting.value for setting in self.settings if setting.key == key)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "settings": [
                {"key": item.key, "value": item.value, "before": item.before, "reason": item.reason}
                for item in self.settings
            ],
            "overrides": self.overrides,
            "guides": [
                {"key": item.key, "rule": item.value, "in_the_recipe": item.before, "reason": item.reason}
                for item in self.guides
            ],
            "notes": list(self.notes),
        }

    def to_yaml(self, comments: Sequence[str]) -> str:
        """Return the settings as sections of a recipe, below comments with the reasons.

        Args:
            comments: lines above them.
        """
        sections: dict[str, dict[str, Any]] = {}
        for item in self.settings:
            section, _, key = item.key.partition(".")
            sections.setdefault(section, {})[key] = item.value
        lines = [*comments, *(f"{item.key}: {item.reason}" for item in self.settings), *self.notes]
        return "".join(f"# {line}\n" for line in lines) + write_yaml(sections)


def starting_rate(rms: float, num_steps: int, step_ratio: float = 1.0) -> float:
    """Return 0.3 rms(W) / √T · r, to two digits; see the module.

    Args:
        rms: root mean square of the trained weights.
        num_steps: T.
        step_ratio: r, the noise of a step over that of independent noise at the same ε and δ.

    Raises:
        ValueError: a number is not positive and finite.

    >>> starting_rate(0.1793, 160)
    0.0043
    """
    if not (0 < rms < math.inf and num_steps >= 1 and 0 < step_ratio < math.inf):
        raise ValueError(
            f"a learning rate cannot be computed from rms(W) = {rms}, T = {num_steps} and r = {step_ratio}: all must "
            "be positive and finite. Check the weights of the model"
        )
    return two_digits(_MOVED * rms / math.sqrt(num_steps) * step_ratio)


def rate_reason(words: str, rms: float, num_steps: int, step_ratio: float) -> str:
    """Return the reason of `starting_rate`.

    Args:
        words: the weights of which ``rms`` is the root mean square.
        rms: root mean square of the trained weights.
        num_steps: T.
        step_ratio: r.
    """
    r = (
        f"; r = {step_ratio:.3g}: a step has {step_ratio:.3g} times the noise of independent noise, which later steps "
        "cancel"
        if step_ratio != 1
        else "; r = 1: the noise is independent"
    )
    return f"0.3 · rms(W) / √T · r. rms(W) = {rms:.3g}, {words}; T = {num_steps:,}{r}."


def average_decay(num_steps: int) -> float:
    """Return the decay of the suggested average: of about 20 steps, at most an eighth of the run.

    >>> [average_decay(steps) for steps in (8, 72, 160, 4000)]
    [0.5, 0.89, 0.95, 0.95]
    """
    steps = max(2.0, _AVERAGED_SHARE * num_steps)
    return min(_LARGEST_DECAY, round(1 - 1 / steps, 2))


def two_digits(value: float) -> float:
    """Return a number rounded to two digits."""
    return float(f"{value:.2g}")


def flow(value: Any) -> str:
    """Return a value on one line, as a recipe's override reads it.

    >>> flow({"kind": "ema", "decay": 0.95}), flow(None), flow(True)
    ('{kind: ema, decay: 0.95}', 'null', 'true')
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, (bool, type(None))) else None
    text = text or (repr(value) if isinstance(value, float) else str(value))
    assert read_yaml(text) == value, "it would be read as another value"
    return text
