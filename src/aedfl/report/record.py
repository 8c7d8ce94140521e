"""Reading a run folder, finished or not: what is missing or damaged is left out, never guessed."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

Floats = NDArray[np.float64]
_FILES = ("summary.json", "metrics.jsonl", "config.toml")


@dataclass(frozen=True)
class Traffic:
    """Who sent to whom: one row per edge; the server's index is -1."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    messages: Floats
    size: Floats
    """Bytes."""
    lost: int


@dataclass(frozen=True)
class Run:
    """One run folder."""

    path: Path
    config: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    """`metrics.jsonl`."""
    written: dict[str, Any]
    """`summary.json`; empty when the run did not finish."""
    traffic: Traffic | None

    @property
    def finished(self) -> bool:
        return bool(self.written)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary; of an unfinished run, as far as its record goes."""
        return _derived(self.config, self.rows) | self.written

    @property
    def metric(self) -> str:
        return metric_name(self.summary)

    @property
    def devices(self) -> int:
        return int(number(self.summary.get("devices")) or 0)

    def column(self, name: str) -> Floats:
        """One metric over the evaluations; NaN where it is missing."""
        return np.array([_nan(row.get(name)) for row in self.rows], dtype=np.float64)

    @cached_property
    def end(self) -> float:
        """Virtual seconds at the last evaluation."""
        times = self.column("time")
        return float(np.nanmax(times)) if np.isfinite(times).any() else 0.0

    @cached_property
    def costs(self) -> dict[str, float]:
        """Virtual seconds by purpose, as of the last evaluation that has them."""
        given = [row["costs"] for row in self.rows if isinstance(row.get("costs"), dict)]
        return {str(key): value for key, value in (given[-1] if given else {}).items() if number(value)}


def number(value: Any) -> float | None:
    """The value as a finite number, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def metric_name(summary: Mapping[str, Any]) -> str:
    """What `accuracy` stands for in a run; a user's own metric has another name."""
    return str(summary.get("metric") or "accuracy").replace("_", " ")


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in _FILES)


def read(path: Path) -> Run:
    """The run in `path`; `UserError` when there is none."""
    if not is_run(path):
        raise UserError(f"'{path}' is not a run folder: it has none of {', '.join(_FILES)}")
    return Run(
        path=path,
        config=_config(path / "config.toml"),
        rows=tuple(lines(path / "metrics.jsonl")),
        written=_object(path / "summary.json"),
        traffic=_traffic(_object(path / "traffic.json")),
    )


def find(paths: list[Path]) -> list[Path]:
    """The run folders among `paths` and directly inside them."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"'{path}' is not a folder")
        inside = [path] if is_run(path) else sorted(p for p in path.iterdir() if p.is_dir() and is_run(p))
        if not inside:
            raise UserError(f"'{path}' is not a run folder and holds none")
        found += inside
    return list(dict.fromkeys(found))


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a line cut off by a kill is skipped."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _traffic(table: dict[str, Any]) -> Traffic | None:
    edges = [edge for edge in table.get("edges") or [] if isinstance(edge, list) and len(edge) == 4]
    if not edges:
        return None
    columns = np.array(edges, dtype=np.float64).T
    lost = int(number(table.get("lost")) or 0)
    return Traffic(columns[0].astype(np.int64), columns[1].astype(np.int64), columns[2], columns[3], lost)


def _nan(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found


def _derived(config: dict[str, Any], rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    last = rows[-1] if rows else {}
    target = number(config.get("stop", {}).get("target_accuracy"))
    accuracies = [(number(row.get("time")), number(row.get("accuracy"))) for row in rows]
    measured = [(time, value) for time, value in accuracies if time is not None and value is not None]
    reached = [time for time, value in measured if target is not None and value >= target]
    kept = ("accuracy", "local_accuracy", "updates", "samples", "bytes_sent", "mmacs")
    return {
        **{key: config.get(key) for key in ("method", "preset", "seed", "devices")},
        **{key: last.get(key) for key in kept},
        "best_accuracy": max((value for _, value in measured), default=None),
        "target_accuracy": target,
        "time_to_target": reached[0] if reached else None,
        "virtual_seconds": last.get("time"),
    }
