"""Does the simulator predict a deployment? A real run of processes, replayed on the virtual clock.

`python bench/fidelity.py --devices 8 --seconds 90`. Records a run of `aedfl up`, measures each device's mean speed
(FLOPs of the cost model per second) and the network's seconds per message, gives those numbers and nothing else to the
simulator, and compares update counts, staleness and accuracy.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from aedfl import costs
from aedfl.experiment.config import RunConfig, load
from aedfl.experiment.record import read_rows
from aedfl.experiment.run import run as simulate
from aedfl.net.kit import gather
from aedfl.net.local import Local


def record(config: RunConfig, folder: Path) -> Local:
    """The real thing: every device a process on this machine, over mutual TLS."""
    local = Local(config, folder)

    async def carry_out() -> None:
        await local.start()
        try:
            await local.wait()
        finally:
            await local.close()

    asyncio.run(carry_out())
    return local


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "updates.jsonl")]


def figures(updates: list[list[dict[str, Any]]], accuracy: float) -> dict[str, Any]:
    ages = [age for device in updates for row in device for _, age in row.get("merged", ())]
    counts = [len(device) for device in updates]
    return {
        "updates": sum(counts), "updates_of_each": counts, "staleness": float(np.mean(ages)) if ages else 0.0,
        "merged_models": len(ages), "accuracy": accuracy,
    }  # fmt: skip


def measured(updates: list[list[dict[str, Any]]], update: float) -> list[float]:
    """Seconds of an update of so many FLOPs at each device's mean speed, which is how the simulator states speeds."""
    speeds = [
        sum(row["flops"] for row in device) / sum(row["time"] - row["start"] for row in device) for device in updates
    ]  # fmt: skip
    return [update / speed for speed in speeds]


def replay(config: RunConfig, seconds: list[float], latency: float, scratch: Path) -> dict[str, Any]:
    speeds = scratch / "speeds.csv"
    with speeds.open("w", newline="") as file:
        csv.writer(file).writerows(enumerate(seconds))
    table = config.model_dump()
    table["fleet"] = {"speeds": str(speeds)}
    table["links"] = {"latency": latency, "bandwidth": float("inf"), "server_bandwidth": float("inf")}
    table["evaluation"] = {"every": config.stop.virtual_seconds}
    replayed = RunConfig.model_validate(table)
    summary = simulate(replayed, scratch / "simulated")
    found = read_rows(scratch / "simulated" / "updates.jsonl")
    each = [[row for row in found if row["device"] == index] for index in range(config.devices)]
    return figures(each, summary["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--method", default="aedfl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = load(
        "digits", method=given.method, devices=given.devices, seed=given.seed,
        stop={"virtual_seconds": given.seconds, "updates": "none", "target_accuracy": "none"},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        local = record(config, Path(scratch) / "real")
        summary = local.summary()
        folders = [local.folder / f"device-{index}" for index in range(given.devices)]
        updates = [rows(folder) for folder in folders]
        kit = gather(config)
        assert kit.rows is not None
        samples = float(np.mean([len(own) for own in kit.rows.train])) * config.training.epochs
        seconds = measured(updates, costs.training(kit.task.macs, samples))
        transfers = [t for folder in folders for t in json.loads((folder / "summary.json").read_text())["transfers"]]
        latency = float(np.median([taken for _, taken in transfers])) if transfers else 0.0
        real = figures(updates, summary["accuracy"])
        simulated = replay(config, seconds, latency, Path(scratch))
    keys = ("updates", "staleness", "accuracy")
    difference = {key: (simulated[key] - real[key]) / real[key] if real[key] else 0.0 for key in keys}
    found = {
        "method": given.method, "seconds": given.seconds, "measured_update_seconds": seconds,
        "measured_message_seconds": latency, "real": real, "simulated": simulated, "relative_difference": difference,
    }  # fmt: skip
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
