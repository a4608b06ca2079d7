"""The recipe of a query run: the sections ``data`` and ``privacy``, and one section of its method instead of ``train``.

Place in the flow: beside `dpllm.config.recipe`, whose rules for keys, overrides and messages it has. The
sections are those of the installed methods (`dpllm.registry`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpllm import registry
from dpllm.config import values
from dpllm.config.data_section import UNIT, DataConfig
from dpllm.config.privacy_section import PrivacyUnit
from dpllm.config.recipe import ModelConfig, ReleaseConfig, hand_over_unit, one_unit, read_raw, read_section
from dpllm.config.values import ConfigError, nearest
from dpllm.config.yaml12 import write_yaml
from dpllm.mechanism.limits import ADJACENCIES, MAX_NOISE, MAX_TARGET_EPSILON, MIN_NOISE


@dataclass(frozen=True, kw_only=True)
class QueryPrivacy(PrivacyUnit):
    """The section ``privacy`` of a query run.

    Its keywords are those of `PrivacyUnit` and these. Clipping and sampling belong to the method's own section.
    """

    epsilon: float | None = None
    """The ε that the whole run may cost; the noise is calibrated to it."""
    noise_multiplier: float | None = None
    """The standard deviation of the noise, over the largest change of an answer by one unit; instead of
    `epsilon`."""
    delta: float | None = None
    """δ, below 1/N for N units. None: 1/(10 N)."""
    adjacency: str = "zero-out"
    """Adjacency of the headline ε: "zero-out" (a unit against nothing) or "replace-one" (a unit against another)."""
    dataset: str | None = None
    """Public name of the private data set; the costs of runs on it are added up."""
    budget_file: str | None = None
    """The file with the privacy budget of all runs on this data set (`dpllm budget`); it is charged beforehand."""

    def __post_init__(self) -> None:
        """Check every value, and that one of two numbers determines the noise."""
        super().__post_init__()
        if (self.epsilon is None) == (self.noise_multiplier is None):
            given = "neither" if self.epsilon is None else "both"
            raise ConfigError(
                f"give exactly one of epsilon (the noise is calibrated to it) and noise_multiplier, got {given}"
            )
        for name, least, most in (
            ("epsilon", 0, MAX_TARGET_EPSILON),
            ("noise_multiplier", MIN_NOISE, MAX_NOISE),
        ):
            if getattr(self, name) is not None:
                self._set(name, values.between(name, getattr(self, name), least, most, above=least == 0))
        if self.delta is not None:
            self._set("delta", values.between("delta", self.delta, 0, 1, above=True, below=True))
        values.choice("adjacency", self.adjacency, ADJACENCIES)
        for name in ("dataset", "budget_file"):
            if getattr(self, name) is not None:
                values.text(name, getattr(self, name))
        if self.budget_file is not None and self.dataset is None:
            raise ConfigError(
                "budget_file needs dataset: set it to the name of the data set that the file was made for, so that no "
                "run is charged to the budget of other data"
            )

    def delta_for(self, num_units: int) -> float:
        """Return δ: the given one, or 1/(10 N)."""
        return 1 / (10 * num_units) if self.delta is None else self.delta


@dataclass(frozen=True, kw_only=True)
class QueryData(DataConfig):
    """The section ``data`` of a query run: that of a training run, whose rows need no length here."""

    max_length: int = 2048  # no part of the checks: a method that makes rows reads it
    """The most tokens of a record, where the method makes tokens of it."""


@dataclass(frozen=True, kw_only=True)
class QueryRecipe:
    """One query run: the sections of a recipe file."""

    method: str
    """Name of the method's section."""
    options: Any
    """The method's section."""
    data: QueryData
    privacy: QueryPrivacy
    output_dir: str
    """Folder of the run."""
    model: ModelConfig | None = None
    """The public model, for methods that need one."""
    release: ReleaseConfig = field(default_factory=ReleaseConfig)

    def __post_init__(self) -> None:
        """Give both sections the same column of the units."""
        privacy, data = one_unit(self.privacy, self.data)
        object.__setattr__(self, "privacy", privacy)
        object.__setattr__(self, "data", data)

    def to_yaml(self) -> str:
        """Return the text of a recipe file that makes an equal recipe."""
        plain = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        del plain["privacy"][UNIT]  # it is data.columns.unit
        method, options = plain.pop("method"), plain.pop("options")
        return write_yaml({**plain, method: options})


_SECTIONS: dict[str, type] = {
    "data": QueryData,
    "privacy": QueryPrivacy,
    "model": ModelConfig,
    "release": ReleaseConfig,
}


def method_in(path: str | Path, overrides: Sequence[str] = ()) -> str | None:
    """Return the name of the method's section in a recipe file; None for the recipe of a training run.

    Raises:
        ConfigError: the file cannot be read, or has several such sections.
    """
    return _method_of(read_raw(path, overrides), str(path))


def load_query_recipe(path: str | Path, overrides: Sequence[str] = (), method: str | None = None) -> QueryRecipe:
    """Read the recipe of a query run and apply ``key=value`` overrides; as `dpllm.config.load_recipe`.

    Args:
        path: a YAML file, or the name of a shipped recipe.
        overrides: dotted assignments, such as ``"privacy.epsilon=1"``.
        method: the section that it must have, with all its defaults if it is left out of the file. None: any.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or unusable; the message names both.
    """
    raw, source = read_raw(path, overrides), str(path)
    named = _method_of(raw, source)
    if method is not None and named not in (None, method):
        raise ConfigError(f"{source} has the section {named}: run it with `{registry.method(named).invocation} {path}`")
    if method is not None and named is None and "train" in raw:
        raise ConfigError(
            f"{source} is the recipe of a training run: run it with `dpllm train`, or replace the section train by "
            f"the section {method}"
        )
    name = named or method
    if name is None:
        raise ConfigError(
            f"{source} has no section of a method: {', '.join(registry.query_sections()) or 'none is installed'}"
        )
    sections = {**_SECTIONS, name: registry.query_sections()[name]}
    known = (*sections, "output_dir")
    for key in raw:
        if key not in known:
            raise ConfigError(
                f"{source}: unknown key {key!r}{nearest(str(key), known) or '.'} Known here: {', '.join(known)}"
            )
    hand_over_unit(raw, source)
    made: dict[str, Any] = {}
    for key, section in sections.items():
        value = raw.get(key)
        if value is None and key in ("model", "release"):
            continue
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{source}: {key!r} must be a mapping, got {values.shown(value)}")
        if value is None and key in ("data", "privacy"):
            raise ConfigError(f"{source}: missing key {key!r}; it has no default")
        made[key] = read_section(section, value or {}, source, key)
    if not isinstance(raw.get("output_dir"), str) or not raw["output_dir"].strip():
        raise ConfigError(f"{source}: output_dir must be the name of the run's folder, got {raw.get('output_dir')!r}")
    recipe = QueryRecipe(method=name, options=made.pop(name), output_dir=raw["output_dir"], **made)
    if not registry.method(name).holds_records_out and (recipe.data.eval.any):
        raise ConfigError(
            f"{source}: data.eval holds records out, and `{registry.method(name).invocation}` uses every record: leave "
            "it out, and keep "
            "records that it must not use in another file"
        )
    return recipe


def _method_of(raw: Mapping[str, Any], source: str) -> str | None:
    named = [name for name in registry.query_sections() if name in raw]
    if len(named) > 1:
        raise ConfigError(f"{source} has the sections {' and '.join(named)}: a run has one method, keep one of them")
    return named[0] if named else None
