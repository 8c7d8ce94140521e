"""Overhead: wall time of a simulation over that of a bare PyTorch loop that does the same SGD steps. Prints JSON.

    python bench/overhead.py [--updates 60] [--model lenet5]

Both do the same number of steps on batches of the same sizes, alternating in one process, several times; reported is
the ratio of the medians. The bare loop is what one would write by hand: one model, `torch.optim.SGD`, batches gathered
by index from tensors in memory. It is run with one thread and with all, and the faster one is the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from aedfl.data import Dataset, Split
from aedfl.experiment.config import load
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, drive_all
from aedfl.experiment.workshop import Own, Workshop
from aedfl.models import build

DEVICES, SAMPLES, BATCH = 20, 500, 50


def dataset() -> Dataset:
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((DEVICES * SAMPLES, 3, 32, 32)).astype(np.float32))
    y = torch.from_numpy(random.integers(0, 10, DEVICES * SAMPLES))
    return Dataset("random", Split(x, y), Split(x[:100], y[:100]), 10)


def simulated(name: str, updates: int, data: Dataset) -> tuple[float, int]:
    """Seconds and SGD steps of a simulation."""
    config = load(
        None,
        (),
        method="aedfl-0",
        devices=DEVICES,
        data={"name": "own", "partition": "iid"},
        model={"name": name},
        training={"epochs": 1, "batch_size": BATCH},
        stop={"updates": updates // DEVICES},
        evaluation={"every": 1e9, "local_samples": 1, "local_devices": 1},
        engine={"device": "cpu"},
    )
    workshop = Workshop(Own(dataset=data))
    run = Run(config, workshop, None, Silent())
    begin = time.perf_counter()
    drive_all([run], workshop)
    return time.perf_counter() - begin, updates * SAMPLES // BATCH


def bare(name: str, steps: int, data: Dataset, threads: int) -> float:
    """Seconds of the loop one would write by hand."""
    torch.set_num_threads(threads)
    module = build(name, (3, 32, 32), 10, seed=0)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.03)
    begin = time.perf_counter()
    for step in range(steps):
        if step % (SAMPLES // BATCH) == 0:
            order = torch.from_numpy(np.random.default_rng(step).permutation(SAMPLES))
        rows = order[step * BATCH % SAMPLES :][:BATCH]
        optimiser.zero_grad()
        F.cross_entropy(module(data.train.x[rows]), data.train.y[rows]).backward()
        optimiser.step()
    seconds = time.perf_counter() - begin
    torch.set_num_threads(1)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60, help="local updates of the whole fleet per repeat")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1], help="of the bare loop")
    given = parser.parse_args()
    data = dataset()
    steps = simulated(given.model, DEVICES, data)[1] * given.updates // DEVICES
    kinds: dict[str, Callable[[], float]] = {
        "simulation": lambda: simulated(given.model, given.updates, data)[0],
    }
    for threads in given.threads:
        kinds[f"bare_{threads}_threads"] = lambda threads=threads: bare(given.model, steps, data, threads)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(given.repeats):
        for name, run in kinds.items():
            times[name].append(run())
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    reference = min(seconds for name, seconds in median.items() if name != "simulation")
    print(
        json.dumps(
            {
                "model": given.model,
                "sgd_steps": steps,
                "cores": os.cpu_count(),
                "seconds": {name: round(seconds, 3) for name, seconds in median.items()},
                "overhead": round(median["simulation"] / reference, 3),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
