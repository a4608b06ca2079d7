"""The event of several private answers of different kinds: everything that a query run may charge, as one event.

A budget and the first line of a ledger store the cost of a whole query run as this one event, since they name one event
per run. The catalogue reads and writes the nested events.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dpllm.mechanism.events import Event, EventWords, Round
from dpllm.mechanism.limits import MAX_NOISE, MAX_STEPS


@dataclass(frozen=True, kw_only=True)
class Several:
    """All answers of a query run together.

    A run that only builds on an earlier release has no answers of its own, and no parts.

    Raises:
        ValueError: a part is not an event with independent steps, or a count is out of range.
    """

    kind: ClassVar[str] = "several"
    parts: tuple[tuple[Event, int], ...]
    """The events, each with its count."""

    def __post_init__(self) -> None:
        """Check the parts."""
        for event, count in self.parts:
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_STEPS:
                raise ValueError(f"an event's count must be from 1 to {MAX_STEPS:,}, got {count!r}")
            if not callable(getattr(event, "rounds", None)):
                raise ValueError(f"a part must be an event, got {event!r}")
            if isinstance(event, Several) or event.restarts:
                raise ValueError(
                    f"an event of the kind {event.kind!r} depends on the course of its run, so it cannot be part of "
                    "several answers. Charge events whose rounds are independent"
                )

    @classmethod
    def of(cls, history: Iterable[tuple[Event, int]]) -> Several:
        """Return the event of a history: equal events are counted together, in the order of their first use."""
        counts: dict[Event, int] = {}
        for event, count in history:
            counts[event] = counts.get(event, 0) + count
        return cls(parts=tuple(counts.items()))

    @property
    def noise_multiplier(self) -> float:
        """The smallest σ of the parts; without parts, the largest possible σ."""
        return min((event.noise_multiplier for event, _ in self.parts), default=MAX_NOISE)

    @property
    def clip_norm(self) -> float:
        """1: ε does not depend on it."""
        return 1.0

    @property
    def moves(self) -> int:
        """The largest change by one unit, in clip norms."""
        return max((event.moves for event, _ in self.parts), default=1)

    @property
    def restarts(self) -> bool:
        """The parts do not restart."""
        return False

    @property
    def answers(self) -> tuple[tuple[Event, int], ...]:
        """The parts."""
        return self.parts

    @property
    def is_selection(self) -> bool:
        """Each answer has its own ε."""
        return False

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the rounds of all parts."""
        return [pair for event, count in self.parts for pair in event.rounds(count * num_steps)]

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        listed = "; ".join(f"{count:,} times {event.words().accounted_as}" for event, count in self.parts)
        listed = listed or "no answer of its own"
        return EventWords(sampling="as each answer states", accounted_as=listed, options="", is_sampled=False)
