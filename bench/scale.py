"""Growth: the same work per device with 100, 1,000 and 10,000 devices. Prints JSON.

    python bench/scale.py [--updates 200000] [--devices 100 10000]

A small model on random data, so that what is measured is the simulator: events, mailboxes, caches, merging, and
the batched training of a small network. Reported per fleet: local updates and events per second, microseconds per
update, peak memory, and the share of the time spent in the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn


def measure(devices: int, updates: int, method: str) -> dict[str, object]:
    from aedfl.data import from_user
    from aedfl.experiment.config import load
    from aedfl.experiment.progress import Silent
    from aedfl.experiment.run import Run
    from aedfl.experiment.workshop import Own, Workshop

    random = np.random.default_rng(0)
    x = random.standard_normal((40 * devices, 16)).astype(np.float32)
    y = (x[:, :4].argmax(1)).astype(np.int64)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    config = load(
        None,
        (),
        method=method,
        devices=devices,
        data={"name": "own"},
        model={"name": "own"},
        training={"epochs": 1, "batch_size": 20},
        stop={"updates": max(1, updates // devices)},
        evaluation={"every": 1e9},
        record={"updates": False},
    )
    workshop = Workshop(Own(module, from_user((x, y), (x[:100], y[:100]))))
    run = Run(config, workshop, None, Silent())
    parts = {"training": 0.0, "merging": 0.0}
    _time_ops(parts)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    events = 0
    steps = run.sim.env.step

    def counted() -> None:
        nonlocal events
        events += 1
        steps()

    run.sim.env.step = counted
    for _ in run.drive():
        workshop.queue.flush()
    wall = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "devices": devices,
        "updates": run.sim.updates,
        "wall_seconds": round(wall, 2),
        "updates_per_second": round(run.sim.updates / wall),
        "microseconds_per_update": round(1e6 * wall / run.sim.updates, 1),
        "events_per_second": round(events / wall),
        "peak_mib": round(peak / 1024),
        "mib_above_start": round((peak - base) / 1024),
        "alive_values": len(run.sim.work.alive),
        "mean_batch": round(sum(workshop.queue.batches) / max(1, len(workshop.queue.batches)), 1),
        "share": {name: round(seconds / wall, 3) for name, seconds in parts.items()},
    }


def _time_ops(parts: dict[str, float]) -> None:
    """Adds up the wall time of training and of everything else that is queued."""
    from aedfl import graph

    run = graph._run

    def timed(op: graph.Op, nodes: list[graph.Node], settled: Any) -> None:
        begin = time.perf_counter()
        run(op, nodes, settled)
        parts["training" if op.heavy else "merging"] += time.perf_counter() - begin

    graph._run = timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--updates", type=int, default=200_000)
    parser.add_argument("--method", default="aedfl-0")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.updates, given.method)))
        return
    rows = []
    for devices in given.devices:  # one process each, so that peak memory is that fleet's own
        command = [sys.executable, __file__, "--one", str(devices), "--updates", str(given.updates)]
        done = subprocess.run([*command, "--method", given.method], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
    base = rows[0]["microseconds_per_update"]
    for row in rows:
        row["cost_ratio"] = round(row["microseconds_per_update"] / base, 2)
    print(json.dumps({"cores": os.cpu_count(), "torch": torch.__version__, "fleets": rows}, indent=2))


if __name__ == "__main__":
    main()
