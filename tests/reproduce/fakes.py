"""Made-up records, and cells that take a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aedfl.reproduce.plan import Cell, Key, Wish, cell
from aedfl.reproduce.records import CURVE, Record, Store

TINY = (
    "devices=4",
    "data.samples=120",
    "data.test_samples=60",
    "model.name=mlp",
    "training.epochs=1",
    "evaluation.every=5",
    "evaluation.local_samples=30",
)
"""Changes that make a cell of `digits-cnn` take a fraction of a second."""


def tiny(method: str = "fedavg", seed: int = 1, until: float = 30.0, changes: Sequence[str] = ()) -> Cell:
    wish = Wish(overrides=(*TINY, *changes), until=until, device="cpu")
    return cell("digits-cnn", method, seed, wish, (), "table2", {})


class Told:
    """Does something once some run is so far."""

    def __init__(self, far: float, then: Callable[[], None]) -> None:
        self.far, self.then = far, then

    def start(self, label: str, total_virtual: float | None) -> None: ...

    def advance(self, virtual_time: float, accuracy: float | None, updates: int, updates_per_second: float) -> None:
        if virtual_time > self.far:
            self.then()

    def finish(self) -> None: ...


def record(
    method: str,
    accuracies: Sequence[float],
    setting: str = "cifar10-lenet",
    seed: int = 1,
    end: float | None = None,
    mmacs: float = 1.0,
    **more: Any,
) -> Record:
    """A record whose measurements are spread evenly from 0 to `end`; local models are at half the accuracy."""
    end = 1000.0 if end is None else end
    count = len(accuracies)
    columns: dict[str, list[float]] = {name: [0.0] * count for name in CURVE}
    columns["time"] = [end * i / (count - 1) for i in range(count)]
    columns["accuracy"] = list(accuracies)
    columns["local_accuracy"] = [value / 2 for value in accuracies]
    columns["mmacs"] = [mmacs] * count
    made: Record = {
        "setting": setting,
        "method": method,
        "seed": seed,
        "changes": [],
        "tuned": False,
        "target": "table2",
        "config": f"{setting}-{method}-{seed}",
        "until": end,
        "reached": end,
        "complete": True,
        "curve": columns,
    }
    return {**made, **more}


def store_of(folder: Path, *records: Record) -> Store:
    store = Store(folder / "records")
    for one in records:
        assert store.add(one)
    return store


def key(method: str, seed: int = 1, setting: str = "cifar10-lenet") -> Key:
    return Key(setting, method, seed)
