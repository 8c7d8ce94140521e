"""A picture of a graph: one self-contained SVG, devices on a circle."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, cos, hypot, pi, sin

from .kinds import Topology

_SIZE = 640
_MOST_LABELS = 64
_MOST_LINES = 20_000
_HEAD = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {_SIZE}" width="{_SIZE}" height="{_SIZE}" '
    'font-family="system-ui, sans-serif">'
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#7a8ca3"/></marker></defs>'
    '<rect width="100%" height="100%" fill="#ffffff"/>'
)
Point = tuple[float, float]


def draw_svg(topology: Topology) -> str:
    """The graph as SVG text: arrows for edges that go one way, plain lines for those that go both.

    Above 64 devices, lines are thin and without arrows, and there are no labels. Of very many edges, those
    of evenly spaced devices are drawn, and the picture says so.
    """
    n = topology.devices
    small = n <= _MOST_LABELS
    radius = max(2.0, min(18.0, 260 * pi / n * 0.6))
    places = [_place(i, n) for i in range(n)]
    total = sum(len(topology.in_neighbours(i)) for i in range(n))
    step = max(1, ceil(total / _MOST_LINES))
    edges = list(_edges(topology, step))
    lines = _lines(edges, places, radius) if small else _threads(edges, places)
    caption = f"{n} devices, {total} directed edges" + (
        f", those of every {step}th device shown" * (step > 1)
    )
    nodes = "".join(_node(i, place, radius, small) for i, place in enumerate(places))
    note = f'<text x="12" y="{_SIZE - 12}" font-size="13" fill="#4a5568">{caption}</text>'
    return f"{_HEAD}<title>{caption}</title>{lines}{nodes}{note}</svg>\n"


def _place(device: int, n: int) -> Point:
    """Device 0 at the top, clockwise."""
    angle = 2 * pi * device / n - pi / 2
    reach = 0 if n == 1 else 270
    return _SIZE / 2 + reach * cos(angle), _SIZE / 2 - 8 + reach * sin(angle)


def _edges(topology: Topology, step: int) -> Iterator[tuple[int, int, bool]]:
    """(from, to, both ways) of the edges into every `step`th device; one that goes both ways comes once."""
    for i in range(0, topology.devices, step):
        back = set(topology.out_neighbours(i))
        for j in topology.in_neighbours(i):
            if j not in back:
                yield j, i, False
            elif j < i or j % step:
                yield j, i, True


def _lines(edges: list[tuple[int, int, bool]], places: list[Point], radius: float) -> str:
    """One line an edge, from rim to rim of the discs so that arrowheads can be seen."""
    drawn = []
    for start, end, both in edges:
        (x1, y1), (x2, y2) = places[start], places[end]
        length = hypot(x2 - x1, y2 - y1)
        dx, dy = radius * (x2 - x1) / length, radius * (y2 - y1) / length
        head = "" if both else ' marker-end="url(#arrow)"'
        drawn.append(f'<path d="M{x1 + dx:.1f} {y1 + dy:.1f}L{x2 - dx:.1f} {y2 - dy:.1f}"{head}/>')
    return f'<g stroke="#7a8ca3" stroke-width="1.2" fill="none">{"".join(drawn)}</g>'


def _threads(edges: list[tuple[int, int, bool]], places: list[Point]) -> str:
    """All edges as one path, which keeps large pictures small."""
    spans = (places[a] + places[b] for a, b, _ in edges)
    path = "".join(f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" for x1, y1, x2, y2 in spans)
    return f'<path d="{path}" stroke="#7a8ca3" stroke-width="0.3" stroke-opacity="0.6" fill="none"/>'


def _node(device: int, place: Point, radius: float, label: bool) -> str:
    x, y = place
    disc = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="#2b6cb0"/>'
    if not label:
        return disc
    text = f'text-anchor="middle" dominant-baseline="central" font-size="{radius * 0.95:.1f}" fill="#ffffff"'
    return f'{disc}<text x="{x:.1f}" y="{y:.1f}" {text}>{device}</text>'
