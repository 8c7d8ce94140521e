"""One pass over `updates.jsonl`: columns for the charts, however many local updates there were."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .record import Floats, lines, number

OWN, OTHERS = "own model", "models of neighbours"
ROWS = 24
"""Rows for kept channels where a method does not name layers."""


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
    spreads: dict[str, dict[str, Samples]] = field(default_factory=dict)
    """What a method recorded, by metric and by line of its chart."""
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
        self._merged(time, row.get("merged"))
        self._method(time, row)

    def _merged(self, time: float, merged: Any) -> None:
        if not isinstance(merged, list):
            return
        for entry in merged:
            if isinstance(entry, list) and len(entry) == 2 and number(entry[1]) is not None:
                self.staleness[math.floor(entry[1])] += 1
        self._spread("merged", "merged").add(time, len(merged))

    def _method(self, time: float, row: dict[str, Any]) -> None:
        for name in ("weights", "control"):
            own, *others = _list(row.get(name)) or [None]
            self._spread(name, OWN).add(time, own)
            for value in others:
                self._spread(name, OTHERS).add(time, value or None)
        for value in _list(row.get("priorities")):
            self._spread("priorities", "priority").add(time, value)
        self._spread("prune_rate", "rate").add(time, row.get("prune_rate"))
        self._spread("prune_rate", "raw rate").add(time, _single(row.get("raw_rate")))
        for layer, channels in _kept(row.get("kept")):
            self.kept.setdefault(layer, Samples()).add(time, channels)

    def _spread(self, name: str, line: str) -> Samples:
        return self.spreads.setdefault(name, {}).setdefault(line, Samples())


def read_updates(path: Path) -> Updates:
    """The updates recorded in a run folder; none when they were not recorded."""
    updates = Updates()
    for row in lines(path / "updates.jsonl"):
        updates.add(row)
    return updates


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _single(given: Any) -> Any:
    return given[0] if isinstance(given, list) and given else given


def _kept(given: Any) -> Iterator[tuple[str, float]]:
    """Kept channels by layer; of a plain list of flags, by stretches of it."""
    if isinstance(given, dict):
        yield from ((str(layer), channels) for layer, channels in given.items())
    elif isinstance(given, list) and given:
        size = -(-len(given) // ROWS)
        for first in range(0, len(given), size):
            part = given[first : first + size]
            yield f"{first}–{first + len(part) - 1}", sum(map(bool, part))
