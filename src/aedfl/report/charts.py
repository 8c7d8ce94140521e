"""The kinds of chart: lines with bands, bars, histogram. Each is a string of HTML with its legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from . import svg
from .record import Floats
from .scale import Axis, exact, fitted, linear, seconds
from .thin import thinned

COLOURS = 8
"""Hues in the style sheet; further series repeat them with a dashed line."""


@dataclass(frozen=True)
class Series:
    """One line; `low` and `high` make a band around it."""

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None


def lines(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    name: str,
    width: int = 560,
    height: int = 300,
    target: float | None = None,
) -> str:
    """Lines over a common axis, with a legend when there are several; empty when no line has two points."""
    shown = [one for one in series if np.isfinite(one.y).sum() >= 1]
    if not shown:
        return ""
    aimed = target is not None and y.lo <= target <= y.hi
    plot = svg.Plot(x, y, width, height, right=84 if aimed else 18)
    goal = [_target(plot, target)] if aimed and target is not None else []
    drawn = [line(plot, one, number) for number, one in enumerate(shown)]
    return _legend([one.name for one in shown]) + plot.draw(*goal, *drawn, name=name, kind="lines")


def over_time(series: Sequence[Series], end: float, label: str, name: str, log_from: float | None = None) -> str:
    """Lines over virtual time 0 … end; logarithmic when their values span a factor of `log_from`."""
    values = [part for one in series for part in (one.y, one.low, one.high) if part is not None]
    y = fitted(np.concatenate(values), label, zero=True, log_from=log_from)
    return lines(series, time_axis(end), y, name)


def time_axis(end: float) -> Axis:
    return exact(0.0, end or 1.0, "Virtual time (s)")


def histogram(counts: dict[int, int], x_label: str, y_label: str, name: str, most: int = 40) -> str:
    """A bar per whole number; those beyond `most` bars are added to the last one."""
    last = min(max(counts), min(counts) + most - 1)
    first = min(counts)
    heights = np.zeros(last - first + 1)
    for value, count in counts.items():
        heights[min(value, last) - first] += count
    values = np.arange(first, last + 1, dtype=np.float64)
    end = max(last, first + 9)
    ticks = tuple(float(tick) for tick in range(first, end + 1, max(1, len(values) // 12)))
    axis = Axis(first - 0.6, end + 0.6, ticks, x_label)
    plot = svg.Plot(axis, _counted(heights, y_label))
    more = f"{last} or more" if max(counts) > last else str(last)
    names = [*(str(int(v)) for v in values[:-1]), more]
    return plot.draw(_columns(plot, values, heights, names), name=name, kind="columns")


def bars(amounts: dict[str, float], name: str, most: int = 10) -> str:
    """Horizontal bars of seconds, longest first, with amount and share written beside them."""
    ordered = sorted(amounts.items(), key=lambda item: -item[1])
    rest = sum(amount for _, amount in ordered[most:])
    rows = [*ordered[:most], *([("other", rest)] if rest > 0 else [])]
    total, largest = sum(amounts.values()), rows[0][1]
    if total <= 0:
        return ""
    drawn = [_bar(i, *row, row[1] / largest, row[1] / total) for i, row in enumerate(rows)]
    return svg.drawing(560, len(rows) * 34 + 6, name, "bars", *drawn)


def _bar(row: int, words: str, amount: float, length: float, share: float) -> str:
    y = row * 34 + 6
    width = max(length * 290, 1.5)
    value = f"{seconds(amount)} · {share:.1%}"
    shape = svg.tag("rect", x=130, y=y, width=width, height=20, rx=3, class_="fill c0")
    return svg.text(words[:20], 122, y + 15, "end", "name") + shape + svg.text(value, 138 + width, y + 15)


def line(plot: svg.Plot, one: Series, number: int) -> str:
    """One series as a group of shapes, in the colour of its number."""
    hue, dash = f"c{number % COLOURS}", " dash" if number >= COLOURS else ""
    x, y = thinned(one.x, one.y)
    px, py = plot.px(x), plot.py(y)
    end = svg.tag("circle", cx=float(px[-1]), cy=float(py[-1]), r=3.5, class_=f"dot {hue}")
    stroke = svg.tag("path", d=svg.path(px, py), class_=f"line {hue}{dash}")
    return svg.tag("g", _band(plot, one, hue), stroke, end, class_="series", data_name=one.name)


def _band(plot: svg.Plot, one: Series, hue: str) -> str:
    if one.low is None or one.high is None:
        return ""
    good = np.isfinite(one.low) & np.isfinite(one.high)
    if good.sum() < 2:
        return ""
    low, high = thinned(one.x[good], one.low[good], 200), thinned(one.x[good], one.high[good], 200)
    x = np.concatenate((plot.px(high[0]), plot.px(low[0])[::-1]))
    y = np.concatenate((plot.py(high[1]), plot.py(low[1])[::-1]))
    return svg.tag("path", d=svg.path(x, y) + "Z", class_=f"band {hue}")


def _target(plot: svg.Plot, target: float) -> str:
    y = float(plot.py(np.array([target]))[0])
    right = plot.width - plot.right
    line = svg.tag("line", x1=plot.left, x2=right, y1=y, y2=y, class_="target")
    return line + svg.text(f"target {target:g}", right + 8, y + 4)


def _legend(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    items = (
        f'<button type="button" class="key c{i % COLOURS}{" dash" if i >= COLOURS else ""}" '
        f'aria-pressed="true"><svg viewBox="0 0 22 8" aria-hidden="true"><path d="M1 4H21"/></svg>'
        f"{escape(name)}</button>"
        for i, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _counted(heights: Floats, label: str) -> Axis:
    return linear(0.0, max(float(heights.max()), 1.0), label)


def _columns(plot: svg.Plot, values: Floats, heights: Floats, names: list[str]) -> str:
    floor = plot.top + plot.inner[1]
    tops = plot.py(heights)
    width = float(plot.px(values + 0.44)[0] - plot.px(values - 0.44)[0])
    drawn = []
    for x, y, count, words in zip(plot.px(values - 0.44), tops, heights, names, strict=True):
        label = svg.tag("title", f"{words}: {count:,.0f}")
        drawn.append(
            svg.tag("rect", label, x=float(x), y=float(y), width=width, height=float(floor - y), class_="fill c0")
        )
    return "".join(drawn)
