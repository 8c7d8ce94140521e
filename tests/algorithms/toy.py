"""A learning problem that can be worked out by hand, on a fleet whose times can.

Device k wants the two weights w to be its centre c_k: its loss is `1/2 ||w - c_k||^2` on every sample, its gradient
`w - c_k`, so that a step of SGD is `w += lr (c_k - w)` whatever the mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from torch import nn

from aedfl.algorithms import get
from aedfl.context import SERVER, Method, Model
from aedfl.data import Dataset, Split
from aedfl.experiment.config import make_hyper
from aedfl.graph import Queue, Value
from aedfl.sim.context import SimContext
from aedfl.sim.fleet import Change, Fleet
from aedfl.sim.network import Links
from aedfl.sim.simulation import Simulation, Stop
from aedfl.task import Task
from aedfl.topology import make
from aedfl.training.plan import Plan
from aedfl.training.sequential import SequentialTrainer

Point = tuple[float, float]

LATENCY = 0.25
LINKS = Links(latency=LATENCY, bandwidth=inf, server_bandwidth=inf)
START: Point = (0.0, 0.0)


@dataclass(frozen=True)
class Published:
    """One call of `publish`."""

    time: float
    index: int
    model: Model
    metrics: dict[str, Any]

    @property
    def w(self) -> list[float]:
        return self.model.vector.get().tolist()

    def metric(self, name: str) -> Any:
        value = self.metrics[name]
        return value.get().tolist() if isinstance(value, Value) else value


@dataclass
class Run:
    """A finished simulation."""

    sim: Simulation
    rows: list[Published] = field(default_factory=list)

    @property
    def server(self) -> list[Published]:
        return [row for row in self.rows if row.index == SERVER]

    def device(self, index: int) -> list[Published]:
        return [row for row in self.rows if row.index == index]

    def events(self) -> list[tuple[float, int]]:
        """(time, index) of everything published; the server is -1."""
        return [(round(row.time, 9), row.index) for row in self.rows]


def problem(centres: Sequence[Point], samples: Sequence[int], start: Point = START) -> tuple[Task, list[np.ndarray]]:
    y = torch.tensor([c for c, count in zip(centres, samples, strict=True) for _ in range(count)])
    split = Split(torch.ones(len(y), 1), y)
    module = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(start)[:, None])
    ends = np.cumsum(samples)
    rows = [np.arange(end - count, end) for end, count in zip(ends, samples, strict=True)]
    return Task(module, Dataset("toy", split, split, None)), rows


def play(
    method: str | Method,
    centres: Sequence[Point],
    *,
    samples: Sequence[int] | None = None,
    seconds: Sequence[float] | None = None,
    hyper: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    updates: int | None = None,
    until: float = 1e5,
    topology: str = "full",
    changes: Mapping[int, Sequence[Change]] | None = None,
    links: Links = LINKS,
    start: Point = START,
    seed: int = 0,
    public: np.ndarray | None = None,
    task: tuple[Task, list[np.ndarray]] | None = None,
) -> Run:
    """Runs a method to the end of its programs or to a time. The server computes in no time at all.

    `seconds[k]` is what a local update takes on device k if all have the same number of samples.
    """
    method = get(method) if isinstance(method, str) else method
    count = len(centres)
    samples = samples or [4] * count
    task_, rows = task or problem(centres, samples, start)
    run = Run.__new__(Run)
    run.rows = []

    def observe(context: SimContext, _since: float, metrics: dict[str, Any]) -> None:
        assert context.model is not None
        run.rows.append(Published(context.now, context.index, context.model, metrics))

    queue = Queue()
    lives = {index: tuple(life) for index, life in (changes or {}).items()}
    run.sim = Simulation(
        method=method,
        hyper=make_hyper(method.hyper, hyper or {}),
        task=task_,
        trainer=SequentialTrainer(task_),
        start=task_.start,
        rows=rows,
        held_out=[own[:0] for own in rows],
        topology=make(topology, count),
        fleet=Fleet(tuple(seconds or [1.0] * count), lives),
        links=links,
        plan=plan or Plan(epochs=1, batch_size=4, lr=0.5),
        lr_decay=0.0,
        seed=seed,
        stop=Stop(updates),
        queue=queue,
        observer=observe,
        public=public,
    )
    if run.sim.server is not None:
        run.sim.server._speed = inf
        run.sim.server.lasting = False  # what it saves is looked at
    while not run.sim.advance(until):
        queue.flush()
    queue.flush()
    return run


def local(
    w: Sequence[float], centre: Point, steps: int = 1, lr: float = 0.5, mu: float = 0.0, momentum: float = 0.0
) -> list[float]:
    """SGD by hand: `steps` steps towards the centre, pulled back to the start by `mu`."""
    result = []
    for own, goal in zip(w, centre, strict=True):
        x, velocity = own, 0.0
        for _ in range(steps):
            velocity = momentum * velocity + (x - goal) + mu * (x - own)
            x -= lr * velocity
        result.append(x)
    return result


def mix(points: Sequence[Sequence[float]], factors: Sequence[float]) -> list[float]:
    """`sum_k factor_k point_k`."""
    return [sum(f * p[i] for f, p in zip(factors, points, strict=True)) for i in range(len(points[0]))]


def minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]
