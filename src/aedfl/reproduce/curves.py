"""What tables say about a curve. Every rule is the same for all methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

Curve = Mapping[str, Sequence[float]]

LAST = 3
"""Measurements in the mean that counts as the figure at the end."""


def cut(curve: Curve, until: float, column: str) -> list[float]:
    """A column up to a virtual time."""
    return [value for at, value in zip(curve["time"], curve[column], strict=True) if at <= until + 1e-6]


def final(curve: Curve, until: float, column: str = "accuracy") -> float:
    """Mean of the last measurements up to a virtual time."""
    return mean(cut(curve, until, column)[-LAST:])


def reaches(curve: Curve, until: float, target: float) -> float | None:
    """Virtual seconds at the first measurement of the mean model that has the target; None if none has."""
    pairs = zip(cut(curve, until, "time"), cut(curve, until, "accuracy"), strict=True)
    return next((at for at, accuracy in pairs if accuracy >= target), None)
