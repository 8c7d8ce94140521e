"""Several runs in one table: mean and spread over seeds per method, the best of each column marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from .record import number

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A figure of `summary.json` as the tables show it."""

    key: str
    title: str
    brief: str
    """The title where there is little room."""
    higher: bool
    """Whether more is better."""
    divide: float = 1.0
    form: str = ".4f"


COLUMNS = (
    Column("accuracy", "accuracy", "accuracy", True),
    Column("best_accuracy", "best accuracy", "best", True),
    Column("local_accuracy", "local accuracy", "local", True),
    Column("time_to_target", "time to target (s)", "target at s", False, form=",.0f"),
    Column("mmacs", "MMACs per sample", "MMACs", False, form=".4g"),
    Column("bytes_sent", "sent (MB)", "sent MB", False, divide=1e6, form=",.1f"),
)


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over the seeds that have a value; `of` is how many seeds there are."""

    mean: float | None
    std: float | None
    count: int
    of: int
    best: bool = False


@dataclass(frozen=True)
class Row:
    """One method (in one setting)."""

    name: str
    seeds: int
    cells: Mapping[str, Cell]


def comparison_table(summaries: Sequence[Summary]) -> list[Row]:
    """One row per method, in the order of first appearance; and per preset, where there are several."""
    groups = by_method(summaries)
    rows = [(name, len(runs), _cells(runs)) for name, runs in groups.items()]
    best = {column.key: best_of(column, [cells[column.key] for _, _, cells in rows]) for column in COLUMNS}
    return [
        Row(name, seeds, {key: marked(cell, best[key]) for key, cell in cells.items()}) for name, seeds, cells in rows
    ]


def by_method(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The runs of each method, under the name that tables and legends use."""
    settings = {(summary.get("preset"), summary.get("devices")) for summary in summaries}
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(row_name(summary, len(settings) > 1), []).append(summary)
    return groups


def row_name(summary: Summary, setting: bool) -> str:
    """The method, and the setting as well where runs differ in it."""
    method = str(summary.get("method") or "?")
    method = Path(method).stem if method.endswith(".py") else method
    where = f"{summary.get('preset') or 'custom'}, {summary.get('devices', '?')} devices"
    return f"{method} ({where})" if setting else method


def written(cell: Cell, column: Column) -> tuple[str, str]:
    """The mean, and what follows it: the spread, and how many seeds there are if not all."""
    if cell.mean is None:
        return "–", ""
    spread = "" if cell.std is None else f"± {cell.std / column.divide:{column.form}}"
    few = "" if cell.count == cell.of else f"({cell.count} of {cell.of})"
    return f"{cell.mean / column.divide:{column.form}}", " ".join(filter(None, (spread, few)))


def used(rows: Sequence[Row]) -> list[Column]:
    """The columns in which at least one row has a value."""
    return [column for column in COLUMNS if any(row.cells[column.key].mean is not None for row in rows)]


def _cells(runs: Sequence[Summary]) -> dict[str, Cell]:
    return {column.key: cell_of([number(run.get(column.key)) for run in runs]) for column in COLUMNS}


def cell_of(values: Sequence[float | None]) -> Cell:
    found = [value for value in values if value is not None]
    spread = stdev(found) if len(found) > 1 else None
    return Cell(mean(found) if found else None, spread, len(found), len(values))


def best_of(column: Column, cells: Sequence[Cell]) -> float | None:
    """The best mean among those that all seeds have (or any, if no row has all); none for a single row."""
    complete = [cell.mean for cell in cells if cell.mean is not None and cell.count == cell.of]
    means = complete or [cell.mean for cell in cells if cell.mean is not None]
    if len(cells) < 2 or not means or (len(means) == len(cells) and max(means) == min(means)):
        return None
    return max(means) if column.higher else min(means)


def marked(cell: Cell, best: float | None) -> Cell:
    same = best is not None and cell.mean is not None and math.isclose(cell.mean, best, rel_tol=1e-12)
    return Cell(cell.mean, cell.std, cell.count, cell.of, same)
