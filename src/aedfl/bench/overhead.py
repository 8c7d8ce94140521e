"""Overhead: wall time of a simulation over that of a bare PyTorch loop that does the same SGD steps.

Both do the same number of steps on batches of the same sizes, alternating in one process, several times; reported is
the ratio of the medians. The bare loop is what one would write by hand: one model, `torch.optim.SGD`, batches gathered
by index from tensors in memory. It is run with one thread and with all, and the faster one is the reference.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ..data import Dataset, Split
from ..errors import UserError
from ..experiment.config import load
from ..experiment.progress import Silent
from ..experiment.run import Run, drive_all
from ..experiment.workshop import Own, Workshop
from ..models import build
from .stamp import stamp
from .table import Figures, Tell, quiet

DEVICES, SAMPLES, BATCH, SHAPE, CLASSES = 20, 500, 50, (3, 32, 32), 10
MODELS = ("lenet5", "resnet8", "vgg9", "cnn")


@dataclass(frozen=True)
class Options:
    model: str = "lenet5"
    updates: int = 60
    """Of the whole fleet in each repeat."""
    repeats: int = 5
    threads: tuple[int, ...] = ()
    """Of the bare loop; by default one, and as many as there are cores."""

    def check(self) -> None:
        if self.model not in MODELS:
            raise UserError(f"--model is {self.model!r}; allowed are {', '.join(MODELS)}")
        if self.updates < DEVICES:
            raise UserError(f"--updates is {self.updates}; allowed are whole numbers from {DEVICES} on")


def measure(options: Options, tell: Tell = quiet) -> dict[str, Any]:
    options.check()
    stamped, data = stamp(), _dataset()
    rounds = options.updates // DEVICES
    steps = rounds * DEVICES * SAMPLES // BATCH
    kinds: dict[str, Callable[[], float]] = {"simulation": partial(_simulated, options.model, rounds, data)}
    for threads in options.threads or sorted({1, os.cpu_count() or 1}):
        kinds[f"bare loop, {threads} threads"] = partial(_bare, options.model, steps, data, threads)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    _simulated(options.model, 1, data)
    for repeat in range(options.repeats):
        for number, (name, run) in enumerate(kinds.items()):
            tell(f"{name}, turn {repeat + 1}", repeat * len(kinds) + number, options.repeats * len(kinds))
            times[name].append(run())
    seconds = {name: statistics.median(turns) for name, turns in times.items()}
    reference = min(value for name, value in seconds.items() if name != "simulation")
    overhead = seconds["simulation"] / reference
    return stamped | {"options": asdict(options), "sgd_steps": steps, "seconds": seconds, "overhead": overhead}


def table(found: dict[str, Any]) -> Figures:
    simulation = found["seconds"]["simulation"]
    rows: list[tuple[str, ...]] = [
        (name, f"{seconds:.2f}", f"{simulation / seconds:.2f}") for name, seconds in found["seconds"].items()
    ]
    note = f"{found['options']['model']}, {found['sgd_steps']} SGD steps of {BATCH} samples each"
    return Figures(("what", "seconds", "simulation / it"), rows, (note,))


def _dataset() -> Dataset:
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((DEVICES * SAMPLES, *SHAPE)).astype(np.float32))
    y = torch.from_numpy(random.integers(0, CLASSES, DEVICES * SAMPLES))
    return Dataset("random", Split(x, y), Split(x[:100], y[:100]), CLASSES)


def _simulated(name: str, rounds: int, data: Dataset) -> float:
    """Seconds of a simulation in which every device does so many updates."""
    config = load(
        None,
        (),
        method="aedfl-0",
        devices=DEVICES,
        data={"name": "own", "partition": "iid"},
        model={"name": name},
        training={"epochs": 1, "batch_size": BATCH},
        stop={"updates": rounds},
        evaluation={"every": 1e9, "local_samples": 1, "local_devices": 1},
        engine={"device": "cpu"},
    )
    workshop = Workshop(Own(dataset=data))
    run = Run(config, workshop, None, Silent())
    begin = time.perf_counter()
    drive_all([run], workshop)
    return time.perf_counter() - begin


def _bare(name: str, steps: int, data: Dataset, threads: int) -> float:
    """Seconds of the loop one would write by hand."""
    torch.set_num_threads(threads)
    module = build(name, SHAPE, CLASSES, seed=0)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.03)
    begin = time.perf_counter()
    for step in range(steps):
        if step % (SAMPLES // BATCH) == 0:
            order = torch.from_numpy(np.random.default_rng(step).permutation(SAMPLES))
        rows = order[step * BATCH % SAMPLES :][:BATCH]
        optimiser.zero_grad()
        F.cross_entropy(module(data.train.x[rows]), data.train.y[rows]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    seconds = time.perf_counter() - begin
    torch.set_num_threads(1)
    return seconds
