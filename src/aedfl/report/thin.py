"""Making many points few without changing what the eye sees."""

from __future__ import annotations

import numpy as np

from .record import Floats


def thinned(x: Floats, y: Floats, most: int = 400) -> tuple[Floats, Floats]:
    """At most about `most` of the points: of every stretch its first, lowest, highest and last."""
    good = np.isfinite(x) & np.isfinite(y)
    x, y = x[good], y[good]
    if len(x) <= most:
        return x, y
    keep: set[int] = set()
    for part in np.array_split(np.arange(len(x)), most // 4):
        keep |= {int(part[0]), int(part[-1]), int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    chosen = np.array(sorted(keep))
    return x[chosen], y[chosen]


def banded(times: Floats, values: Floats, most: int = 80) -> tuple[Floats, Floats, Floats, Floats]:
    """Over equal stretches of time: the stretch's middle, and the values' mean, 10 % and 90 % quantile."""
    if len(times) == 0:
        return (np.empty(0),) * 4
    bins = min(most, max(8, len(times) // 12))
    edges, place = _bins(times, bins)
    order = np.argsort(place, kind="stable")
    sorted_values, starts = values[order], np.searchsorted(place[order], np.arange(bins + 1))
    filled = [i for i in range(bins) if starts[i + 1] > starts[i]]
    parts = [sorted_values[starts[i] : starts[i + 1]] for i in filled]
    cuts = np.array([np.quantile(part, (0.1, 0.9)) for part in parts])
    middle = (edges[:-1] + edges[1:])[filled] / 2
    return middle, np.array([part.mean() for part in parts]), cuts[:, 0], cuts[:, 1]


def binned_mean(times: Floats, values: Floats, end: float, bins: int) -> Floats:
    """Mean of the values in every stretch of 0 … end; NaN where there are none."""
    place = np.clip((times / end * bins).astype(np.int64), 0, bins - 1)
    count = np.bincount(place, minlength=bins).astype(np.float64)
    total = np.bincount(place, weights=values, minlength=bins)
    return np.where(count > 0, total / np.maximum(count, 1.0), np.nan)


def held(values: Floats) -> Floats:
    """Gaps (NaN) filled with the value before them."""
    last = np.maximum.accumulate(np.where(np.isfinite(values), np.arange(len(values)), 0))
    return np.asarray(values[last])


def coverage(start: Floats, end: Floats, last: float, bins: int) -> Floats:
    """Share of every stretch of 0 … last that the intervals cover (they do not overlap)."""
    edges = np.linspace(0.0, last, bins + 1)
    total = np.zeros(bins + 1)
    for sign, at in ((1.0, end), (-1.0, start)):
        # Intervals up to an edge: min(at, edge) summed over all of them, from a sorted cumulative sum.
        ordered = np.sort(at)
        sums = np.concatenate(([0.0], np.cumsum(ordered)))
        below = np.searchsorted(ordered, edges)
        total += sign * (sums[below] + (len(ordered) - below) * edges)
    return np.clip(np.diff(total) / (last / bins), 0.0, 1.0)


def grouped(index: int, count: int, groups: int) -> int:
    """The group of an index when `count` of them are shown as `groups`."""
    return index if count <= groups else index * groups // count


def _bins(times: Floats, bins: int) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    edges = np.linspace(times.min(), max(times.max(), times.min() + 1e-9), bins + 1)
    return edges, np.clip(np.searchsorted(edges, times, side="right") - 1, 0, bins - 1)
