"""A structured mask makes the sequential back end train a network that is really smaller."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aedfl.data import Dataset, Split
from aedfl.models import build, count_macs
from aedfl.task import Task
from aedfl.training.batched import BatchedTrainer
from aedfl.training.grouped import GroupedTrainer
from aedfl.training.plan import Plan, TrainJob
from aedfl.training.sequential import SequentialTrainer, _Worker

SHAPES = {"lenet5": (1, 28, 28), "resnet8": (3, 8, 8), "cnn": (1, 8, 8)}


def make_task(name: str) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, *SHAPES[name], generator=generator)
    y = torch.randint(0, 10, (60,), generator=generator)
    return Task(build(name, SHAPES[name], 10, seed=0), Dataset("random", Split(x, y), Split(x, y), 10))


def half(task: Task) -> torch.Tensor:
    """Every second unit of each layer."""
    kept = task.groups.full()
    for units in task.groups.layers.values():
        kept[units.start + 1 : units.stop : 2] = False
    return kept


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("back_end", [BatchedTrainer, GroupedTrainer])
def test_training_the_smaller_network_equals_training_under_the_mask(name: str, back_end: type) -> None:
    task = make_task(name)
    mask = task.groups.expand(half(task))
    plan = Plan(batch_size=10, probe=True, momentum=0.5, proximal=0.1)
    job = TrainJob(task.start, np.arange(35), (0, 1), 0.01, 2, mask, task.start * 0.9)
    (small,) = SequentialTrainer(task).train(plan, [job])
    (masked,) = back_end(task).train(plan, [job])
    assert torch.allclose(small.vector, masked.vector, atol=1e-5)
    assert torch.equal(small.vector[~mask], task.start[~mask])
    assert torch.allclose(small.gradient, masked.gradient, atol=1e-5)
    assert torch.allclose(small.loss, masked.loss, atol=1e-5)
    assert (small.vector - task.start).abs().max() > 1e-4


def test_the_network_that_is_trained_has_fewer_channels() -> None:
    task = make_task("lenet5")
    worker = _Worker(task)
    trainable, places = worker._shrunk(half(task))
    assert count_macs(trainable.flat.module, SHAPES["lenet5"]) == int(task.groups.macs(half(task))) < task.macs / 2
    assert places.lead + len(places.rest) == trainable.layout.size < task.layout.size


def test_a_mask_that_cuts_through_units_is_multiplied_in() -> None:
    task = make_task("cnn")
    mask = torch.ones(task.layout.size, dtype=torch.bool)
    mask[::3] = False
    assert task.units_of(mask) is None
    (found,) = SequentialTrainer(task).train(
        Plan(batch_size=10), [TrainJob(task.start, np.arange(20), (0,), 0.1, 1, mask)]
    )
    assert torch.equal(found.vector[~mask], task.start[~mask])
    assert not torch.equal(found.vector[mask], task.start[mask])
