"""Define the types of values in a privacy report: their ranges, their JSON form and their schemas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import core_schema

from dpllm.config import ROWS_KEPT, SAMPLINGS, UNITS
from dpllm.mechanism.catalogue import clipping_of, from_fields, noise_of
from dpllm.mechanism.limits import ADJACENCIES
from dpllm.mechanism.parts import Spec
from dpllm.mechanism.selection import Selection

INFINITE = "inf"
"""JSON form of an infinite ε, for which JSON has no number; in Python it is `math.inf`."""


class Part(BaseModel):
    """A part of a report: frozen, and without unknown keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Shown:
    """The row of a value on the report's pages: its section and its label.

    A key of the report with a `Shown` appears on both pages without a line in their templates.
    """

    section: str
    """A key of `dpllm.report.models.SECTIONS`."""
    label: str
    """{step} stands for "step" or "answer", {thing} for "model" or "release", {made} for "trained" or "made"."""
    form: str = ""
    """The filter of `dpllm.report.pages` that formats it; empty: unchanged, with the items of a list on one line."""
    if_none: str | None = None
    """The text for a value of None, which people have not filled in; None: the row is omitted."""


@dataclass(frozen=True)
class OneOf:
    """One of a few values, which a different module lists."""

    values: Sequence[str | None]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Return the schema of the values."""
        return core_schema.literal_schema(list(self.values))


def _read_epsilon(value: Any) -> Any:
    return math.inf if value == INFINITE else value


def _write_epsilon(value: float) -> float | str:
    return value if math.isfinite(value) else INFINITE


def _known(make: Callable[[Any], Any]) -> AfterValidator:
    """Refuse an event, a clipping or a noise that this version's catalogue cannot build from these values."""

    def checked(values: Any) -> Any:
        try:
            make(values)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return values

    return AfterValidator(checked)


_EPSILON_SCHEMA = {
    "description": f'A number of at least 0, or "{INFINITE}".',
    "oneOf": [{"type": "number", "minimum": 0}, {"const": INFINITE}],
}
_CHANCES_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9.e-]+$"},
    "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1},
}
_EVENT_SCHEMA = {
    "type": "object",
    "required": ["sampling_rate", "noise_multiplier"],
    "additionalProperties": {"type": ["number", "string", "null", "array"], "items": {"type": "number"}},
}
_SEVERAL_SCHEMA = {"type": "object", "required": ["event", "parts"], "maxProperties": 2}
_SPEC_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object", "required": ["kind"]}]}

Adjacency = Annotated[str, OneOf(ADJACENCIES)]
Unit = Annotated[str, OneOf(UNITS)]
Sampling = Annotated[str, OneOf(SAMPLINGS)]
RowsKept = Annotated[str | None, OneOf((*ROWS_KEPT, None))]
Epsilon = Annotated[
    float,
    AllowInfNan(),
    Field(ge=0),
    BeforeValidator(_read_epsilon),
    PlainSerializer(_write_epsilon, when_used="json"),
    WithJsonSchema(_EPSILON_SCHEMA),
]
Probability = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Chances = Annotated[dict[Annotated[str, Field(pattern="^[0-9.e-]+$")], Probability], WithJsonSchema(_CHANCES_SCHEMA)]
Event = Annotated[
    dict[str, str | int | float | tuple[float, ...] | None], _known(from_fields), WithJsonSchema(_EVENT_SCHEMA)
]
SeveralEvents = Annotated[
    dict[str, str | tuple[tuple[dict[str, JsonValue], int], ...]], _known(from_fields), WithJsonSchema(_SEVERAL_SCHEMA)
]
"""The event of all answers of a query run."""
ClippingSpec = Annotated[
    str | dict[str, JsonValue], _known(lambda plain: clipping_of(Spec.of(plain), 1.0)), WithJsonSchema(_SPEC_SCHEMA)
]
NoiseSpec = Annotated[
    str | dict[str, JsonValue], _known(lambda plain: noise_of(Spec.of(plain))), WithJsonSchema(_SPEC_SCHEMA)
]
SelectionSpec = Annotated[
    str | dict[str, JsonValue], _known(lambda plain: Selection.of(Spec.of(plain))), WithJsonSchema(_SPEC_SCHEMA)
]
