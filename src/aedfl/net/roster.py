"""Who takes part in a run, as the coordinator knows it: the ledger's entries, what was heard since, the graph."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite

from ..context import SERVER
from ..experiment.config import RunConfig
from .clock import Clock
from .ledger import Entry, Ledger
from .members import Graph, graph
from .protocol_pb2 import Edge, Member, Neighbours, Report, Status, View

PATIENCE = 60.0
"""Seconds that devices which have ended wait for one that is away."""
TROUBLE = 300
"""Characters of a device's complaint that are kept."""


@dataclass
class Seen:
    """What is known of a member since the coordinator started."""

    last: float = field(default_factory=time.monotonic)
    report: Report = field(default_factory=Report)
    heard: bool = False


class Roster:
    """The members of one run. Every change of an entry is in the ledger when its method returns."""

    def __init__(self, config: RunConfig, ledger: Ledger, beat: float) -> None:
        self.config, self.beat, self._ledger = config, beat, ledger
        self.epoch = int(ledger.get("epoch", "1"))
        self.over = ledger.get("over") == "yes"
        self.clock = Clock()
        self.clock.at_least(float(ledger.get("elapsed", "0")))
        if ledger.get("begun") == "yes":
            self.clock.begin()
        self.entries = {entry.name: entry for entry in ledger.members()}
        self._seen = {name: Seen() for name in self.entries}
        self._graph: Graph = self._draw()
        self._beats: deque[float] = deque(maxlen=4096)

    def _draw(self) -> Graph:
        return graph([entry.index for entry in self.devices()], self.config.topology, self.config.seed)

    # ---- changes

    def register(self, entry: Entry) -> None:
        """A member that has just joined (again)."""
        self.entries[entry.name] = entry
        seen = self._seen.setdefault(entry.name, Seen())
        seen.last, seen.heard = time.monotonic(), True
        self.changed(entry)

    def changed(self, entry: Entry) -> None:
        self._ledger.put(entry)
        self.epoch += 1
        self._ledger.set("epoch", str(self.epoch))
        self._graph = self._draw()

    def hear(self, entry: Entry, report: Report) -> None:
        """A heartbeat."""
        report.trouble = report.trouble[:TROUBLE]
        seen = self._seen[entry.name]
        seen.last, seen.report, seen.heard = time.monotonic(), report, True
        self._beats.append(seen.last)
        if self.clock.begun:
            self.clock.at_least(self._agreed())
        if entry.finished != report.finished:
            entry.finished = report.finished
            self._ledger.put(entry)

    def _agreed(self) -> float:
        """The time that has passed while the coordinator was away, by the word of half of the devices, not of one."""
        said = [self._seen[entry.name].report.now for entry in self.devices()]
        told = sorted(now if isfinite(now) else 0.0 for now in said)
        return told[(len(told) - 1) // 2] if told else 0.0

    def begin(self) -> None:
        self._ledger.set("begun", "yes")
        self.clock.begin()

    def end(self) -> None:
        self._ledger.set("over", "yes")
        self.over = True

    def keep_time(self) -> None:
        self._ledger.set("elapsed", str(self.clock.now))

    # ---- questions

    def devices(self) -> Iterator[Entry]:
        """Those that have not left for good."""
        return (entry for entry in self.entries.values() if not entry.left and entry.index != SERVER)

    def here(self, name: str) -> bool:
        return self._seen[name].heard and self.silence(name) <= 3.0 * self.beat + 1.0

    def silence(self, name: str) -> float:
        """Seconds since it was heard of, or since the coordinator started."""
        return time.monotonic() - self._seen[name].last

    def ready(self) -> set[int]:
        """Indices of those that others can send to."""
        return {entry.index for entry in self.entries.values() if entry.address and not entry.left}

    def finished(self) -> bool:
        """The server has ended, or every device that is there and has not left."""
        server = next((entry for entry in self.entries.values() if entry.index == SERVER), None)
        return self.devices_done() if server is None else server.finished

    def devices_done(self) -> bool:
        """One that has been silent for `PATIENCE` is not waited for; it finds a run that is over when it comes back."""
        there = list(self.devices())
        ended = [entry.finished or self.silence(entry.name) > PATIENCE for entry in there]
        return self.clock.begun and all(ended) and any(entry.finished for entry in there)

    @property
    def count(self) -> int:
        """As many devices as the run was planned for, or as have ever joined."""
        return max(self.config.devices, 1 + max((e.index for e in self.entries.values()), default=SERVER))

    @property
    def beats_per_second(self) -> float:
        now = time.monotonic()
        return sum(now - beat <= 5.0 for beat in self._beats) / 5.0

    # ---- what others are told

    def view(self, entry: Entry, epoch: int) -> View:
        """What concerns this member; neighbours and addresses only if they have changed since `epoch`."""
        view = View(
            epoch=self.epoch, elapsed=self.clock.now, begun=self.clock.begun, over=self.over, left=entry.left,
            devices=self.count, devices_done=self.devices_done(),
        )  # fmt: skip
        if epoch != self.epoch:
            sources, targets = self._graph.neighbours(entry.index)
            view.neighbours.CopyFrom(Neighbours(sources=sources, targets=targets))
            concern = {*sources, *targets, SERVER}
            others = [each for each in self.entries.values() if not each.left and each.address]
            view.members.extend(
                self._member(each) for each in others if entry.index == SERVER or each.index in concern
            )
        return view

    def status(self) -> Status:
        members = [self._member(entry, whole=True) for entry in self.entries.values()]
        view = View(epoch=self.epoch, members=members, elapsed=self.clock.now, begun=self.clock.begun, over=self.over)
        view.devices = self.count
        edges = [Edge(source=source, target=target) for source, target in self._graph.edges()]
        return Status(method=self.config.method, view=view, edges=edges, beats_per_second=self.beats_per_second)

    def _member(self, entry: Entry, whole: bool = False) -> Member:
        state = "left" if entry.left else "here" if self.here(entry.name) else "away"
        member = Member(index=entry.index, name=entry.name, address=entry.address, serial=entry.serial, state=state)
        if whole:
            member.report.CopyFrom(self._seen[entry.name].report)
            member.silent = self.silence(entry.name)
        return member
