"""Charts made of cells and rows: heat maps, and who worked when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import svg
from .record import Floats
from .scale import Axis, exact, short

LEVELS = 9
"""Shades in the style sheet, `h1` … `h9`; an empty cell is not drawn."""
RIGHT, TOP, BOTTOM = 18, 8, 46
LONGEST = 18
"""Letters of a row's name that are shown: its last ones."""


@dataclass(frozen=True)
class Grid:
    """Cells [rows, columns], darker for more, empty where NaN, with names for rows and columns."""

    cells: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    row_label: str
    column_label: str
    unit: str
    width: int = 560
    row_height: float | None = None
    top: float | None = None
    """Value of the darkest shade; the largest one when not given."""
    until: float | None = None
    """Columns are equal stretches of time up to here, and get a time axis instead of names."""

    @property
    def highest(self) -> float:
        if self.top is not None:
            return self.top
        return float(np.nanmax(self.cells)) if np.isfinite(self.cells).any() else 1.0

    @property
    def left(self) -> float:
        return 36 + 7.2 * min(LONGEST, max(4, *(len(row) for row in self.rows)))

    @property
    def step(self) -> tuple[float, float]:
        """Width and height of a cell."""
        rows, columns = self.cells.shape
        wide = (self.width - self.left - RIGHT) / columns
        return wide, self.row_height or min(wide, 380 / rows)

    @property
    def floor(self) -> float:
        return float(TOP + self.step[1] * self.cells.shape[0])


def heat_map(grid: Grid, name: str) -> str:
    """The drawing and its key; `name` is read to those who cannot see it."""
    wide, high = grid.step
    count = grid.cells.shape
    box = svg.tag("rect", x=grid.left, y=TOP, width=wide * count[1], height=high * count[0], class_="frame")
    shades = [_shade(grid, level) for level in range(1, LEVELS + 1)]
    names = [*_row_names(grid), *(_column_names(grid) if grid.until is None else _times(grid, grid.until))]
    labels = [
        svg.text(grid.column_label, (grid.left + grid.width - RIGHT) / 2, grid.floor + 40, "middle", "label"),
        svg.upright(grid.row_label, 13, (TOP + grid.floor) / 2),
    ]
    data = {
        "data_grid": f"{grid.left:g},{TOP},{wide:.4f},{high:.4f},{count[0]},{count[1]}",
        "data_cells": ",".join(_cell(value) for value in grid.cells.ravel().tolist()),
        "data_rows": "|".join(f"{grid.row_label} {row}" for row in grid.rows),
        "data_columns": "|".join(grid.columns),
        "data_join": "→" if grid.until is None else "at",
        "data_unit": grid.unit,
    }
    parts = (box, *shades, *names, *labels)
    return svg.drawing(grid.width, grid.floor + BOTTOM, name, "heat", *parts, **data) + _key(grid)


def time_line(start: Floats, end: Floats, row: NDArray[np.int64], names: Sequence[str], until: float) -> str:
    """A bar per local update from its start to its end; rows are devices. Neighbours differ in shade."""
    height = int(len(names) * (13 if len(names) > 20 else 18)) + 60
    x = exact(0.0, until, "Virtual time (s)", count=10)
    plot = svg.Plot(x, Axis(0.0, float(len(names)), (), "Device"), 1140, height, top=8)
    step = plot.inner[1] / len(names)
    order = np.lexsort((start, row))
    turn = np.arange(len(order)) - np.searchsorted(row[order], row[order])
    drawn = []
    for odd in (0, 1):
        chosen = order[turn % 2 == odd]
        left = plot.px(start[chosen])
        wide = np.maximum(plot.px(np.minimum(end[chosen], until)) - left - 0.8, 0.6)
        d = svg.boxes(left, plot.top + row[chosen] * step + 1.5, wide, step - 3)
        drawn.append(svg.tag("path", d=d, class_=f"work w{odd}"))
    middles = (plot.top + (np.arange(len(names)) + 0.5) * step + 4).tolist()
    labels = [svg.text(words, plot.left - 8, y, "end") for words, y in zip(names, middles, strict=True)]
    return plot.draw(*drawn, *labels, name="When each device worked", kind="timeline")


def _shade(grid: Grid, level: int) -> str:
    """All cells of one shade as one path."""
    levels = np.clip(np.ceil(np.nan_to_num(grid.cells / (grid.highest or 1.0)) * LEVELS), 0, LEVELS)
    rows, columns = np.nonzero((levels == level) & np.isfinite(grid.cells))
    if len(rows) == 0:
        return ""
    wide, high = grid.step
    gap = 0.8 if min(grid.step) > 8 else 0.0
    x = np.asarray(grid.left + gap / 2 + columns * wide, dtype=np.float64)
    y = np.asarray(TOP + gap / 2 + rows * high, dtype=np.float64)
    d = svg.boxes(x, y, np.full(len(x), wide - gap), high - gap)
    return svg.tag("path", d=d, class_=f"h{level}")


def _row_names(grid: Grid) -> list[str]:
    every = max(1, int(np.ceil(14 / grid.step[1])))
    middle = TOP + grid.step[1] / 2 + 4
    shown = list(enumerate(grid.rows))[::every]
    return [svg.text(words[-LONGEST:], grid.left - 7, middle + i * grid.step[1], "end") for i, words in shown]


def _column_names(grid: Grid) -> list[str]:
    longest = max(len(words) for words in grid.columns)
    every = max(1, int(np.ceil((longest * 7 + 12) / grid.step[0])))
    middle = grid.left + grid.step[0] / 2
    shown = list(enumerate(grid.columns))[::every]
    return [svg.text(words, middle + i * grid.step[0], grid.floor + 17, "middle") for i, words in shown]


def _times(grid: Grid, until: float) -> list[str]:
    axis = exact(0.0, until, count=7)
    at = grid.left + axis.share(np.array(axis.ticks)) * (grid.width - grid.left - RIGHT)
    shown = zip(at.tolist(), axis.ticks, strict=True)
    return [svg.text(axis.text(tick), x, grid.floor + 17, "middle") for x, tick in shown]


def _key(grid: Grid) -> str:
    shades = "".join(f'<i class="h{level}"></i>' for level in range(1, LEVELS + 1))
    return f'<div class="ramp"><span>0</span>{shades}<span>{short(grid.highest)} {grid.unit}</span></div>'


def _cell(value: float) -> str:
    return "" if not np.isfinite(value) or value == 0 else f"{value:.4g}"
