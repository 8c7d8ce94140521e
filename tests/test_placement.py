"""The place of a model changes nothing but the place."""

from __future__ import annotations

import gc

import pytest
import torch

from aedfl.experiment.config import RunConfig, load
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, drive_all
from aedfl.experiment.workshop import Workshop
from aedfl.graph import Value
from aedfl.placement import SMALL, Placement


def value(count: int) -> Value:
    return Value(torch.arange(count, dtype=torch.float32))


def test_values_stay_until_the_budget_is_used_up_and_then_go_to_the_host() -> None:
    placement = Placement(budget=3 * 4 * SMALL, device=torch.device("cpu"))
    values = [value(SMALL) for _ in range(5)]
    for one in values:
        placement.admit(one)
    assert [one.home is None for one in values] == [True, True, True, False, False]
    assert placement.used == 3 * 4 * SMALL and placement.moved == 2
    assert all(torch.equal(one.get(), torch.arange(SMALL, dtype=torch.float32)) for one in values)


def test_room_is_free_again_when_a_value_is_gone() -> None:
    placement = Placement(budget=4 * SMALL, device=torch.device("cpu"))
    first = value(SMALL)
    placement.admit(first)
    del first
    gc.collect()
    assert placement.used == 0
    second = value(SMALL)
    placement.admit(second)
    assert second.home is None


def test_small_values_are_left_alone() -> None:
    placement = Placement(budget=0, device=torch.device("cpu"))
    small = value(4)
    placement.admit(small)
    assert small.home is None and placement.moved == 0


def config(budget: float | None) -> RunConfig:
    engine = {"device": "cuda" if torch.cuda.is_available() else "cpu", "cache_budget_mib": budget}
    return load(
        "digits",
        ("stop.virtual_seconds=12", "evaluation.every=6", "devices=5", "hyper.prune_start=2", "hyper.prune_every=2"),
        method="aedfl",
        engine=engine,
    )


@pytest.mark.parametrize("budget", [0.0001, 0.1])
def test_a_budget_too_small_for_the_run_gives_the_same_record(budget: float) -> None:
    records = []
    for given in (None, budget):
        workshop = Workshop()
        run = Run(config(given), workshop, None, Silent())
        drive_all([run], workshop)
        records.append((run.record.read("metrics"), run.record.read("updates")))
    assert workshop.placement is not None and workshop.placement.moved > 10
    assert records[0] == records[1]
