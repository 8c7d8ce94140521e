"""Does the simulator predict a deployment? Speeds from one real run, put to the test on others.

`python bench/fidelity.py --seeds 0,1,2`. Records a run of `aedfl up` per seed: other data for every device, other start
values, other draws. From the first one it takes what a device of this machine needs per local update and per FLOP, and
the seconds of a message. With those numbers and nothing else the simulator predicts each of the other runs: update
counts, staleness of merged models, accuracy. The first run is replayed too, but that is no test: it was measured.

The seconds per local update are slept in the simulator before each training: they do not shrink with a pruned model.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import resource
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from aedfl import costs
from aedfl.algorithms import get
from aedfl.context import Context, Method, Trained
from aedfl.experiment.config import RunConfig, load
from aedfl.experiment.record import read_rows
from aedfl.experiment.run import run as simulate
from aedfl.net.kit import gather
from aedfl.net.local import Local

Rows = list[dict[str, Any]]
KEYS = ("updates", "merged_models", "staleness", "accuracy")
LEAST = 1e-3
"""Seconds of an update's FLOPs, where they do not show in what was measured."""
BURDENED = """import sys

sys.path.insert(0, {folder!r})
from fidelity import burdened

METHOD = burdened({name!r}, {speeds.per_update!r})
"""
"""A file that the simulator takes for a method."""


@dataclass(frozen=True)
class Speeds:
    """What was measured in one run, for any device of this machine."""

    per_update: float
    """Seconds of a local update beside its FLOPs: messages, state, waiting for a core."""
    per_gigaflop: float
    message: float
    """Median seconds of a message."""


@dataclass(frozen=True)
class Recorded:
    """A real run: rows of each device, transfers, and how good the mean model was."""

    config: RunConfig
    rows: list[Rows]
    transfers: list[float]
    accuracy: float
    load: float
    """Of the machine when the run began: processes of others that wanted a core."""
    others: float | None = None
    """Cores that other processes, and other machines of the same host, used meanwhile."""


def record(config: RunConfig, folder: Path) -> Recorded:
    """The real thing: every device a process on this machine, over mutual TLS."""
    load, before = os.getloadavg()[0], _taken()
    local = Local(config, folder)

    async def carry_out() -> None:
        await local.start()
        try:
            await local.wait()
        finally:
            await local.close()

    asyncio.run(carry_out())
    folders = [local.folder / f"device-{index}" for index in range(config.devices)]
    summaries = [json.loads((place / "summary.json").read_text()) for place in folders]
    transfers = [seconds for summary in summaries for _, seconds in summary["transfers"]]
    rows = [list(read_rows(place / "updates.jsonl")) for place in folders]
    seconds, foreign = (after - then for after, then in zip(_taken(), before, strict=True))
    return Recorded(config, rows, transfers, float(local.summary()["accuracy"]), load, foreign / seconds)


def _taken() -> tuple[float, float]:
    """Seconds that have passed, and seconds of cores that this program and its processes did not use themselves."""
    user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    busy = (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), busy - own


def recorded(config: RunConfig, folder: Path | None) -> Recorded:
    """The run of that seed from the folder, or a new one, which is then put there."""
    path = folder / f"{config.method}-{config.seed}.json" if folder is not None else None
    if path is not None and path.exists():
        return Recorded(config, **json.loads(path.read_text()))
    with tempfile.TemporaryDirectory() as scratch:
        run = record(config, Path(scratch) / "real")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        keys = ("time", "start", "flops", "merged")
        rows = [[{key: row[key] for key in keys if key in row} for row in device] for device in run.rows]
        content = {"rows": rows, "transfers": run.transfers, "accuracy": run.accuracy}
        path.write_text(json.dumps(content | {"load": run.load, "others": run.others}))
    return run


def measure(run: Recorded) -> Speeds:
    """A straight line through (FLOPs, seconds) of all local updates; neither number below 0."""
    flops = np.array([row["flops"] for device in run.rows for row in device])
    seconds = np.array([row["time"] - row["start"] for device in run.rows for row in device])
    slope, start = np.polyfit(flops, seconds, 1)
    if slope <= 0:
        slope, start = 0.0, float(seconds.mean())
    elif start < 0:
        slope, start = float(seconds.sum() / flops.sum()), 0.0
    return Speeds(float(start), float(slope) * 1e9, float(np.median(run.transfers)) if run.transfers else 0.0)


class Burdened:
    """A context whose trainings begin with some seconds of something else."""

    def __init__(self, inner: Context, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def train(self, *args: Any, **named: Any) -> Trained:
        await self._inner.sleep(self._seconds)
        return await self._inner.train(*args, **named)


def burdened(name: str, seconds: float) -> Method:
    """The method, on devices that need so many seconds per training whatever its FLOPs are."""
    method = get(name)

    async def device(ctx: Context, hyper: Any) -> None:
        await method.device(cast(Context, Burdened(ctx, seconds)), hyper)

    return replace(method, device=device)


def predict(config: RunConfig, speeds: Speeds, scratch: Path) -> dict[str, Any]:
    """The simulator's word on that run. It knows the speeds, and how many samples each device has."""
    kit = gather(config)
    assert kit.rows is not None
    samples = np.array([len(own) for own in kit.rows.train]) * config.training.epochs
    mean = costs.training(kit.task.macs, float(samples.mean()))
    own = max(LEAST, speeds.per_gigaflop * mean / 1e9)
    path = scratch / "speeds.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows((index, own) for index in range(config.devices))
    program = scratch / "burdened_method.py"
    program.write_text(BURDENED.format(folder=str(Path(__file__).parent), name=config.method, speeds=speeds))
    table = config.model_dump()
    table["method"] = str(program)
    table["fleet"] = {"speeds": str(path)}
    table["links"] = {"latency": speeds.message, "bandwidth": float("inf"), "server_bandwidth": float("inf")}
    table["evaluation"] = {"every": config.stop.virtual_seconds}
    summary = simulate(RunConfig.model_validate(table), scratch / "simulated")
    found = read_rows(scratch / "simulated" / "updates.jsonl")
    each = [[row for row in found if row["device"] == index] for index in range(config.devices)]
    return figures(each, summary["accuracy"])


def figures(rows: list[Rows], accuracy: float) -> dict[str, Any]:
    ages = [age for device in rows for row in device for _, age in row.get("merged", ())]
    counts = [len(device) for device in rows]
    return {
        "updates": sum(counts), "updates_of_each": counts, "staleness": float(np.mean(ages)) if ages else 0.0,
        "merged_models": len(ages), "accuracy": accuracy,
    }  # fmt: skip


def compare(run: Recorded, speeds: Speeds) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        simulated = predict(run.config, speeds, Path(scratch))
    real = figures(run.rows, run.accuracy)
    difference = {key: (simulated[key] - real[key]) / real[key] if real[key] else 0.0 for key in KEYS}
    return {
        "seed": run.config.seed, "load_before": run.load, "cores_of_others": run.others,
        "own_speeds": asdict(measure(run)), "real": real, "simulated": simulated, "relative_difference": difference,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--method", default="aedfl")
    parser.add_argument("--seeds", default="0,1,2", help="the first run is measured, the others are predicted")
    parser.add_argument("--records", type=Path, help="folder to keep the real runs in; those there are not repeated")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    runs = []
    for seed in (int(part) for part in given.seeds.split(",")):
        config = load(
            "digits", method=given.method, devices=given.devices, seed=seed,
            stop={"virtual_seconds": given.seconds, "updates": "none", "target_accuracy": "none"},
        )  # fmt: skip
        runs.append(recorded(config, given.records))
    speeds = measure(runs[0])
    found = {
        "method": given.method, "seconds": given.seconds, "devices": given.devices, "measured": asdict(speeds),
        "replayed": compare(runs[0], speeds), "predicted": [compare(run, speeds) for run in runs[1:]],
    }  # fmt: skip
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
