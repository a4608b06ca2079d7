"""The search file of a private tuning: the distribution of the number of runs, and the candidates.

Place in the flow: first, in `dpllm methods tune`. The candidates are public and fixed before the runs:

    runs: {kind: logarithmic, mean: 10}
    candidates:
      train.learning_rate: [1.0e-3, 3.0e-3, 1.0e-2]
      privacy.clip_norm: [0.3, 1.0]

All combinations of the values are candidates, and each run draws one of them uniformly.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.config import ConfigError
from dpllm.config.values import nearest
from dpllm.config.yaml12 import read_yaml
from dpllm.mechanism.parts import Spec
from dpllm.mechanism.selection import Selection

MAX_CANDIDATES = 10_000
_SECTIONS = ("model.", "train.", "public_pretrain.train.")
_OTHERS = ("privacy.clip_norm", "privacy.clipping")
_REFUSED = (
    *(
        "model.task",
        "model.start_is_independent",
        "train.output_dir",
        "train.resume_from_checkpoint",
        "train.report_to",
        "train.logging_dir",
    ),
    *("train.push_to_hub", "train.hub_model_id", "train.hub_strategy", "train.hub_token", "train.run_name"),
)


@dataclass(frozen=True)
class Search:
    """A search file as it was read.

    Raises:
        ConfigError: a key may not be searched over, or has no values.
    """

    selection: Selection
    """The distribution of the number of runs."""
    values: Mapping[str, tuple[Any, ...]]
    """The values of each key of the recipe, as a dotted path."""

    def __post_init__(self) -> None:
        """Check the keys and the number of candidates."""
        number = 1
        for key, values in self.values.items():
            if key in _REFUSED or not (key in _OTHERS or key.startswith(_SECTIONS)):
                raise ConfigError(
                    f"candidates.{key} cannot be searched over: a search varies keys of {', '.join(_SECTIONS)} and "
                    f"{', '.join(_OTHERS)}, since all runs need the same data and the same ε, and their results stay "
                    "in one folder. Set it in the recipe"
                )
            if not values:
                raise ConfigError(f"candidates.{key} has no values: write a list, such as {key}: [0.1, 0.3]")
            number *= len(values)
        if number > MAX_CANDIDATES:
            raise ConfigError(f"the search has {number:,} candidates, more than {MAX_CANDIDATES:,}: give fewer values")

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """All combinations of the values, in a fixed order."""
        return [dict(zip(self.values, chosen, strict=True)) for chosen in itertools.product(*self.values.values())]


def load_search(path: str | Path) -> Search:
    """Read a search file.

    Raises:
        ConfigError: it cannot be read, or a key is missing, unknown or out of range.
    """
    try:
        raw = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    known = ("runs", "candidates")
    if not isinstance(raw, dict) or set(raw) != set(known):
        unknown = [key for key in raw if key not in known] if isinstance(raw, dict) else []
        hint = f"; {unknown[0]!r} is unknown{nearest(str(unknown[0]), known)}" if unknown else ""
        raise ConfigError(f"{path}: a search has the sections runs and candidates{hint}")
    candidates = raw["candidates"]
    if not isinstance(candidates, dict) or not candidates:
        raise ConfigError(f"{path}: candidates must be a mapping from keys of the recipe to lists of values")
    for key, values in candidates.items():
        if not isinstance(values, list):
            raise ConfigError(f"{path}: candidates.{key} must be a list of values, got {values!r}")
    try:
        selection = Selection.of(Spec.of(raw["runs"]))
    except ValueError as error:
        raise ConfigError(f"{path}: runs: {str(error).replace('selection', 'runs')}") from error
    try:
        return Search(selection, {str(key): tuple(values) for key, values in candidates.items()})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def overrides_of(candidate: Mapping[str, Any]) -> list[str]:
    """Return the overrides of a recipe that set a candidate's values.

    >>> overrides_of({"train.learning_rate": 0.003})
    ['train.learning_rate=0.003']
    """
    return [f"{key}={json.dumps(value)}" for key, value in candidate.items()]
