"""Charts made of cells and rows: heat maps, and who worked when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import svg
from .record import Floats
from .scale import Axis, exact, short

LEVELS = 9
"""Shades in the style sheet, `h1` … `h9`; an empty cell is not drawn."""


def heat_map(
    cells: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    row_label: str,
    column_label: str,
    unit: str,
    name: str,
    width: int = 560,
    row_height: float = 0.0,
    top: float | None = None,
) -> str:
    """Cells [rows, columns], darker for more, empty where NaN; `top` is the value of the darkest shade."""
    highest = top if top is not None else float(np.nanmax(cells)) if np.isfinite(cells).any() else 1.0
    left, right, above, below = 74, 18, 8, 46
    step_x = (width - left - right) / cells.shape[1]
    step_y = row_height or min(step_x, 380 / cells.shape[0])
    height = above + step_y * cells.shape[0] + below
    drawn = [_shade(cells, level, highest, (left, above), (step_x, step_y)) for level in range(1, LEVELS + 1)]
    frame = svg.tag(
        "rect", x=left, y=above, width=step_x * cells.shape[1], height=step_y * cells.shape[0], class_="frame"
    )
    words = _row_names(rows, left, above, step_y) + _column_names(columns, left, height - below, step_x)
    middle = (left + (width - left - right) / 2, above + step_y * cells.shape[0] / 2)
    labels = [
        svg.text(column_label, middle[0], height - 6, "middle", "label"),
        svg._upright(row_label, 13, middle[1]),
    ]
    drawing = svg.tag(
        "svg",
        frame,
        *drawn,
        *words,
        *labels,
        viewBox=f"0 0 {width} {height:.0f}",
        role="img",
        aria_label=name,
        class_="heat",
        data_grid=f"{left},{above},{step_x:.4f},{step_y:.4f},{cells.shape[0]},{cells.shape[1]}",
        data_cells=",".join(_cell(value) for value in cells.ravel().tolist()),
        data_rows="|".join(rows),
        data_columns="|".join(columns),
        data_unit=unit,
    )
    return drawing + _key(highest, unit)


def time_line(start: Floats, end: Floats, row: NDArray[np.int64], names: Sequence[str], until: float) -> str:
    """A bar per local update from its start to its end; rows are devices. Neighbours differ in shade."""
    row_height = 13.0 if len(names) > 20 else 18.0
    height = int(len(names) * row_height) + 60
    x = exact(0.0, until, "Virtual time (s)", count=10)
    y = Axis(0.0, float(len(names)), (), "Device")
    plot = svg.Plot(x, y, 1140, height, left=62, top=8)
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
    labels = [
        svg.text(words, plot.left - 8, plot.top + (i + 0.5) * step + 4, "end") for i, words in enumerate(names)
    ]
    return plot.draw(*drawn, *labels, name="When each device worked", kind="timeline")


def _shade(
    cells: NDArray[np.float64], level: int, top: float, origin: tuple[float, float], step: tuple[float, float]
) -> str:
    """All cells of one shade as one path."""
    levels = np.clip(np.ceil(np.nan_to_num(cells / (top or 1.0)) * LEVELS), 0, LEVELS)
    rows, columns = np.nonzero((levels == level) & np.isfinite(cells))
    if len(rows) == 0:
        return ""
    gap = 0.8 if min(step) > 5 else 0.0
    x = origin[0] + columns * step[0] + gap / 2
    y = origin[1] + rows * step[1] + gap / 2
    d = svg.boxes(x, y, np.full(len(x), step[0] - gap), step[1] - gap)
    return svg.tag("path", d=d, class_=f"h{level}")


def _row_names(names: Sequence[str], left: float, above: float, step: float) -> list[str]:
    every = max(1, int(np.ceil(13 / step)))
    shown = list(enumerate(names))[::every]
    return [svg.text(words[:11], left - 7, above + (i + 0.5) * step + 4, "end") for i, words in shown]


def _column_names(names: Sequence[str], left: float, floor: float, step: float) -> list[str]:
    longest = max(len(words) for words in names)
    every = max(1, int(np.ceil((longest * 7 + 12) / step)))
    shown = list(enumerate(names))[::every]
    return [svg.text(words, left + (i + 0.5) * step, floor + 17, "middle") for i, words in shown]


def _key(top: float, unit: str) -> str:
    shades = "".join(f'<i class="h{level}"></i>' for level in range(1, LEVELS + 1))
    return f'<div class="ramp"><span>0</span>{shades}<span>{short(top)} {unit}</span></div>'


def _cell(value: float) -> str:
    return "" if not np.isfinite(value) or value == 0 else f"{value:.4g}"
