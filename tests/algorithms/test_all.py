"""Every registered method on problems whose solution is known."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from aedfl.algorithms import METHODS
from aedfl.data import Dataset, Split
from aedfl.task import Task
from aedfl.training.plan import Plan

from .toy import Point, Run, mix, play

OPTIONS = {"dispfl": {"density": 1.0}}
"""Half of its parameters removed, a linear model cannot be right."""
SECONDS = [1.0, 1.4, 2.3, 3.1, 4.5]


@cache
def consistent() -> tuple[Task, list[np.ndarray]]:
    """Linear regression without noise: the devices' inputs differ, one pair of weights is right for all of them."""
    generator = torch.Generator().manual_seed(1)
    means = torch.linspace(-1, 1, 5).repeat_interleave(12)[:, None]
    x = torch.randn(60, 3, generator=generator) + means
    y = x @ torch.tensor([[1.0, -2.0], [0.5, 1.0], [3.0, 0.25]])
    split = Split(x, y)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(3, 2, bias=False)
    return Task(module, Dataset("linear", split, split, None)), [np.arange(k, k + 12) for k in range(0, 60, 12)]


def final(run: Run) -> torch.Tensor:
    """The server's model, or the mean of the devices'."""
    if run.server:
        return run.server[-1].model.vector.get()
    return torch.stack([run.device(k)[-1].model.vector.get() for k in range(5)]).mean(0)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_weights_that_are_right_for_all(method: str) -> None:
    """At that point no device's gradient moves anything, so every method must stay there, and must have got there."""
    task, rows = consistent()
    right = torch.tensor([1.0, 0.5, 3.0, -2.0, 1.0, 0.25])
    run = play(
        method, [(0.0, 0.0)] * 5, task=(task, rows), seconds=SECONDS, plan=Plan(2, 6, 0.1), updates=60,
        hyper=OPTIONS.get(method), topology="exponential", public=np.arange(0, 60, 7),
    )  # fmt: skip
    assert (final(run) - right).abs().max() < 0.01


CENTRES: list[Point] = [(1.0, 0.0), (0.0, 2.0), (-4.0, 8.0), (2.0, 2.0), (5.0, -3.0)]
UNBIASED = {"fedavg": {}, "fedprox": {"mu": 0.1}, "fednova": {}, "safa": {}, "dispfl": {"density": 1.0}}
"""Those that give slow and fast devices the same say."""


@pytest.mark.parametrize("method", UNBIASED)
def test_the_optimum_of_devices_that_disagree(method: str) -> None:
    run = play(method, CENTRES, seconds=SECONDS, hyper=UNBIASED[method], updates=40)
    assert final(run).tolist() == pytest.approx(mix(CENTRES, [0.2] * 5), abs=2e-3)


def test_there_are_twenty_methods_each_with_help_and_a_paper() -> None:
    assert len(METHODS) == 20
    for name, method in METHODS.items():
        assert method.name == name
        assert method.paper
        for parameter in dataclasses.fields(method.hyper):
            assert parameter.metadata["help"], (name, parameter.name)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_is_stopped_by_devices_that_come_and_go(method: str) -> None:
    """Two devices leave, one for good, one comes back; all others do their updates, and the run ends by itself."""
    task, rows = consistent()
    changes = {1: [(0.0, "join"), (6.0, "crash"), (30.0, "join")], 3: [(0.0, "join"), (9.0, "leave")]}
    run = play(
        method, [(0.0, 0.0)] * 5, task=(task, rows), seconds=SECONDS, changes=changes, updates=12, until=1e5,
        hyper=OPTIONS.get(method), topology="exponential", plan=Plan(2, 6, 0.05), public=np.arange(0, 60, 7),
    )  # fmt: skip
    assert run.sim.done
    assert [len(run.device(k)) for k in (0, 1, 2, 4)] == [12] * 4


@pytest.mark.parametrize("method", METHODS)
def test_runs_are_the_same_to_the_bit(method: str) -> None:
    task, rows = consistent()

    def record() -> list[tuple[float, int, list[float]]]:
        run = play(
            method, [(0.0, 0.0)] * 5, task=(task, rows), seconds=SECONDS, until=15.0, topology="exponential",
            public=np.arange(0, 60, 7),
        )  # fmt: skip
        return [(row.time, row.index, row.w) for row in run.rows]

    assert record() == record()


def sections() -> dict[str, str]:
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    return {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith("aedfl")])
def test_the_documentation_names_every_parameter_with_its_default(method: str) -> None:
    lines = [line for line in sections()[method].splitlines() if line.startswith("| `")]
    found: dict[str, str] = {}
    for line in lines:
        names, defaults = (cell.strip() for cell in line.split("|")[1:3])
        pairs = zip(names.replace("`", "").split(", "), defaults.split(", "), strict=True)
        found |= dict(pairs)
    hyper = METHODS[method].hyper
    values = {parameter.name: getattr(hyper, parameter.name) for parameter in dataclasses.fields(hyper)}
    assert found.keys() == values.keys()
    assert {name: type(values[name])(text) for name, text in found.items()} == values
