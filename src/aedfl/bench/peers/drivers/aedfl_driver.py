"""FedAvg by this package's simulator."""

from __future__ import annotations

from work import CLASSES, Clock, Work, data, given, lenet  # type: ignore[import-not-found]

from aedfl.data import Dataset, Split
from aedfl.experiment.config import load
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, drive_all
from aedfl.experiment.workshop import Own, Workshop


def run(work: Work, workshop: Workshop, rounds: int, clock: Clock) -> None:
    """One simulation. What is asked for is computed when it is needed, so that its rounds have no ends of their own."""
    config = load(
        None,
        (),
        method="fedavg",
        devices=work.clients,
        data={"name": "own", "partition": "iid"},
        model={"name": "own"},
        training={"epochs": 1, "batch_size": work.batch, "lr": work.lr},
        stop={"updates": rounds},
        evaluation={"every": 1e9, "local_samples": 1, "local_devices": 1},
        engine={"device": "cpu"},
        record={"updates": False},
    )
    made = Run(config, workshop, None, Silent())
    drive_all([made], workshop)
    clock.end_of_round(rounds)
    assert made.sim.updates == rounds * work.clients


work = given()
clock = Clock(work)
x, y = data(work.data)
workshop = Workshop(Own(lenet(), Dataset("random", Split(x, y), Split(x[:2], y[:2]), CLASSES)))
clock.begin()
run(work, workshop, work.warm_up, clock)
run(work, workshop, work.rounds, clock)
