"""Growth: the same work per device with 100, 1,000 and 10,000 devices.

A small model on random data, so that what is measured is the simulator: events, mailboxes, caches, merging, and
the batched training of a small network. Every fleet does about as many local updates in all; what one of them costs
must not grow with the fleet. An exponent of 1 is growth in proportion, of 2 quadratic growth; it is taken from
processor time, which other work on the machine changes least.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import data
from ..errors import AedflError
from ..experiment.config import load
from ..experiment.progress import Silent
from ..experiment.run import Run
from ..experiment.workshop import Own, Workshop
from .stamp import stamp
from .table import Figures, Tell, quiet, short
from .timing import watch

PARTS = ("events", "queue", "merging", "training")
"""Programs, clock and network; dependencies and batches; everything computed but training; training."""


@dataclass(frozen=True)
class Options:
    devices: tuple[int, ...] = (100, 1000, 10_000)
    updates: int = 50_000
    """Of the whole fleet, about."""
    method: str = "aedfl-0"


def measure(options: Options, tell: Tell = quiet) -> dict[str, Any]:
    """One process for each fleet, so that peak memory is its own."""
    stamped, fleets = stamp(), []
    for number, count in enumerate(options.devices):
        tell(f"{count:,} devices", number, len(options.devices))
        fleets.append(_apart(replace(options, devices=(count,))))
    tell("done", len(fleets), len(fleets))
    first = fleets[0]
    for fleet in fleets:
        fleet["cost_ratio"] = fleet["cpu_microseconds_per_update"] / first["cpu_microseconds_per_update"]
        more = fleet["devices"] / first["devices"]
        fleet["exponent"] = 1 + log(fleet["cost_ratio"]) / log(more) if more != 1 else None
    return stamped | {"options": asdict(options), "fleets": fleets}


def table(found: dict[str, Any]) -> Figures:
    rows: list[tuple[str, ...]] = []
    for fleet in found["fleets"]:
        exponent, share = fleet["exponent"], fleet["share"]
        rows.append(
            (
                f"{fleet['devices']:,}",
                short(fleet["updates_per_second"]),
                short(fleet["microseconds_per_update"]),
                short(fleet["cpu_microseconds_per_update"]),
                "–" if exponent is None else f"{exponent:.2f}",
                short(fleet["events_per_second"]),
                f"{fleet['mib_above_start']:.0f}",
                short(fleet["alive_values"]),
                *(f"{share[part]:.2f}" for part in PARTS),
            )
        )
    columns = (
        "devices", "updates/s", "µs an update", "CPU µs", "exponent", "events/s", "MiB above start", "values alive",
        *(f"share in {part}" for part in PARTS),
    )  # fmt: skip
    note = f"{found['options']['method']}, a small network; exponent of the whole cost in the number of devices"
    return Figures(columns, rows, (note,))


def _apart(options: Options) -> dict[str, Any]:
    """As `fleet`, in a process of its own."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", __name__, json.dumps(asdict(options))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    if done.returncode:
        raise AedflError(f"the fleet of {options.devices[0]:,} devices failed: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fleet(options: Options) -> dict[str, Any]:
    """Simulates one fleet and looks on."""
    (devices,) = options.devices
    workshop = Workshop(_own(devices))
    run = Run(_config(options), workshop, None, Silent())
    ledger, events = watch(workshop.queue), _count(run)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flushing, used = 0.0, time.process_time()
    begin = time.perf_counter()
    for _ in run.drive():
        start = time.perf_counter()
        workshop.queue.flush()
        flushing += time.perf_counter() - start
    wall, used = time.perf_counter() - begin, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    training = sum(kind.seconds for kind in ledger.kinds.values() if kind.heavy)
    merging = sum(kind.seconds for kind in ledger.kinds.values() if not kind.heavy)
    spent = (wall - flushing, flushing - training - merging, merging, training)
    batches = workshop.queue.batches
    return {
        "devices": devices,
        "updates": run.sim.updates,
        "virtual_seconds": run.sim.time,
        "wall_seconds": wall,
        "updates_per_second": run.sim.updates / wall,
        "microseconds_per_update": 1e6 * wall / run.sim.updates,
        "cpu_microseconds_per_update": 1e6 * used / run.sim.updates,
        "events_per_second": events[0] / wall,
        "peak_mib": peak / 1024,
        "mib_above_start": (peak - base) / 1024,
        "alive_values": len(run.sim.work.alive),
        "mean_batch": sum(batches) / max(1, len(batches)),
        "share": {name: part / wall for name, part in zip(PARTS, spent, strict=True)},
    }


def _own(devices: int) -> Own:
    random = np.random.default_rng(0)
    x = random.standard_normal((40 * devices, 16)).astype(np.float32)
    y = x[:, :4].argmax(1).astype(np.int64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return Own(module, data.from_user((x, y), (x[:100], y[:100])))


def _config(options: Options) -> Any:
    """Devices take 1 to 15 s for an update, uniformly, so that a fleet does ln(15) / 14 per device and second."""
    (devices,) = options.devices
    return load(
        None,
        (),
        method=options.method,
        devices=devices,
        data={"name": "own"},
        model={"name": "own"},
        training={"epochs": 1, "batch_size": 20},
        stop={"virtual_seconds": options.updates / devices * 14.0 / log(15.0)},
        evaluation={"every": 1e9},
        record={"updates": False},
        engine={"device": "cpu"},
    )


def _count(run: Run) -> list[int]:
    """The number of events so far, in a list of one."""
    count, step = [0], run.sim.env.step

    def counted() -> None:
        count[0] += 1
        step()

    run.sim.env.step = counted  # type: ignore[method-assign]
    return count


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(fleet(Options(**given | {"devices": tuple(given["devices"])}))))
