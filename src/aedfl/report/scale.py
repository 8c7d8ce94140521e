"""Axes: nice ticks, pixels for values, and numbers as people write them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .record import Floats

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """A range of values with its ticks; `divide` turns values into the unit of the label."""

    lo: float
    hi: float
    ticks: tuple[float, ...]
    label: str = ""
    log: bool = False
    divide: float = 1.0

    def share(self, values: Floats) -> Floats:
        """Where the values lie between both ends, 0 to 1; beyond the ends when they do."""
        if self.log:
            clipped = np.maximum(values, self.lo / 10)
            return np.asarray(np.log(clipped / self.lo) / math.log(self.hi / self.lo))
        return np.asarray((values - self.lo) / (self.hi - self.lo))

    def text(self, tick: float) -> str:
        value = tick / self.divide
        if abs(value) >= 1e5:
            return short(value)
        return f"{value:,.10g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.0e}"


def linear(lo: float, hi: float, label: str = "", count: int = 5, divide: float = 1.0) -> Axis:
    """An axis that covers lo … hi and ends on ticks at both ends."""
    lo, hi = _apart(lo / divide, hi / divide)
    step = _step((hi - lo) / count)
    first, last = math.floor(lo / step + 1e-9), math.ceil(hi / step - 1e-9)
    ticks = tuple(round(i * step, 12) * divide for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, label, divide=divide)


def exact(lo: float, hi: float, label: str = "", count: int = 8, divide: float = 1.0) -> Axis:
    """An axis from lo to hi as they are; ticks lie inside."""
    lo, hi = _apart(lo, hi)
    outer = linear(lo, hi, label, count, divide)
    ticks = tuple(tick for tick in outer.ticks if lo - 1e-12 <= tick <= hi * (1 + 1e-12))
    return Axis(lo, hi, ticks, label, divide=divide)


def logarithmic(lo: float, hi: float, label: str = "") -> Axis:
    """Decades; with 2 and 5 between them when there are few."""
    first, last = math.floor(math.log10(lo)), math.ceil(math.log10(hi))
    last = max(last, first + 1)
    parts = (1, 2, 5) if last - first <= 2 else (1,)
    every = max(1, (last - first) // 6)
    ticks = [p * 10.0**e for e in range(first, last, every) for p in parts] + [10.0**last]
    return Axis(10.0**first, 10.0**last, tuple(ticks), label, log=True)


def fitted(values: Floats, label: str, zero: bool = False, log_from: float | None = None) -> Axis:
    """An axis for these values: with zero if asked; logarithmic when they span a factor of `log_from`."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return linear(0.0, 1.0, label)
    lo, hi = float(finite.min()), float(finite.max())
    if log_from is not None and lo > 0 and hi / lo >= log_from:
        return logarithmic(lo, hi, label)
    return linear(min(lo, 0.0) if zero else lo, hi, label)


def prefix(value: float) -> tuple[float, str]:
    """Divisor and SI prefix under which a number is short."""
    return next(((size, letter) for size, letter in _PREFIXES if abs(value) >= size), (1.0, ""))


def short(value: float | None, unit: str = "", digits: int = 3) -> str:
    """'1.23 GB', '45.6k', '–' for none."""
    if value is None or not math.isfinite(value):
        return "–"
    size, letter = prefix(value)
    scaled = value / size
    text = f"{scaled:.{digits}g}" if abs(scaled) < 1000 else f"{scaled:,.0f}"
    return f"{text} {letter}{unit}" if unit else f"{text}{letter}"


def seconds(value: float | None) -> str:
    """'1,234 s', '5.67 s', '–' for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _apart(lo: float, hi: float) -> tuple[float, float]:
    if hi - lo > 1e-12 * max(abs(lo), abs(hi), 1e-12):
        return lo, hi
    room = abs(lo) * 0.1 or 0.5
    return lo - room, hi + room


def _step(rough: float) -> float:
    size = 10.0 ** math.floor(math.log10(rough))
    return next(step for step in _STEPS if step * size >= rough * 0.999) * size
