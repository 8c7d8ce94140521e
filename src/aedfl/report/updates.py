"""One pass over `updates.jsonl`: columns for the charts, however many local updates there were."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .record import Floats, lines, number

_SPREADS = ("weights", "control")


class Samples:
    """Pairs of (time, value), kept compactly."""

    def __init__(self) -> None:
        self._times = array("d")
        self._values = array("d")

    def add(self, time: float, value: Any) -> None:
        found = number(value)
        if found is not None:
            self._times.append(time)
            self._values.append(found)

    @property
    def times(self) -> Floats:
        return np.array(self._times, dtype=np.float64)

    @property
    def values(self) -> Floats:
        return np.array(self._values, dtype=np.float64)

    def __len__(self) -> int:
        return len(self._times)


@dataclass
class Updates:
    """Every local update of a run."""

    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    device: array[int] = field(default_factory=lambda: array("q"))
    loss: Samples = field(default_factory=Samples)
    staleness: Counter[int] = field(default_factory=Counter)
    spreads: dict[str, Samples] = field(default_factory=dict)
    """What a method recorded: `weights`, `control`, `prune_rate`, and `chosen` as a number of neighbours."""
    kept: dict[str, Samples] = field(default_factory=dict)
    """Kept channels by layer."""

    def __len__(self) -> int:
        return len(self.end)

    def add(self, row: dict[str, Any]) -> None:
        time, device = number(row.get("time")), number(row.get("device"))
        if time is None or device is None:
            return
        start = number(row.get("start"))
        self.end.append(time)
        self.start.append(time if start is None else start)
        self.device.append(int(device))
        self.loss.add(time, row.get("loss"))
        self._merged(row.get("merged"))
        self._method(time, row)

    def _merged(self, merged: Any) -> None:
        for entry in merged if isinstance(merged, list) else ():
            if isinstance(entry, list) and len(entry) == 2 and number(entry[1]) is not None:
                self.staleness[math.floor(entry[1])] += 1

    def _method(self, time: float, row: dict[str, Any]) -> None:
        for name in _SPREADS:
            for value in _entries(row.get(name)):
                self._spread(name).add(time, value)
        if "prune_rate" in row:
            self._spread("prune_rate").add(time, row["prune_rate"])
        if isinstance(row.get("chosen"), list):
            self._spread("chosen").add(time, _chosen(row["chosen"]))
        for layer, channels in row["kept"].items() if isinstance(row.get("kept"), dict) else ():
            self.kept.setdefault(str(layer), Samples()).add(time, channels)

    def _spread(self, name: str) -> Samples:
        return self.spreads.setdefault(name, Samples())


def read_updates(path: Path) -> Updates:
    """The updates recorded in a run folder; none when they were not recorded."""
    updates = Updates()
    for row in lines(path / "updates.jsonl"):
        updates.add(row)
    return updates


def _entries(given: Any) -> Iterable[Any]:
    if isinstance(given, dict):
        return given.values()
    return given if isinstance(given, list) else ()


def _chosen(given: list[Any]) -> int:
    """How many: a list of flags counts its true ones, a list of neighbours its length."""
    flags = all(isinstance(entry, bool) for entry in given)
    return sum(given) if flags else len(given)
