"""The phases of a run on the screen: a line when one begins, a line when it ends, and bars between them.

Place in the flow: the program of recipes calls it on every process; the first one prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from tqdm.auto import tqdm


class Phases:
    """The phases of one run.

    Args:
        console: to print to; a quiet one prints nothing.
        bars: whether progress bars are shown.
    """

    def __init__(self, console: Console, bars: bool = True) -> None:
        """Begin without a phase."""
        self.console, self.bars = console, bars
        self._name: str | None = None
        self._since = 0.0

    def begin(self, name: str, words: str = "") -> None:
        """End the phase before, and print the name of the next one.

        Args:
            name: of the phase.
            words: what follows the name.
        """
        self.end()
        self._name, self._since = name, time.monotonic()
        self.console.print(f"\n{name}", style="bold", end="" if words else "\n")
        if words:
            self.console.print(f": {words}", markup=False)

    def say(self, text: str) -> None:
        """Print a line of the present phase."""
        self.console.print(f"  {text}", style="dim", markup=False)

    def end(self, words: str = "") -> None:
        """End the present phase, if there is one, with its time.

        Args:
            words: the result, in a few words.
        """
        if self._name is None:
            return
        self.say(f"{time.monotonic() - self._since:.1f} s{f': {words}' if words else ''}")
        self._name = None

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that moves a bar by a number of parts."""
        hidden = self.console.quiet or not self.bars
        with tqdm(total=total, unit=unit, dynamic_ncols=True, leave=False, disable=hidden) as shown:

            def moved(parts: int) -> None:
                shown.update(parts)

            yield moved
