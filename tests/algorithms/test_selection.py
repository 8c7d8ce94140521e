"""The selector learns from the real reward, in a fleet where half of the devices are harmful.

Six of twelve devices, at random places, have random labels, so that what they send does harm. What gives them away is
not their place but their features, and the pre-trained selector knows little of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aedfl.algorithms import get
from aedfl.data import Dataset, Split
from aedfl.graph import Queue
from aedfl.sim.fleet import Fleet
from aedfl.sim.network import Links
from aedfl.sim.simulation import Simulation, Stop
from aedfl.task import Task
from aedfl.topology import make
from aedfl.training.batched import BatchedTrainer
from aedfl.training.evaluate import Evaluator
from aedfl.training.plan import Plan

DEVICES, HARMFUL, OWN, HELD, UPDATES = 12, 6, 40, 30, 120
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "everything new": ("aedfl-0", {}),
    "pre-trained": ("aedfl-rl", {"selector": "wary", "selector_lr": 0.0}),
    "trained": ("aedfl-rl", {"selector": "wary", "outer": "held-out"}),
}


class Fleet12:
    """One seed's data, and who is harmful."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        x = random.standard_normal((4000, 8)).astype(np.float32)
        y = (x @ random.standard_normal((8, 4))).argmax(1)
        order = random.permutation(3000)
        self.rows = [order[i * OWN : (i + 1) * OWN] for i in range(DEVICES)]
        self.held = [order[1000 + i * HELD : 1000 + (i + 1) * HELD] for i in range(DEVICES)]
        self.harmful = set(random.permutation(DEVICES)[:HARMFUL].tolist())
        for device in self.harmful:
            y[self.rows[device]] = random.integers(0, 4, OWN)
            self.held[device] = self.rows[device][:HELD]
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
        tx, ty = torch.from_numpy(x), torch.from_numpy(y)
        data = Dataset("half harmful", Split(tx[:3000], ty[:3000]), Split(tx[3000:], ty[3000:]), 4)
        self.task = Task(module, data)
        self.trainer = BatchedTrainer(self.task)
        self.seed = seed
        self.seconds = tuple(random.uniform(0.8, 1.2, DEVICES).tolist())

    def simulation(self, queue: Queue, name: str) -> Simulation:
        method = get(RUNS[name][0])
        return Simulation(
            method=method,
            hyper=replace(method.hyper, **RUNS[name][1]),
            task=self.task,
            trainer=self.trainer,
            start=self.task.start,
            rows=self.rows,
            held_out=self.held,
            topology=make("full", DEVICES),
            fleet=Fleet(self.seconds, {}),
            links=Links(),
            plan=Plan(epochs=2, batch_size=10, lr=0.1),
            lr_decay=0.0,
            seed=self.seed,
            stop=Stop(updates=UPDATES),
            queue=queue,
        )

    def accuracy(self, sim: Simulation) -> float:
        """Mean over the devices that mean well."""
        models = [c.model.vector.get() for c in sim.contexts if c.index not in self.harmful and c.model is not None]
        return float(np.mean(Evaluator(self.task).score(models, np.arange(1000), True)[0]))


def accuracies(seed: int) -> dict[str, float]:
    fleet, queue = Fleet12(seed), Queue()
    sims = {name: fleet.simulation(queue, name) for name in RUNS}
    waiting = dict(sims)
    while waiting:
        waiting = {name: sim for name, sim in waiting.items() if not sim.advance(1e9)}
        queue.flush()
    return {name: fleet.accuracy(sim) for name, sim in sims.items()}


@pytest.mark.slow
def test_the_trained_selector_beats_everything_new_and_its_own_start() -> None:
    torch.set_num_threads(1)
    found = [accuracies(seed) for seed in range(4)]
    print(found)
    mean = {name: np.mean([one[name] for one in found]) for name in RUNS}
    assert mean["trained"] > mean["everything new"] + 0.03
    assert mean["trained"] > mean["pre-trained"] + 0.02
    assert sum(one["trained"] > max(one["everything new"], one["pre-trained"]) for one in found) >= 3
