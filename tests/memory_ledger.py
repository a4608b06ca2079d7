"""A ledger in memory."""


class MemoryLedger:
    """Counts steps; the lines of a ledger, flushed to the disk one by one, are tested elsewhere."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.steps_planned: int | None = None
        self.has_run = self.unused_frozen = False

    def append_step(self, step_number: int, step: object) -> None:
        self.num_steps += 1

    def append_open_point(self, text: str) -> None:
        pass

    def append_disclosure(self, what: str, count: int = 1) -> None:
        pass

    def append_diagnostic(self, what: str, count: int = 1) -> None:
        pass

    def append_fact(self, name: str, value: str) -> None:
        pass

    def note_rate(self, rate: str) -> None:
        pass

    def write_rate(self) -> None:
        pass
