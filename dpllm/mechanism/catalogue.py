"""Every kind of clipping and of noise that a recipe may name, and every event that a ledger may hold.

Each mechanism has its own file. A new mechanism is a file in this folder and a line here; a method registers its own
(`dpllm.registry`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

from dpllm import registry
from dpllm.mechanism.banded import BandedNoise, BandedStep
from dpllm.mechanism.blt import BltNoise, BltStep
from dpllm.mechanism.clipping import (
    AdaptiveScaleClipping,
    AutomaticClipping,
    FlatClipping,
    GroupClipping,
    PerLayerClipping,
    QuantileClipping,
)
from dpllm.mechanism.discrete import DiscreteNoise, DiscreteStep
from dpllm.mechanism.events import Event, Step, StepOfRows
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Clipping, Noise, Spec
from dpllm.mechanism.query import Query, Several
from dpllm.mechanism.selection import SelectedRun

_CLIPPINGS: tuple[type[Clipping], ...] = (
    FlatClipping,
    AutomaticClipping,
    AdaptiveScaleClipping,
    PerLayerClipping,
    GroupClipping,
    QuantileClipping,
)
_NOISES: tuple[type[Noise], ...] = (IndependentNoise, BandedNoise, BltNoise)
_EVENTS: tuple[type[Event], ...] = (
    Step,
    StepOfRows,
    BandedStep,
    BltStep,
    DiscreteStep,
    SelectedRun,
    Query,
    Several,
)

CLIPPINGS = {part.kind: part for part in _CLIPPINGS}


@cache
def noises() -> dict[str, type[Noise]]:
    """Return every noise by its kind, those of methods included."""
    return {part.kind: part for part in (*_NOISES, *registry.parts("noises"))}


@cache
def events() -> dict[str, type[Event]]:
    """Return every event by its kind, those of methods included."""
    return {event.kind: event for event in (*_EVENTS, *registry.parts("events"))}


def clipping_of(spec: Spec, clip_norm: float) -> Clipping:
    """Return the clipping that a recipe or plan names.

    Raises:
        ValueError: the kind is unknown, an option is missing or unknown, or a value is out of range.

    >>> clipping_of(Spec("flat"), 1.0)
    FlatClipping(clip_norm=1.0)
    """
    return _make("clipping", CLIPPINGS, spec, {"clip_norm": clip_norm})


def noise_of(spec: Spec) -> Noise:
    """Return the noise that a recipe or plan names.

    Raises:
        ValueError: the kind is unknown, an option is missing or unknown, or a value is out of range.

    >>> noise_of(Spec("banded", (("bands", 4),)))
    BandedNoise(bands=4, strategy=None, ratio=None, coefficients=None)
    """
    return _make("noise", noises(), spec, {})


def with_randomness(noise: Noise, randomness: str) -> Noise:
    """Return a noise as `privacy.randomness` changes it: discrete, or unchanged.

    Raises:
        ValueError: discrete noise was requested for a correlated noise, or a noise of whole numbers was requested
            without discrete randomness.

    >>> with_randomness(IndependentNoise(), "discrete")
    DiscreteNoise()
    """
    if noise.only_discrete and randomness != "discrete":
        raise ValueError(
            f"noise={noise.kind!r} consists of whole numbers, but randomness is {randomness!r}: set "
            "privacy.randomness=discrete"
        )
    if noise.only_discrete:
        return noise
    if randomness != "discrete":
        return noise
    if type(noise) not in (IndependentNoise, DiscreteNoise):
        raise ValueError(
            f"randomness='discrete' has no accounting for the noise {noise.kind!r}: sums of discrete noise over steps "
            "are not discrete Gaussian. Use noise='independent', or randomness='chacha20'"
        )
    return DiscreteNoise()


def spec_of(part: Any) -> Spec:
    """Return the specification from which a noise can be recreated: its kind, and the non-default options.

    >>> spec_of(BandedNoise(bands=4)), spec_of(IndependentNoise())
    (Spec(kind='banded', options=(('bands', 4),)), Spec(kind='independent', options=()))
    """
    options = {item.name: getattr(part, item.name) for item in _options(part)}
    given = {item.name: options[item.name] for item in _options(part) if options[item.name] != item.default}
    return Spec(part.kind, tuple(sorted(given.items())))


def _options(part: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields that are options, without ``field(init=False)``."""
    return [item for item in dataclasses.fields(part) if item.init]


def _make(name: str, known: Mapping[str, Any], spec: Spec, given: Mapping[str, Any]) -> Any:
    if spec.kind not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {spec.kind!r}")
    part = known[spec.kind]
    fields = {item.name: item for item in _options(part) if item.name not in given}
    options = spec.plain_options
    if unknown := sorted(set(options) - set(fields)):
        takes = f"its options are {', '.join(fields)}" if fields else "it has no options"
        raise ValueError(f"{name}.{unknown[0]} is not an option of {spec.kind!r}; {takes}")
    missing = [n for n, item in fields.items() if item.default is dataclasses.MISSING and n not in options]
    if missing:
        raise ValueError(
            f"{name}: {{kind: {spec.kind}}} needs {missing[0]}: write {name}: {{kind: {spec.kind}, {missing[0]}: …}}"
        )
    return part(**given, **options)


def to_fields(event: Event) -> dict[str, Any]:
    """Return an event as plain values, for a ledger or a budget."""
    values = {item.name: getattr(event, item.name) for item in dataclasses.fields(event)}  # type: ignore[arg-type]
    return {"event": event.kind, **{name: _written(value) for name, value in values.items()}}


def _written(value: Any) -> Any:
    """Return an event's value for JSON; nested events become lists of their fields."""
    if isinstance(value, tuple):
        inside = [_written(one) for one in value]
        return inside if any(isinstance(one, dict | list) for one in inside) else value
    return to_fields(value) if hasattr(value, "rounds") else value


def _read(value: Any) -> Any:
    """Return an event's value as written by `_written`."""
    if isinstance(value, Mapping):
        return from_fields(value)
    return tuple(map(_read, value)) if isinstance(value, list | tuple) else value


def from_fields(fields: Mapping[str, Any]) -> Event:
    """Return the event with the plain values of `to_fields`.

    Raises:
        ValueError: an unknown kind, or a value out of range.
        TypeError: a field is missing or unknown.
    """
    values = dict(fields)
    kind = values.pop("event", None)
    known = events()
    if kind not in known:
        raise ValueError(
            f"unknown event kind {kind!r}; known kinds are {', '.join(known)}. Installed methods: "
            f"{registry.installed()}"
        )
    return known[kind](**{name: _read(value) for name, value in values.items()})
