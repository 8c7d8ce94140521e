"""How the methods stand in a setting: figures over seeds, from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ..report.comparison import Cell, Column, best_of, cell_of, marked
from .curves import final, reaches
from .plan import FIRST_SEED, Target, Wish, family, setting
from .records import Record, Store

FEDAVG_SHARE = 0.95

ACCURACY = Column("accuracy", "accuracy", "accuracy", True)
LOCAL = Column("local", "local models", "local", True)
TIME = Column("time", "time to target (s)", "time", False, form=",.0f")
TIME95 = Column("time95", "time to 95 % of FedAvg (s)", "time 95 %", False, form=",.0f")
MMACS = Column("mmacs", "MMACs", "MMACs", False, form=".4g")
COLUMNS = (ACCURACY, LOCAL, TIME, TIME95, MMACS)


@dataclass(frozen=True)
class Row:
    """One method with one value of what is varied."""

    method: str
    value: str
    which: tuple[int, ...]
    """The seeds that went to the end."""
    cells: Mapping[str, Cell]

    @property
    def seeds(self) -> int:
        return len(self.which)


@dataclass(frozen=True)
class Standing:
    """All methods of a target in one setting, at one virtual time."""

    setting: str
    until: float
    target: float
    second: float | None
    """95 % of FedAvg's final accuracy; none before FedAvg was run."""
    rows: Sequence[Row]

    def row(self, method: str, value: str = "") -> Row | None:
        return next((row for row in self.rows if (row.method, row.value) == (method, value)), None)

    def mean(self, column: Column, method: str, value: str = "") -> float | None:
        """A mean that all seeds have a value for."""
        row = self.row(method, value)
        cell = None if row is None else row.cells[column.key]
        return cell.mean if cell is not None and cell.count == cell.of else None


def records_of(aim: Target, store: Store, name: str, method: str, swept: Sequence[str], wish: Wish) -> list[Record]:
    """The records of a row that go to the target's end, by seed.

    A method is shown as it was tuned, once it was; never some seeds so and others with the defaults.
    """
    row = method, wish.changes(swept)
    found = [record for record in _long_enough(aim, store, name, wish) if _row_of(record) == row]
    tuned = any(record["tuned"] for record in found) and (aim.is_table or as_tuned(aim, store, name, wish))
    return sorted((one for one in found if one["tuned"] == tuned), key=lambda record: int(record["seed"]))


def as_tuned(aim: Target, store: Store, name: str, wish: Wish) -> bool:
    """Whether a figure shows methods as they were tuned: once all that it would show otherwise were run so.

    It asks what one thing changes, and a method at its defaults beside tuned ones would be a second thing. Methods
    that were never tuned there are not waited for.
    """
    known = _tuned_in(store, name)
    rows = {(method, wish.changes(swept)) for method in aim.methods for swept in aim.values.values()}
    there = [record for record in _long_enough(aim, store, name, wish) if _row_of(record) in rows]
    tuned = {_row_of(record) for record in there if record["tuned"]}
    return bool(tuned) and tuned >= {_row_of(record) for record in there if family(record["method"]) in known}


def seeds_done(aim: Target, store: Store, name: str, method: str, swept: Sequence[str]) -> set[int]:
    """The seeds of a row that need not be run: as tuned, if the method was tuned in the setting at all."""
    tuned, row = family(method) in _tuned_in(store, name), (method, tuple(swept))
    found = (record for record in _long_enough(aim, store, name, Wish()) if _row_of(record) == row)
    return {int(record["seed"]) for record in found if record["tuned"] == tuned}


def _tuned_in(store: Store, name: str) -> set[str]:
    """Methods with a record in the setting for which they had been tuned; AEDFL's variants share its trials."""
    return {family(record["method"]) for record in store if record["setting"] == name and record["tuned"]}


def _long_enough(aim: Target, store: Store, name: str, wish: Wish) -> list[Record]:
    end = wish.end(name, aim) - 1e-6
    return [one for one in store if one["setting"] == name and one["reached"] >= end and "error" not in one]


def _row_of(record: Record) -> tuple[str, tuple[str, ...]]:
    return record["method"], tuple(record["changes"])


def standing(aim: Target, name: str, store: Store, wish: Wish) -> Standing:
    """The figures of a target in one setting; the best of each column is marked, per value of what is varied."""
    until, goal = wish.end(name, aim), setting(name).target
    alone = next(iter(aim.values.values())) if len(aim.values) == 1 else ()
    average = [final(record["curve"], until) for record in records_of(aim, store, name, "fedavg", alone, wish)]
    second = FEDAVG_SHARE * mean(average) if average else None
    rows: list[Row] = []
    for value, swept in aim.values.items():
        group = [
            _row(method, value, records_of(aim, store, name, method, swept, wish), until, goal, second)
            for method in aim.methods
        ]
        rows += _with_best(group)
    return Standing(name, until, goal, second, rows)


def _row(method: str, value: str, records: Sequence[Record], until: float, goal: float, second: float | None) -> Row:
    curves = [record["curve"] for record in records]
    cells = {
        "accuracy": cell_of([final(curve, until) for curve in curves]),
        "local": cell_of([final(curve, until, "local_accuracy") for curve in curves]),
        "time": cell_of([reaches(curve, until, goal) for curve in curves]),
        "time95": cell_of([None if second is None else reaches(curve, until, second) for curve in curves]),
        "mmacs": cell_of([final(curve, until, "mmacs") for curve in curves]),
    }
    return Row(method, value, tuple(int(record["seed"]) for record in records), cells)


def seeds_in_words(row: Row) -> str:
    """How many seeds; and which, where they are not the first ones, so that nobody takes them for the others'."""
    first = tuple(range(FIRST_SEED, FIRST_SEED + row.seeds))
    named = "" if row.which == first else f" (seed {', '.join(map(str, row.which))})"
    return f"{row.seeds}{named}"


def _with_best(rows: Sequence[Row]) -> list[Row]:
    run = [row for row in rows if row.seeds]
    best = {column.key: best_of(column, [row.cells[column.key] for row in run]) for column in COLUMNS}
    return [
        Row(row.method, row.value, row.which, {key: marked(cell, best[key]) for key, cell in row.cells.items()})
        for row in rows
    ]
