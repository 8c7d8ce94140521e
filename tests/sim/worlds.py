"""Small simulations whose every number can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from aedfl.context import Method, Program
from aedfl.data import Dataset, Split
from aedfl.graph import Queue
from aedfl.sim.fleet import Change, Fleet
from aedfl.sim.network import Links
from aedfl.sim.simulation import Observer, Simulation, Stop
from aedfl.task import Task
from aedfl.topology import make
from aedfl.training.batched import BatchedTrainer
from aedfl.training.plan import Plan

OWN, HELD = 6, 2
"""Samples of a device that it trains on, and that it holds out."""
PLAN = Plan(epochs=1, batch_size=2, lr=0.1)
FAST = Links(latency=0.05, bandwidth=float("inf"), server_bandwidth=float("inf"))


@cache
def tiny_task(devices: int = 5) -> Task:
    """A linear classifier of 4 numbers into 3 classes: 15 parameters, 12 MACs; random samples for each device."""
    generator = torch.Generator().manual_seed(7)
    count = devices * (OWN + HELD)
    x = torch.randn(count, 4, generator=generator)
    split = Split(x, torch.randint(0, 3, (count,), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module = nn.Linear(4, 3)
    return Task(module, Dataset("tiny", split, split, 3))


def tiny_rows(device: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample numbers of a device: those it trains on, and those it holds out."""
    first = device * (OWN + HELD)
    return np.arange(first, first + OWN), np.arange(first + OWN, first + OWN + HELD)


@dataclass
class World:
    """A simulation and what it needs to run."""

    sim: Simulation
    queue: Queue

    def run(self, until: float = 1e6) -> World:
        """To the end of the programs, or to that time."""
        while not self.sim.advance(until):
            self.queue.flush()
        self.queue.flush()
        return self


def world(
    device: Program,
    server: Program | None = None,
    *,
    devices: int = 2,
    hyper: Any = None,
    task: Task | None = None,
    rows: Sequence[np.ndarray] | None = None,
    seconds: float | Sequence[float] = 0.1,
    changes: Mapping[int, Sequence[Change]] | None = None,
    fleet: Fleet | None = None,
    links: Links = FAST,
    topology: str = "full",
    plan: Plan = PLAN,
    lr_decay: float = 0.0,
    seed: int = 0,
    updates: int | None = None,
    lookahead: int = 256,
    queue: Queue | None = None,
    trainer: Any = None,
    observer: Observer = lambda *_: None,
) -> World:
    """`seconds` is what one training of `OWN` samples takes, on all devices or on each."""
    task = task or tiny_task(max(5, devices))
    queue = queue or Queue()
    each = tuple(seconds) if isinstance(seconds, Sequence) else (seconds,) * devices
    lives = {index: tuple(life) for index, life in (changes or {}).items()}
    sim = Simulation(
        method=Method("test", "", hyper, device, server),
        hyper=hyper,
        task=task,
        trainer=trainer or BatchedTrainer(task),
        start=task.start,
        rows=rows or [tiny_rows(index)[0] for index in range(devices)],
        held_out=[tiny_rows(index)[1] for index in range(devices)],
        topology=make(topology, devices),
        fleet=fleet or Fleet(each, lives),
        links=links,
        plan=plan,
        lr_decay=lr_decay,
        seed=seed,
        stop=Stop(updates),
        queue=queue,
        lookahead=lookahead,
        observer=observer,
    )
    return World(sim, queue)
