"""Graphs that must be stored: random ones, and a user's own from a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import numpy as np

from ..errors import UserError
from ..randomness import generator
from .kinds import Neighbours, Topology


@final
@dataclass(frozen=True)
class Edges(Topology):
    """Any graph, as adjacency lists; made by `from_edges`."""

    devices: int
    sources: tuple[Neighbours, ...] = field(repr=False)
    targets: tuple[Neighbours, ...] = field(repr=False)

    def in_neighbours(self, device: int) -> Neighbours:
        return self.sources[device]

    def out_neighbours(self, device: int) -> Neighbours:
        return self.targets[device]


def from_edges(devices: int, edges: Iterable[tuple[int, int]]) -> Edges:
    """The graph of directed edges (from, to); neighbours in ascending order."""
    sources: list[list[int]] = [[] for _ in range(devices)]
    targets: list[list[int]] = [[] for _ in range(devices)]
    for start, end in sorted(set(edges)):
        targets[start].append(end)
        sources[end].append(start)
    return Edges(devices, tuple(map(tuple, sources)), tuple(map(tuple, targets)))


def random_regular(devices: int, degree: int, seed: int) -> Edges:
    """A connected undirected graph in which everybody has `degree` neighbours.

    A random cycle through all devices, which keeps it connected, plus a random regular graph on the rest of
    the degree, mixed by swapping the ends of random pairs of edges. For degree >= 3, properties that almost
    all such sums have are those that almost all random regular graphs have (Robinson and Wormald 1994).
    """
    _check_degree(devices, degree)
    rng = generator(seed, "topology", devices, degree)
    order = rng.permutation(devices).tolist()
    steps = [k for k in range(1, degree // 2 + 1)] + ([devices // 2] if degree % 2 else [])
    rings = [[_edge(order[i], order[(i + step) % devices]) for i in range(devices)] for step in steps]
    cycle = set(rings[0]) if rings else set()
    chords = _swapped(list(dict.fromkeys(e for ring in rings[1:] for e in ring)), cycle, rng)
    return from_edges(devices, [pair for a, b in [*cycle, *chords] for pair in ((a, b), (b, a))])


def _check_degree(devices: int, degree: int) -> None:
    feasible = 0 <= degree < devices and degree * devices % 2 == 0
    if not feasible or (degree < 2 and degree != devices - 1):
        raise UserError(
            f"degree = {degree} for {devices} devices: a connected regular graph needs a degree from 2 to "
            f"{devices - 1}, and an even one if the number of devices is odd"
        )


def _edge(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def _swapped(
    edges: list[tuple[int, int]], fixed: set[tuple[int, int]], rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Edges with the same degrees, after ten tries per edge to swap the ends of two of them."""
    present = fixed | set(edges)
    tries = 10 * len(edges)
    picks = rng.integers(0, max(len(edges), 1), (tries, 2)).tolist()
    for (i, j), flip in zip(picks, rng.integers(0, 2, tries).tolist(), strict=True):
        (a, b), (c, d) = edges[i], edges[j][::-1] if flip else edges[j]
        one, two = _edge(a, c), _edge(b, d)
        if len({a, b, c, d}) == 4 and one not in present and two not in present:
            present -= {edges[i], edges[j]}
            present |= {one, two}
            edges[i], edges[j] = one, two
    return edges


def read_edges(path: str | os.PathLike[str], devices: int) -> Edges:
    """A file with one directed edge `from,to` on a line (comma, semicolon or blanks between).

    Empty lines, `#` and what follows it, and a first line `from,to` are skipped.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"edge list {file} cannot be read: {reason}") from error
    seen: dict[tuple[int, int], int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text or re.fullmatch(r"from\W+to", text, re.IGNORECASE):
            continue
        edge = _parse_edge(text, devices, f"{file}, line {number}")
        if edge in seen:
            raise UserError(f"{file}, line {number}: the edge '{text}' was already on line {seen[edge]}")
        seen[edge] = number
    return from_edges(devices, seen)


def _parse_edge(text: str, devices: int, where: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:\s*[,;]\s*|\s+)(\d+)", text)
    if match is None:
        raise UserError(f"{where}: '{text}' is not an edge, write two device numbers as 'from,to'")
    start, end = int(match[1]), int(match[2])
    if max(start, end) >= devices:
        raise UserError(f"{where}: there is no device {max(start, end)}, they run from 0 to {devices - 1}")
    if start == end:
        raise UserError(f"{where}: device {start} cannot be its own neighbour")
    return start, end
