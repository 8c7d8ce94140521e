"""A run in one small table, derived from its record alone."""

from __future__ import annotations

from typing import Any

from .config import RunConfig, config_hash


def time_to_target(rows: list[dict[str, Any]], target: float | None) -> float | None:
    """Virtual seconds at the first evaluation that reaches the target; None if none does."""
    if target is None:
        return None
    return next((row["time"] for row in rows if row["accuracy"] >= target), None)


def summarise(config: RunConfig, rows: list[dict[str, Any]], metric: str, wall: float) -> dict[str, Any]:
    """The figures of `summary.json`; `wall_seconds` is the only one that two runs of a seed may differ in."""
    last = rows[-1]
    return {
        "method": config.method,
        "preset": config.preset,
        "seed": config.seed,
        "devices": config.devices,
        "metric": metric,
        "accuracy": last["accuracy"],
        "best_accuracy": max(row["accuracy"] for row in rows),
        "local_accuracy": last["local_accuracy"],
        "worst_tenth": last["worst_tenth"],
        "loss": last["loss"],
        "target_accuracy": config.stop.target_accuracy,
        "time_to_target": time_to_target(rows, config.stop.target_accuracy),
        "virtual_seconds": last["time"],
        "wall_seconds": wall,
        "updates": last["updates"],
        "samples": last["samples"],
        "bytes_sent": last["bytes_sent"],
        "mmacs": last["mmacs"],
        "consensus": last["consensus"],
        "costs": last["costs"],
        "config_hash": config_hash(config),
    }
