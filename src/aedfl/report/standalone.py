"""A chart as an SVG file of its own, with its colours and its legend in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from . import svg
from .charts import COLOURS, Series, line
from .scale import Axis

_HUES = ("#2a78d6", "#eb6834", "#1baf7a", "#c98500", "#4a3aa7", "#e34948", "#0b7285", "#d0579a")
_STYLE = """\
text{font:12.5px system-ui,"Liberation Sans",Arial,sans-serif;fill:#55554d}.title{font-size:14px;fill:#16160f}
.grid{stroke:#e3e3dd}.base{stroke:#b9b9b0}.target{stroke:#55554d;stroke-dasharray:2 4}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}.line.dash{stroke-dasharray:6 4}
.band{fill:var(--c);opacity:.14}.dot{fill:var(--c)}
"""


def chart(series: Sequence[Series], x: Axis, y: Axis, title: str, target: float | None = None) -> str:
    """Lines over a common axis as an SVG document; the legend stands to the right."""
    plot = svg.Plot(x, y, width=640, height=340, top=34)
    hues = "".join(f".c{i}{{--c:{hue}}}" for i, hue in enumerate(_HUES))
    goal = _goal(plot, target) if target is not None and y.lo <= target <= y.hi else ""
    drawn = [line(plot, one, number) for number, one in enumerate(series)]
    rows = [_key(plot.width + 6, plot.top + 8 + 19 * number, number, one.name) for number, one in enumerate(series)]
    width = plot.width + 60 + 8 * max((len(one.name) for one in series), default=0)
    height = max(plot.height, plot.top + 19 * len(series) + 10)
    return (
        svg.tag(
            "svg",
            svg.tag("style", _STYLE + hues),
            svg.tag("rect", width=width, height=height, fill="#fdfdfc"),
            svg.text(title, plot.left, 20, class_="title"),
            *plot.framed(goal, *drawn),
            *rows,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            role="img",
            aria_label=title,
        ).replace("><g", ">\n<g")
        + "\n"
    )


def _goal(plot: svg.Plot, target: float) -> str:
    y = float(plot.py(np.array([target]))[0])
    return svg.tag("line", x1=plot.left, x2=plot.left + plot.inner[0], y1=y, y2=y, class_="target")


def _key(x: float, y: float, number: int, name: str) -> str:
    dash = " dash" if number >= COLOURS else ""
    stroke = svg.tag("path", d=f"M{x:g} {y:g}h22", class_=f"line c{number % COLOURS}{dash}")
    return svg.tag("g", stroke, svg.tag("text", escape(name), x=x + 28, y=y + 4))
