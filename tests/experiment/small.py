"""Small runs, and what is compared of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aedfl.experiment.config import RunConfig, from_toml, load, to_toml
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, claim, drive_all
from aedfl.experiment.workshop import Workshop

NOSY = str(Path(__file__).parent / "nosy.py")
RECORD = ("metrics.jsonl", "updates.jsonl", "traffic.json", "model.safetensors")
"""Files that must not differ by a byte between two runs of a seed."""


def small(method: str = "aedfl-0", **changes: Any) -> RunConfig:
    """Six devices learn a few digits in half a second of wall time, with a checkpoint at every evaluation."""
    settings: dict[str, Any] = {
        "data": {"name": "digits", "samples": 180, "test_samples": 60},
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "training": {"epochs": 1, "batch_size": 10, "lr": 0.05, "momentum": 0.5},
        "fleet": {"fastest": 0.4, "slowest": 2.0},
        "links": {"latency": 0.3, "loss": 0.05},
        "stop": {"virtual_seconds": 20.0},
        "evaluation": {"every": 2.0, "local_samples": 40},
        "record": {"checkpoint_seconds": 1e-9, "checkpoint_share": 1.0, "keep_checkpoints": 3},
        "engine": {"device": "cpu"},
    }
    for key, value in changes.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return load(None, (), method=method, devices=settings.pop("devices", 6), **settings)


def record(folder: Path) -> dict[str, Any]:
    """Everything that a run wrote and that must follow from its config."""
    found: dict[str, Any] = {name: (folder / name).read_bytes() for name in RECORD}
    summary = json.loads((folder / "summary.json").read_text())
    return found | {"summary": {key: value for key, value in summary.items() if key != "wall_seconds"}}


def simple_run(config: RunConfig, folder: Path) -> dict[str, Any]:
    """A run without interruption, and without a report."""
    claim(folder, config, force=False)
    workshop = Workshop()
    drive_all([Run(config, workshop, folder, Silent())], workshop)
    return record(folder)


def whole(config: RunConfig) -> dict[str, Any]:
    """The record of that config's run without interruption; made once."""
    return _whole(to_toml(config))


@cache
def _whole(text: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return simple_run(from_toml(text), Path(folder) / "run")


def rows(found: dict[str, Any], stream: str) -> list[dict[str, Any]]:
    """The rows of a stream in a record."""
    return [json.loads(line) for line in found[f"{stream}.jsonl"].splitlines()]


def interrupted(folder: Path, flushes: int, workshop: Workshop | None = None) -> bool:
    """Goes on with a run for so many flushes and drops it there; true if it got to its end before."""
    workshop = workshop or Workshop()
    one = Run(from_toml((folder / "config.toml").read_text()), workshop, folder, Silent())
    steps = one.drive()
    for _ in range(flushes):
        if next(steps, one) is one:
            one.finish()
            return True
        workshop.queue.flush()
    one.record.close()
    return False


def pruning() -> RunConfig:
    """AEDFL with all of its modules, pruning early, so that there are decisions which follow from values read."""
    early = {"prune_start": 2, "prune_every": 2, "prune_end": 6, "probes": 2, "lanczos_steps": 4}
    return small("aedfl", hyper=early, stop={"virtual_seconds": 90.0}, evaluation={"every": 10.0})
