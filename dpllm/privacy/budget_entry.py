"""The entry of one run in the budget file of a data set.

Place in the flow: under `dpllm.privacy.budget`, which reads, changes and writes entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpllm.config.values import integer
from dpllm.mechanism.events import Event
from dpllm.privacy import accounting
from dpllm.privacy.ledger_reader import LedgerHead


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The charge of one run."""

    id: str
    """Random, in hexadecimal; also written in the run's ledger."""
    plan_hash: str
    step: Event
    steps_reserved: int
    """Steps of all starts together: T of the plan, or the number that the last resume allows."""
    steps_charged: int | None
    """Steps that the run's ledger charges, once it has ended. None: the reservation counts."""
    steps_before: int
    """Steps known to have run; no later settlement may be lower."""
    charged_at: str
    """Time of the first charge, UTC."""
    segments: tuple[int, ...] = ()
    """Steps of each start before the last one, for events whose resume costs more than going on (`Event.restarts`)."""
    steps_planned: int | None = None
    """T of the plan, where a resume allows another number. None: as many as are reserved."""
    head: dict[str, Any] | None = None
    """The place in the run's ledger (`LedgerHead`) at the last start, resumption, save or end. None: not begun."""

    def __post_init__(self) -> None:
        """Check the counts and the head."""
        counts = {"steps_reserved": self.steps_reserved, "steps_before": self.steps_before}
        counts |= {"steps_charged": self.steps_charged or 0, "steps_planned": self.steps_planned or 0}
        for name, count in counts.items():
            integer(name, count, 0)
        object.__setattr__(self, "segments", tuple(integer("segments", count, 1) for count in self.segments))
        if self.head is not None:
            LedgerHead.of(self.head)

    @property
    def num_steps(self) -> int:
        """Steps that count against the budget."""
        return self.steps_reserved if self.steps_charged is None else self.steps_charged

    @property
    def history(self) -> list[tuple[Event, int]]:
        """The steps that count, by start: those whose ε the run's report states (`dpllm.privacy.stated`)."""
        taken = (*self.segments, max(0, self.num_steps - sum(self.segments)))
        if self.num_steps < self.steps_reserved:  # the stop was declared independent
            return accounting.of_starts(self.step, taken)
        return accounting.of_starts(self.step, taken, self.steps_planned or self.steps_reserved)
