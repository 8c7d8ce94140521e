"""One sitting: what of a table or figure is not done yet is run, setting by setting, as far as the time goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ..errors import UserError
from ..experiment.config import RunConfig
from ..experiment.progress import Live, Progress
from .plan import QUICK, Cell, Wish, setting, targets
from .pool import Clock, Outcome, Pool
from .processes import Processes
from .records import Record, Store, make

Say = Callable[[str], None]


class Lines:
    """Progress for a log: a plain line now and then."""

    def __init__(self, say: Say, every: float = 20.0) -> None:
        self._say, self._every = say, every
        self._began = self._last = time.monotonic()
        self._of = 0.0

    def start(self, label: str, total_virtual: float | None) -> None:
        self._of = total_virtual or 0.0
        self._say(f"  {label.partition(',')[0]} begin")

    def advance(self, virtual_time: float, accuracy: float | None, updates: int, updates_per_second: float) -> None:
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            best = f", best accuracy now {accuracy:.4f}" if accuracy is not None else ""
            self._say(
                f"  after {now - self._began:.0f} s: {virtual_time:,.0f} of {self._of:,.0f} virtual seconds, "
                f"{updates:,} updates, {updates / (now - self._began):,.0f}/s{best}"
            )

    def finish(self) -> None: ...


def teller(say: Say, quiet: bool = False) -> Progress:
    """A bar on a terminal, lines elsewhere."""
    return Live() if sys.stderr.isatty() and not quiet else Lines(say)


@dataclass
class Sitting:
    """Runs cells and keeps their records."""

    store: Store
    say: Say
    clock: Clock = field(default_factory=Clock)
    at_once: int | None = None
    checkpoints: Path | None = None
    share: tuple[int, int] = (1, 1)
    """(2, 8): the second of eight shares of a setting's runs; others do the rest."""
    processes: int = 1
    """More than one: so many runs at once, each in a process of its own, instead of runs that share batches."""
    failed: list[str] = field(default_factory=list)
    """A sentence for each cell or setting that could not be run."""

    def run(self, cells: Sequence[Cell]) -> None:
        for name, inside in groupby(cells, key=lambda cell: cell.key.setting):
            self._setting(name, list(inside))
        self.store.tidy()

    def _setting(self, name: str, cells: Sequence[Cell]) -> None:
        place, count = self.share
        own = [cell for same in _alike(cells)[place - 1 :: count] for cell in same]
        left = todo(own, self.store)
        jobs = [(same, same[0].config) for same in _alike(left)]
        self.say(f"{setting(name).title}: {len(own) - len(left)} of {len(own)} cells done, {len(jobs)} runs to go")
        if not jobs or self.clock.left <= 0:
            return
        self.store.prepare()
        try:
            self._pool(name, jobs).run()
        except UserError as error:
            self.failed.append(f"{name}: {error}")
            self.say(f"  {error}")

    def _pool(self, name: str, jobs: list[tuple[list[Cell], RunConfig]]) -> Pool[list[Cell]] | Processes[list[Cell]]:
        told = teller(self.say), self.say, self.checkpoints
        if self.processes > 1:
            return Processes(jobs, self._save, self.clock, self.processes, *told)
        return Pool(jobs, self._save, self.clock, self.at_once or setting(name).at_once, *told)

    def _save(self, cells: list[Cell], outcome: Outcome) -> None:
        for cell in cells:
            record = make(cell, outcome)
            kept = self.store.add(record, replace=outcome.complete and _is_whole(cell))
            self.say("  " + told(record) + ("" if kept or outcome.error else "; the record of before goes further"))
        if outcome.error:
            self.failed.append(f"{cells[0].key}: {outcome.error}")


def _alike(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that are one run, together."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.identity, []).append(cell)
    return list(found.values())


def todo(cells: Sequence[Cell], store: Store) -> list[Cell]:
    """The cells that have no record of this config that goes far enough; one under another key is taken over."""
    left = []
    for cell in cells:
        end = cell.config.stop.virtual_seconds or 0.0
        if store.reached(cell.key, cell.identity) >= end:
            continue
        same = store.like(cell.identity, end)
        if same is None:
            left.append(cell)
        else:
            own = {"changes": list(cell.key.changes), "tuned": cell.key.tuned}
            store.add({**same, **own, "target": cell.target, "command": cell.command}, replace=True)
    return left


def _is_whole(cell: Cell) -> bool:
    """Whether it goes as far as its table or figure; a shorter one takes nobody's place."""
    wish = Wish(quick=QUICK in cell.key.changes)
    return (cell.config.stop.virtual_seconds or 0.0) >= wish.end(cell.key.setting, targets().get(cell.target))


def told(record: Record) -> str:
    """One line on how a cell ended."""
    label = f"{record['method']} seed {record['seed']}" + "".join(f" {change}" for change in record["changes"])
    if "error" in record:
        return f"{label}: failed: {record['error']}"
    curve, far = record["curve"], f"{record['reached']:,.0f} s"
    state = far if record["complete"] else f"cut at {far} of {record['until']:,.0f} s"
    figures = f"accuracy {curve['accuracy'][-1]:.4f}, local {curve['local_accuracy'][-1]:.4f}"
    return f"{label}: {state}, {figures}, {curve['mmacs'][-1]:.4g} MMACs"
