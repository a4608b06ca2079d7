"""The recipe of a query run: the sections ``data`` and ``privacy``, and one section of its method instead of ``train``.

Keys, overrides and errors follow the rules of `dpllm.config.recipe`. The installed methods have the sections
(`dpllm.registry`).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import Field

from dpllm.config.data_section import DataConfig
from dpllm.config.privacy_section import (
    NO_SUCH_EPSILON,
    USUAL_DELTA,
    Delta,
    Epsilon,
    PrivacyUnit,
    require_dataset,
)
from dpllm.config.recipe import ModelConfig, ReleaseConfig, one_unit, refuse_shipped_name
from dpllm.config.recipe_file import UNIT
from dpllm.config.sections import Number, OneOf, Text, Whole, assign, section
from dpllm.config.values import ConfigError
from dpllm.config.yaml12 import write_yaml
from dpllm.mechanism.limits import ADJACENCIES, MAX_NOISE, MIN_NOISE


@section
class QueryPrivacy(PrivacyUnit):
    """The section ``privacy`` of a query run.

    Its keywords are those of `PrivacyUnit` and these. Clipping and sampling belong to the method's own section.
    """

    epsilon: Annotated[Epsilon | None, NO_SUCH_EPSILON] = None
    """The ε that the whole run may cost; the noise is calibrated to it."""
    noise_multiplier: Annotated[Number, Field(ge=MIN_NOISE, le=MAX_NOISE)] | None = None
    """The standard deviation of the noise, over the largest change of an answer by one unit; instead of epsilon."""
    delta: Annotated[Delta | None, USUAL_DELTA] = None
    """δ, below 1/N for N units. null: 1/(10 N)."""
    adjacency: Annotated[str, OneOf(ADJACENCIES)] = "zero-out"
    """Adjacency of the headline ε: zero-out (a unit against nothing) or replace-one (a unit against another)."""
    dataset: Text | None = None
    """Public name of the private data set; the costs of runs on it are added up."""
    budget_file: Text | None = None
    """The file with the privacy budget of all runs on this data set (`dpllm budget`); it is charged beforehand."""

    def __post_init__(self) -> None:
        """Check that one of two numbers determines the noise."""
        super().__post_init__()
        if (self.epsilon is None) == (self.noise_multiplier is None):
            given = "neither" if self.epsilon is None else "both"
            raise ConfigError(
                f"give exactly one of epsilon (the noise is calibrated to it) and noise_multiplier, got {given}"
            )
        require_dataset(self.dataset, self.budget_file)

    def delta_for(self, num_units: int) -> float:
        """Return δ: the given one, or 1/(10 N)."""
        return 1 / (10 * num_units) if self.delta is None else self.delta


@section
class QueryData(DataConfig):
    """The section ``data`` of a query run: that of a training run, whose rows need no length here."""

    max_length: Annotated[Whole, Field(ge=2)] = 2048  # no part of the checks: a method that makes rows reads it
    """The most tokens of a record, where the method makes tokens of it."""


SECTIONS: dict[str, type] = {"data": QueryData, "privacy": QueryPrivacy, "model": ModelConfig, "release": ReleaseConfig}


@section
class QueryRecipe:
    """One query run: the sections of a recipe file."""

    method: str
    """Name of the method's section."""
    options: Any
    """The method's section."""
    data: QueryData
    """The records."""
    privacy: QueryPrivacy
    """The guarantee."""
    output_dir: Text
    """Folder of the run."""
    model: ModelConfig | None = None
    """The public model, for methods that need one."""
    release: ReleaseConfig = Field(default_factory=ReleaseConfig)
    """Facts for the report that only people know."""

    def __post_init__(self) -> None:
        """Give both sections the same column of the units."""
        privacy, data = one_unit(self.privacy, self.data)
        refuse_shipped_name(privacy.dataset, data.path)
        assign(self, privacy=privacy, data=data)

    def to_yaml(self) -> str:
        """Return the text of a recipe file that makes an equal recipe."""
        plain = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        del plain["privacy"][UNIT]  # it is data.columns.unit
        method, options = plain.pop("method"), plain.pop("options")
        return write_yaml({**plain, method: options})
