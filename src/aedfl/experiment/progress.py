"""What a run tells about itself while it goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress(Protocol):
    """Told by the runner; several runs may follow one another."""

    def start(self, label: str, total_virtual: float | None) -> None:
        """A run begins; `total_virtual` seconds at most, None or infinite when only updates end it."""

    def advance(self, virtual_time: float, accuracy: float | None, updates: int, updates_per_second: float) -> None:
        """Where it stands. `accuracy` is the last one measured; the rate is in wall seconds."""

    def finish(self) -> None:
        """It ended, or failed. Telling it twice is allowed."""


class Silent:
    """Says nothing."""

    def start(self, label: str, total_virtual: float | None) -> None: ...

    def advance(self, virtual_time: float, accuracy: float | None, updates: int, updates_per_second: float) -> None: ...

    def finish(self) -> None: ...


class Live:
    """One line on the terminal: virtual time, accuracy, updates, updates/s, remaining wall time."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars: Bars | None = None

    def start(self, label: str, total_virtual: float | None) -> None:
        self.finish()
        self._bars = Bars(*_columns(), console=self._console)
        total = total_virtual if total_virtual is not None and math.isfinite(total_virtual) else None
        self._bars.add_task(label, total=total, figures="starting …")
        self._bars.start()

    def advance(self, virtual_time: float, accuracy: float | None, updates: int, updates_per_second: float) -> None:
        if self._bars is None:
            return
        task = self._bars.tasks[0]
        figures = _figures(virtual_time, task.total, accuracy, updates, updates_per_second)
        self._bars.update(task.id, completed=virtual_time, figures=figures)

    def finish(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _columns() -> tuple[TextColumn, BarColumn, TextColumn, TimeRemainingColumn, TextColumn]:
    return (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )


def _figures(now: float, total: float | None, accuracy: float | None, updates: int, rate: float) -> str:
    of = f"/{total:,.0f}" if total is not None else ""
    measured = f"{accuracy:.4f}" if accuracy is not None else "–"
    return f"{now:,.0f}{of} s · accuracy {measured} · {updates:,} updates · {rate:,.0f}/s ·"


class Together:
    """Several runs that advance at once, shown as one: virtual seconds and updates are sums over them."""

    def __init__(self, progress: Progress, runs: int, place: Callable[[], str] = str) -> None:
        """`place` says, when the first run begins, where they run; empty by default."""
        self._progress = progress
        self._runs = runs
        self._place = place
        self._stands: dict[int, tuple[float, int, float]] = {}
        self._accuracies: dict[int, float | None] = {}
        self._ended = 0

    def one(self) -> Progress:
        """What the next run tells."""
        return _One(self, len(self._stands))

    def tell(self, number: int, stand: tuple[float, int, float], accuracy: float | None) -> None:
        self._stands[number] = stand
        self._accuracies[number] = accuracy
        known = [value for value in self._accuracies.values() if value is not None]
        times, updates, rates = zip(*self._stands.values(), strict=True)
        best = max(known, default=None)
        self._progress.advance(sum(times), best, sum(updates), sum(rates))

    def begin(self, number: int, total: float | None) -> None:
        self._stands[number] = (0.0, 0, 0.0)
        if number == 0:
            label = f"{self._runs} runs{self._place()}, best"
            self._progress.start(label, None if total is None else total * self._runs)

    def end(self) -> None:
        self._ended += 1
        if self._ended == self._runs:
            self._progress.finish()


class _One:
    """One run's voice in `Together`."""

    def __init__(self, all_runs: Together, number: int) -> None:
        self._all = all_runs
        self._number = number
        all_runs._stands[number] = (0.0, 0, 0.0)

    def start(self, label: str, total_virtual: float | None) -> None:
        self._all.begin(self._number, total_virtual)

    def advance(self, virtual_time: float, accuracy: float | None, updates: int, updates_per_second: float) -> None:
        self._all.tell(self._number, (virtual_time, updates, updates_per_second), accuracy)

    def finish(self) -> None:
        self._all.end()
