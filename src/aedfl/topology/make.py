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
KINDS = (*_FORMULAS, "random", "file")


def make(
    kind: str,
    devices: int,
    seed: int = 0,
    degree: int | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Topology:
    """The topology of that kind; `seed` and `degree` (4, or as near as few devices allow) are for random,
    `path` is for file.
    """
    if devices < 1:
        raise UserError(f"devices = {devices}: at least one is needed")
    _check_used("degree", degree, "random", kind)
    _check_used("path", path, "file", kind)
    if kind == "random":
        return random_regular(devices, _usual_degree(devices) if degree is None else degree, seed)
    if kind == "file":
        if path is None:
            raise UserError("topology 'file' needs the path of an edge list")
        return read_edges(path, devices)
    if kind not in _FORMULAS:
        raise unknown("topology", kind, KINDS)
    return _FORMULAS[kind](devices)


def _check_used(key: str, value: object, needs: str, kind: str) -> None:
    if value is not None and kind != needs and kind in KINDS:
        raise UserError(f"{key} = {value} is for topology {needs!r}, and {kind!r} takes none; leave it out")


def _usual_degree(devices: int) -> int:
    """An even degree suits any number of devices; below three there is only one choice."""
    return devices - 1 if devices < 3 else min(4, (devices - 1) // 2 * 2)
