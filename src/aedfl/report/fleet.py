"""The charts that look at single devices: who sent to whom, who worked when, who kept which channels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import grids
from .grids import Grid, heat_map
from .panels import Card
from .record import Run, Traffic
from .thin import binned_mean, coverage, held
from .updates import Updates

MOST = 40
"""Rows and columns that are told apart by eye; more devices are shown in groups, or in a selection."""
BARS = 1500
"""Updates in the time line; it shows the first part of a long run."""


def traffic(run: Run, updates: Updates) -> Card | None:
    if run.traffic is None:
        return None
    cells, names = _matrix(run.traffic)
    body = heat_map(Grid(cells, names, names, "Sender", "Receiver", "messages"), "Who sent to whom")
    lost = f" {run.traffic.lost:,} were lost." if run.traffic.lost else ""
    groups = " Devices are shown in groups." if "–" in "".join(names) else ""
    total = f"{run.traffic.messages.sum():,.0f} messages.{lost}{groups}"
    return Card("Who sent to whom", total, body)


def time_line(run: Run, updates: Updates) -> Card | None:
    if not len(updates):
        return None
    start, end, device = (np.asarray(part) for part in (updates.start, updates.end, updates.device))
    shown, row = _selected(device)
    inside = row >= 0
    until = _window(start[inside], end[inside])
    seen = inside & (start < until)
    body = grids.time_line(start[seen], end[seen], row[seen], [str(d) for d in shown], until)
    known = len(np.unique(device))
    which = "" if len(shown) == known else f" {len(shown)} of {known:,} devices."
    part = f" The first {until:,.0f} of {end.max():,.0f} s." if until < end.max() * 0.99 else ""
    return Card("Device time line", f"A bar per local update.{part}{which}", body, wide=True)


def idle(run: Run, updates: Updates) -> Card | None:
    if len(updates) < BARS:
        return None
    start, end, device = (np.asarray(part) for part in (updates.start, updates.end, updates.device))
    shown, row = _selected(device)
    last, bins = float(end.max()), 60
    cells = np.array([coverage(start[row == i], end[row == i], last, bins) for i in range(len(shown))])
    grid = _over_time(100 - cells * 100, [str(d) for d in shown], "Device", "% idle", last)
    note = "Share of time outside local updates, those that a crash or the end cut off included."
    return Card("Idle devices", note, heat_map(grid, "Idle share of every device over time"))


def channels(run: Run, updates: Updates) -> Card | None:
    if not updates.kept:
        return None
    last, bins = float(max(updates.end)), 40
    layers = {layer: samples for layer, samples in updates.kept.items() if len(samples)}
    means = {layer: held(binned_mean(s.times, s.values, last, bins)) for layer, s in layers.items()}
    most = {layer: max(updates.kept[layer].values) for layer in means}
    cells = np.array([row / (most[layer] or 1.0) * 100 for layer, row in means.items()])
    grid = _over_time(cells, list(means), "Channels", "% kept", last, row_height=26.0 if len(means) < 9 else 15.0)
    note = "Mean over devices after each pruning, as a share of the most that a device kept there."
    return Card("Kept channels", note, heat_map(grid, "Kept channels over time"))


def _over_time(
    cells: NDArray[np.float64],
    rows: list[str],
    label: str,
    unit: str,
    last: float,
    row_height: float | None = None,
) -> Grid:
    bins = cells.shape[1]
    times = [f"{(i + 0.5) * last / bins:,.0f} s" for i in range(bins)]
    return Grid(cells, rows, times, label, "Virtual time (s)", unit, 560, row_height, top=100.0, until=last)


def _selected(device: NDArray[np.int64]) -> tuple[list[int], NDArray[np.int64]]:
    """Up to `MOST` devices, evenly picked, and the row of every update (-1: not shown)."""
    known = np.unique(device)
    picked = known[np.linspace(0, len(known) - 1, min(MOST, len(known))).round().astype(np.int64)]
    row = np.searchsorted(picked, device)
    row = np.where((row < len(picked)) & (picked[np.minimum(row, len(picked) - 1)] == device), row, -1)
    return [int(d) for d in picked], row


def _window(start: NDArray[np.float64], end: NDArray[np.float64]) -> float:
    """How far the time line goes: to the end, or as far as `BARS` bars."""
    if len(start) <= BARS:
        return float(end.max())
    return float(np.sort(start)[BARS])


def _matrix(traffic: Traffic) -> tuple[NDArray[np.float64], list[str]]:
    """Messages from group to group; the server (-1) is a group of its own."""
    count = int(max(traffic.source.max(), traffic.target.max())) + 1
    server = int(min(traffic.source.min(), traffic.target.min()) < 0)
    groups = min(count, MOST)
    cells = np.zeros((groups + server, groups + server))
    source, target = (
        np.where(end < 0, 0, end * groups // max(count, 1) + server) for end in (traffic.source, traffic.target)
    )
    np.add.at(cells, (source, target), traffic.messages)
    names = ["server"] * server + [_group(i, groups, count) for i in range(groups)]
    return np.where(cells == 0, np.nan, cells), names


def _group(number: int, groups: int, count: int) -> str:
    first, last = -(-number * count // groups), -(-(number + 1) * count // groups) - 1
    return str(first) if first == last else f"{first}–{last}"
