"""Are the baselines what other people's code makes of them? Same data, same order of samples, same start values.

    python bench/oracles/check.py            # installs the others into a throw-away environment, then compares
    python bench/oracles/check.py --python P # with an environment that has them already

Runs FedAvg, FedProx, FedNova (with and without momentum), FedBuff and FedSA's asynchronous mixing here, and again by
`independent.py` on top of fluke-fl, fedlab and appfl from PyPI. The server's final parameters must agree to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from aedfl.algorithms import get
from aedfl.context import SERVER
from aedfl.data import Dataset, Split
from aedfl.experiment.config import make_hyper
from aedfl.graph import Queue
from aedfl.sim.context import SimContext
from aedfl.sim.fleet import Fleet
from aedfl.sim.network import Links
from aedfl.sim.simulation import Simulation, Stop
from aedfl.task import Task
from aedfl.topology import make
from aedfl.training.plan import Plan, TrainJob, batches
from aedfl.training.sequential import SequentialTrainer

TOLERANCE = 1e-5
SIZES = [16, 24, 40, 20]
SECONDS = [1.0, 1.7, 2.9, 0.8]
ROUNDS = 4
PLAN = Plan(epochs=2, batch_size=8, lr=0.1)
CASES: dict[str, tuple[str, dict[str, Any], Plan]] = {
    "fedavg": ("fedavg", {}, PLAN),
    "fedprox": ("fedprox", {"mu": 0.5}, PLAN),
    "fednova": ("fednova", {}, PLAN),
    "fednova with momentum": ("fednova", {}, replace(PLAN, momentum=0.5)),
    "fedbuff": ("fedbuff", {"buffer": 3}, PLAN),
    "fedsa, first stage": ("fedsa", {"slow": -1e9}, PLAN),
}
REQUIREMENTS = [
    "torch==2.13.0",
    "--no-deps fluke-fl==0.8.1 appfl==1.12.0 fedlab==1.3.0 opacus torchmetrics",
    "numpy omegaconf rich packaging scipy pynvml pillow scikit-learn pandas tqdm diskcache matplotlib psutil seaborn"
    " cerberus lightning-utilities",
]
"""torch first and by exact version, the three without their dependencies: some of those would bring another torch."""


def problem() -> tuple[Task, list[np.ndarray]]:
    """A small network that tells three clusters apart; the clients' samples lie differently."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (sum(SIZES),), generator=generator)
    shift = torch.repeat_interleave(torch.linspace(-1, 1, len(SIZES)), torch.tensor(SIZES))
    x = torch.randn(len(y), 8, generator=generator) + torch.eye(8)[y] * 2 + shift[:, None]
    split = Split(x, y)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    ends = np.cumsum(SIZES)
    rows = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return Task(module, Dataset("clusters", split, split, 3)), rows


def run(case: str) -> dict[str, Any]:
    """The server's final parameters, and for every version whose updates went into it, with their ages."""
    name, hyper, plan = CASES[case]
    task, rows = problem()
    method = get(name)
    merged: list[list[tuple[int, int]]] = []

    def observe(context: SimContext, _since: float, metrics: dict[str, Any]) -> None:
        if context.index == SERVER:
            merged.append(metrics["merged"])

    queue = Queue()
    sim = Simulation(
        method=method, hyper=make_hyper(method.hyper, hyper), task=task, trainer=SequentialTrainer(task),
        start=task.start, rows=rows, held_out=[own[:0] for own in rows], topology=make("full", len(rows)),
        fleet=Fleet(tuple(SECONDS), {}), links=Links(0.05, inf, inf), plan=plan, lr_decay=0.0, seed=0,
        stop=Stop(ROUNDS), queue=queue, observer=observe,
    )  # fmt: skip
    while not sim.advance(inf):
        queue.flush()
    queue.flush()
    assert sim.server is not None and sim.server.model is not None
    return {"final": sim.server.model.vector.get().tolist(), "merged": merged}


def orders(rows: list[np.ndarray], plan: Plan) -> list[list[list[list[int]]]]:
    """Sample numbers of every mini-batch, by client, local update and step."""

    def steps(client: int, call: int) -> list[list[int]]:
        job = TrainJob(torch.empty(0), rows[client], (0, client, call), plan.lr, plan.epochs)
        return [[int(row) for row in step if row >= 0] for step in batches(job, plan.batch_size)]

    return [[steps(client, call) for call in range(1, 9)] for client in range(len(rows))]


def environment(folder: Path) -> Path:
    """A throw-away environment with the other libraries in it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    for line in REQUIREMENTS:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *line.split()], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="an interpreter that has the other libraries")
    given = parser.parse_args()
    task, rows = problem()
    ours = {case: run(case) for case in CASES}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        python = given.python or environment(folder / "venv")
        content = {
            "x": task.dataset.train.x.tolist(),
            "y": task.dataset.train.y.tolist(),
            "start": task.start.tolist(),
            "sizes": SIZES,
            "orders": orders(rows, PLAN),
            "epochs": PLAN.epochs,
            "lr": PLAN.lr,
            "rounds": ROUNDS,
            "merged": {case: result["merged"] for case, result in ours.items()},
        }
        (folder / "problem.json").write_text(json.dumps(content))
        script = Path(__file__).with_name("independent.py")
        subprocess.run([python, script, folder / "problem.json", folder / "theirs.json"], check=True)
        theirs = json.loads((folder / "theirs.json").read_text())
    return report(ours, theirs)


def report(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    worst = 0.0
    for case, result in ours.items():
        mine, other = torch.tensor(result["final"]), torch.tensor(theirs[case]["final"])
        away = (mine - torch.tensor(problem()[0].start.tolist())).abs().max().item()
        gap = (mine - other).abs().max().item()
        worst = max(worst, gap)
        by, count = theirs[case]["by"], len(result["merged"])
        print(f"{case:24s} {by:28s} {count:3d} versions, moved by {away:.3f}, gap {gap:.1e}")
    print("all equal" if worst <= TOLERANCE else f"NOT equal: {worst:.1e} is more than {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
