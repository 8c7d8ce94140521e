"""The topology of a given name."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..data.names import unknown
from ..errors import UserError
from .edges import random_regular, read_edges
from .kinds import Exponential, Full, Ring, Star, Topology, Torus

_FORMULAS: dict[str, Callable[[int], Topology]] = {
    "exponential": Exponential,
    "ring": Ring,
    "star": Star,
    "torus": Torus,
    "full": Full,
}
KINDS = (*_FORMULAS, "random-regular", "edges")


def make(
    kind: str,
    devices: int,
    seed: int = 0,
    degree: int = 4,
    path: str | os.PathLike[str] | None = None,
) -> Topology:
    """The topology of that kind; `seed` and `degree` are for random-regular, `path` for edges."""
    if devices < 1:
        raise UserError(f"devices = {devices}: at least one is needed")
    if kind == "random-regular":
        return random_regular(devices, degree, seed)
    if kind == "edges":
        if path is None:
            raise UserError("topology 'edges' needs the path of an edge list")
        return read_edges(path, devices)
    if kind not in _FORMULAS:
        raise unknown("topology", kind, KINDS)
    return _FORMULAS[kind](devices)
