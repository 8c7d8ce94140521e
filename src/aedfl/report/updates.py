"""One pass over `updates.jsonl`: columns for the charts, however many local updates there were."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .record import Floats, lines, number

OWN, OTHERS = "own model", "models of neighbours"
Line = tuple[str, str]
"""A chart and a line in it."""
Reader = Callable[[Any], Iterable[tuple[Line, Any]]]
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
        for name in row.keys() & _READERS.keys():
            for line, value in _READERS[name](row[name]):
                self._spread(*line).add(time, value)
        for layer, channels in _kept(row["kept"]) if "kept" in row else ():
            if layer not in self.kept:
                self.kept[layer] = Samples()
            self.kept[layer].add(time, channels)

    def _spread(self, name: str, line: str) -> Samples:
        lines = self.spreads.setdefault(name, {})
        if line not in lines:
            lines[line] = Samples()
        return lines[line]


def read_updates(path: Path) -> Updates:
    """The updates recorded in a run folder; none when they were not recorded."""
    updates = Updates()
    for row in lines(path / "updates.jsonl"):
        updates.add(row)
    return updates


def _per_model(name: str) -> Reader:
    """Of a list with the own model first; 0 stands for a model that took no part."""

    def read(given: Any) -> Iterator[tuple[Line, Any]]:
        for i, value in enumerate(given if isinstance(given, list) else ()):
            yield (name, OTHERS if i else OWN), value or None

    return read


def _single(name: str, line: str) -> Reader:
    return lambda given: [((name, line), given[0] if isinstance(given, list) and given else given)]


def _each(name: str, line: str) -> Reader:
    return lambda given: [((name, line), value or None) for value in (given if isinstance(given, list) else ())]


_READERS: dict[str, Reader] = {
    "weights": _per_model("weights"),
    "control": _per_model("control"),
    "priorities": _each("priorities", "priority"),
    "prune_rate": _single("prune_rate", "rate"),
    "raw_rate": _single("prune_rate", "raw rate"),
}
"""What a method may record: how its value becomes points of lines of charts."""


def _kept(given: Any) -> Iterator[tuple[str, float]]:
    """Kept channels by layer; of a plain list of flags, by stretches of it."""
    if isinstance(given, dict):
        yield from ((str(layer), channels) for layer, channels in given.items())
    elif isinstance(given, list) and given:
        size = -(-len(given) // ROWS)
        for first in range(0, len(given), size):
            part = given[first : first + size]
            yield f"{first}–{first + len(part) - 1}", sum(map(bool, part))
