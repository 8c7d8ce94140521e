"""Run folders with made-up numbers, as the runner writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from aedfl.experiment.config import load, to_toml


def fake_run(
    path: Path,
    method: str = "aedfl-0",
    seed: int = 0,
    devices: int = 20,
    seconds: float = 300.0,
    finished: bool = True,
    extras: bool = False,
    speed: float = 1.0,
    server: bool = False,
) -> Path:
    """A plausible run: accuracy saturates, devices differ in speed, traffic follows the exponential graph."""
    path.mkdir(parents=True, exist_ok=True)
    config = load("digits", [f"stop.virtual_seconds={seconds}"], method=method, seed=seed, devices=devices)
    (path / "config.toml").write_text(to_toml(config))
    random = np.random.default_rng(seed)
    updates = _updates(random, devices, seconds, extras)
    rows = _metrics(random, seconds, speed, len(updates), extras)
    _lines(path / "metrics.jsonl", rows)
    _lines(path / "updates.jsonl", updates)
    (path / "traffic.json").write_text(json.dumps({"edges": _edges(random, devices, server), "lost": 12}))
    if finished:
        (path / "summary.json").write_text(json.dumps(_summary(rows, method, seed, devices), indent=2))
    return path


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _updates(random: np.random.Generator, devices: int, seconds: float, extras: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for device, duration in enumerate(random.uniform(1, 15, devices)):
        for number in range(int(seconds / duration)):
            start = number * duration
            if 0.4 < start / seconds < 0.6 and device % 7 == 3:
                continue
            rows.append(_update(random, device, devices, number, start, float(duration), seconds, extras))
    return sorted(rows, key=lambda row: float(row["time"]))


def _update(
    random: np.random.Generator,
    device: int,
    devices: int,
    number: int,
    start: float,
    duration: float,
    seconds: float,
    extras: bool,
) -> dict[str, Any]:
    count = int(random.integers(0, 4))
    sources = ((device - 2 ** random.integers(0, 5, count)) % devices).tolist()
    row: dict[str, Any] = {
        "time": start + duration,
        "start": start,
        "device": device,
        "update": number + 1,
        "loss": float(2.3 * np.exp(-start / 60) + random.uniform(0.02, 0.2)),
        "samples": 72,
        "merged": [[source, 1 + int(random.geometric(0.4) - 1)] for source in sources],
    }
    if extras:
        share = min(1.0, start / seconds)
        weights = random.dirichlet(np.ones(count + 1))
        row |= {
            "weights": [*weights.tolist(), 0.0],
            "control": np.exp(random.normal(0, 0.2 + share / 2, count + 2)).tolist(),
            "priorities": random.uniform(0.3, 0.5 + share / 2, count).tolist(),
            "prune_rate": share / 2,
            "kept": {f"conv{i}": round(width * (1 - share * i / 8)) for i, width in enumerate((16, 32, 64, 64), 1)},
        }
    return row


def _metrics(
    random: np.random.Generator, seconds: float, speed: float, updates: int, extras: bool
) -> list[dict[str, Any]]:
    rows = []
    for time in np.arange(0, seconds + 1e-9, 5.0).tolist():
        done = time / seconds
        accuracy = 0.1 + 0.86 * (1 - np.exp(-time * speed / 40)) + random.normal(0, 0.006)
        rows.append(
            {
                "time": time,
                "accuracy": accuracy,
                "loss": float(2.3 * np.exp(-time * speed / 50) + 0.1),
                "local_accuracy": accuracy * 0.95,
                "worst_tenth": accuracy * 0.85,
                "updates": int(updates * done),
                "samples": int(updates * done) * 72,
                "bytes_sent": int(updates * done * 38_000 / speed),
                "mmacs": 0.652 * (1 - 0.4 * done * extras),
                "staleness": 1.4,
                "consensus": float(3 * np.exp(-time / 80) + 0.2),
                "costs": {"training": 900 * done, "merging": 12 * done, "selection": 31 * done},
            }
        )
    return rows


def _edges(random: np.random.Generator, devices: int, server: bool) -> list[list[int]]:
    hops = [1 << k for k in range(max(1, (devices - 1).bit_length()))]
    edges = [[i, (i + hop) % devices, int(random.poisson(12)), 0] for i in range(devices) for hop in hops]
    if server:
        edges = [[i, -1, 30, 0] for i in range(devices)] + [[-1, i, 30, 0] for i in range(devices)]
    return [[source, target, count, count * 38_000] for source, target, count, _ in edges]


def _summary(rows: list[dict[str, Any]], method: str, seed: int, devices: int) -> dict[str, Any]:
    last = rows[-1]
    reached = [row["time"] for row in rows if row["accuracy"] >= 0.9]
    return {
        "method": method,
        "preset": "digits",
        "seed": seed,
        "devices": devices,
        "metric": "accuracy",
        "best_accuracy": max(row["accuracy"] for row in rows),
        "target_accuracy": 0.9,
        "time_to_target": reached[0] if reached else None,
        "virtual_seconds": last["time"],
        "wall_seconds": 41.3,
        **{key: last[key] for key in ("accuracy", "local_accuracy", "worst_tenth", "updates", "samples")},
        **{key: last[key] for key in ("bytes_sent", "mmacs")},
    }
