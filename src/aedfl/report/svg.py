"""Small pieces of SVG: tags, a plot area with axes, paths."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np

from .record import Floats
from .scale import Axis


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element; `class_` is written class, and other underscores become hyphens."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>"


def drawing(width: float, height: float, name: str, kind: str, *content: str, **data: object) -> str:
    """A drawing in a box that scrolls on a narrow screen; `name` is read to those who cannot see it."""
    box = f"0 0 {width:.0f} {height:.0f}"
    inner = tag("svg", *content, viewBox=box, role="img", aria_label=name, class_=kind, **data)
    return f'<div class="scroll">{inner}</div>'


def text(words: str, x: float, y: float, anchor: str = "start", class_: str = "tick") -> str:
    return tag("text", escape(words), x=x, y=y, text_anchor=anchor, class_=class_)


def path(x: Floats, y: Floats) -> str:
    """The polyline's `d`."""
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def boxes(x: Floats, y: Floats, width: Floats, height: float) -> str:
    """Many rectangles as one `d`."""
    corners = zip(x.tolist(), y.tolist(), width.tolist(), strict=True)
    return "".join(f"M{a:.1f} {b:.1f}h{w:.1f}v{height:.1f}h-{w:.1f}z" for a, b, w in corners)


@dataclass(frozen=True)
class Plot:
    """A drawing with an area for data and two axes around it."""

    x: Axis
    y: Axis
    width: int = 560
    height: int = 300
    left: int = 68
    right: int = 18
    top: int = 12
    bottom: int = 46

    @property
    def inner(self) -> tuple[float, float]:
        return self.width - self.left - self.right, self.height - self.top - self.bottom

    def px(self, values: Floats) -> Floats:
        return np.asarray(self.left + self.x.share(values) * self.inner[0])

    def py(self, values: Floats) -> Floats:
        return np.asarray(self.top + (1 - self.y.share(values)) * self.inner[1])

    def draw(self, *content: str, name: str, kind: str) -> str:
        """The whole drawing; `name` is read to those who cannot see it."""
        ends = {
            "data_x": self._described(self.x, self.left, self.left + self.inner[0]),
            "data_y": self._described(self.y, self.top + self.inner[1], self.top),
        }
        return drawing(self.width, self.height, name, kind, *self.framed(*content), **ends)

    def framed(self, *content: str) -> tuple[str, ...]:
        """The content with grid and axes around it."""
        return (*self._grid(), *content, *self._labels())

    def _described(self, axis: Axis, first: float, last: float) -> str:
        """Pixels and values of both ends, so that the page's script can read values off the drawing."""
        scale = "log" if axis.log else "linear"
        return f"{first:g},{last:g},{axis.lo / axis.divide:g},{axis.hi / axis.divide:g},{scale}"

    def _grid(self) -> list[str]:
        right, floor = self.left + self.inner[0], self.top + self.inner[1]
        rows = [
            tag("line", x1=self.left, x2=right, y1=y, y2=y, class_="grid")
            for y in self.py(np.array(self.y.ticks)).tolist()
        ]
        return [*rows, tag("line", x1=self.left, x2=right, y1=floor, y2=floor, class_="base")]

    def _labels(self) -> list[str]:
        floor = self.top + self.inner[1]
        xs = zip(self.px(np.array(self.x.ticks)).tolist(), self.x.ticks, strict=True)
        ys = zip(self.py(np.array(self.y.ticks)).tolist(), self.y.ticks, strict=True)
        middle = self.left + self.inner[0] / 2
        return [
            *(text(self.x.text(tick), at, floor + 17, "middle") for at, tick in xs),
            *(text(self.y.text(tick), self.left - 8, at + 4, "end") for at, tick in ys),
            text(self.x.label, middle, self.height - 6, "middle", "label"),
            upright(self.y.label, 13, self.top + self.inner[1] / 2),
        ]


def upright(words: str, x: float, y: float) -> str:
    turned = f"translate({x:g} {y:g}) rotate(-90)"
    return tag("text", escape(words), transform=turned, text_anchor="middle", class_="label")


def _attribute(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
