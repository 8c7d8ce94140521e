"""Grouped training of jobs that are not equally long: a step is run for those that are not done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aedfl.training.batched import BatchedTrainer
from aedfl.training.grouped import Batch, GroupedTrainer, rows_at_work, supports
from aedfl.training.plan import Plan, TrainJob
from aedfl.training.sequential import SequentialTrainer
from aedfl.training.stacked import Act, Stacked
from aedfl.training.traits import widest
from memory import Memory
from training.tasks import PLANS, assert_close, built_in, jobs, own, with_masks


def ragged(count: int) -> list[TrainJob]:
    """The later a job, the more samples it has; every third has several epochs."""
    task, random = built_in("mlp"), np.random.default_rng(0)
    numbers = random.integers(0, len(task.dataset.train), (count, 3 * count))
    return [
        TrainJob(task.start * (1 + 0.01 * own), rows[: 3 * own + 1], (0, own), 0.05, 1 + own % 3)
        for own, rows in enumerate(numbers)
    ]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("plan", ["plain", "everything"])
def test_jobs_of_different_lengths_are_trained_as_one_by_one(plan: str, masked: bool) -> None:
    task, given = built_in("mlp"), ragged(10)
    given = with_masks(task, given) if masked else given
    grouped = GroupedTrainer(task)
    expected = SequentialTrainer(task).train(PLANS[plan], given)
    assert_close(expected, grouped.train(PLANS[plan], given), 2e-5)
    again = [replace(job, key=(1, *job.key)) for job in given[:3]]
    expected = SequentialTrainer(task).train(PLANS[plan], again)
    assert_close(expected, grouped.train(PLANS[plan], again), 2e-5)


def test_the_largest_batch_makes_room_for_all_plans_that_come_after_it() -> None:
    """What was captured for smaller batches goes; within a batch, the step with most rows is captured first."""
    task, trainer = built_in("mlp"), GroupedTrainer(built_in("mlp"))
    few, many = ragged(3), ragged(12)
    for plan in ("plain", "everything"):
        trainer.train(PLANS[plan], few)
    before = trainer._captured.copy()
    found = trainer.train(PLANS["plain"], many)
    assert len(before) == 2 and len(trainer._captured) == 1
    (captured,) = trainer._captured.values()
    sizes = [count for count, _ in captured._steps]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 2
    trainer.train(PLANS["everything"], few)
    assert [kept.batch.holds(len(many), 1) for kept in trainer._captured.values()] == [True, True]
    assert trainer._captured[PLANS["plain"], False] is captured
    for one, other in zip(found, GroupedTrainer(task).train(PLANS["plain"], many), strict=True):
        assert torch.equal(one.vector, other.vector)


def test_rows_follow_the_jobs_that_are_left() -> None:
    steps = [30] * 10 + [20] * 10 + [1] * 80
    sizes = rows_at_work(steps)
    assert sizes == [128, *[20] * 19, *[12] * 10]
    assert rows_at_work([5, 5, 1]) == [8, *[4] * 4], "the first step has graphs for fewer sizes"
    assert rows_at_work([5, 1]) == [2] * 5, "never more rows than at first"
    assert rows_at_work([0, 0]) == [2], "the first step is run whatever there is"


def test_models_that_are_done_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step = GroupedTrainer.step

    def counted(self: GroupedTrainer, plan: Plan, batch: Batch, first: bool) -> None:
        seen.append(len(batch.lr))
        step(self, plan, batch, first)

    monkeypatch.setattr(GroupedTrainer, "step", counted)
    task = built_in("mlp")
    rows = np.arange(4)
    long = TrainJob(task.start, rows, (0, 0), 0.1, 6)
    short = [TrainJob(task.start, rows, (0, own), 0.1, 1) for own in range(1, 20)]
    results = GroupedTrainer(task).train(Plan(batch_size=4), [*short, long])
    assert seen == [24, 4, 4, 4, 4, 4]
    assert torch.equal(results[-1].vector, GroupedTrainer(task).train(Plan(batch_size=4), [long, *short])[0].vector)


@pytest.mark.parametrize("name", ["resnet8", "vgg9"])
def test_without_gradients_a_layer_s_numbers_go_when_no_other_needs_them(name: str) -> None:
    task, count = built_in(name), 3
    x, _ = task.gather(torch.arange(20))
    stacked = Stacked.of(task.evaluation_module.module)
    assert stacked is not None
    stack = task.start.repeat(count, 1)
    images = stacked.wants_images
    same = x.unsqueeze(1).expand(-1, count, *x.shape[1:]).flatten(1, 2) if images else x.expand(count, *x.shape)
    named = task.layout.batched_views(stack)
    with torch.no_grad(), Memory() as memory:
        stacked(named, Act(same, count, "images" if images else "rows", False), stack[:, 0])
    assert memory.peak < 6 * 4 * count * len(x) * widest(task.module, x)


@pytest.mark.parametrize("relu_first", [True, False])
def test_a_pooling_takes_the_relu_on_either_side_along(relu_first: bool) -> None:
    """They commute: one kernel does both. A ReLU whose input others use as well stays on its own."""
    pair = (nn.ReLU(), nn.MaxPool2d(2)) if relu_first else (nn.MaxPool2d(2), nn.ReLU())
    stacked = Stacked.of(nn.Sequential(nn.Conv2d(1, 2, 3), *pair, nn.Flatten(), nn.Linear(18, 4), nn.ReLU()))
    assert stacked is not None
    names = {"1": "relu", "2": "pool"} if relu_first else {"1": "pool", "2": "relu"}
    assert {names[str(node.target)] for node in stacked.together.pools} == {"pool"}
    assert [names[str(node.target)] for node in stacked.together.passed] == ["relu"]


def test_a_relu_beside_another_user_of_the_pooling_stays_on_its_own() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            pooled = F.max_pool2d(self.conv(x), 2)
            return (pooled + F.relu(pooled)).flatten(1)

    stacked = Stacked.of(Both())
    assert stacked is not None and not stacked.together.pools and not stacked.together.passed


class Forked(nn.Module):
    """What a ReLU in place reads is read by others, too."""

    def __init__(self, relu: nn.Module) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(1, 2, 3), relu

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        return F.max_pool2d(self.relu(maps), 2).flatten(1) + maps.mean((2, 3)).sum(1, keepdim=True)


def test_a_relu_in_place_is_not_moved_behind_a_pooling_while_others_read_its_input() -> None:
    moved, kept = Stacked.of(Forked(nn.ReLU())), Stacked.of(Forked(nn.ReLU(inplace=True)))
    assert moved is not None and len(moved.together.pools) == 1
    assert kept is not None and not kept.together.pools and not kept.together.passed


class Sums(nn.Module):
    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], tied: bool = False) -> None:
        super().__init__()
        self.one, self.other, self.run = nn.Linear(6, 4), nn.Linear(6, 4), run
        if tied:
            self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.one(x), self.other(x))


def after_relu_in_place(left: Tensor, right: Tensor) -> Tensor:
    return F.relu(left, inplace=True) + right * left


def test_what_a_stack_would_compute_otherwise_is_not_stacked() -> None:
    assert Stacked.of(Sums(torch.add)) is not None
    assert Stacked.of(Sums(partial(torch.add, alpha=2))) is None
    assert Stacked.of(Sums(after_relu_in_place)) is None
    assert Stacked.of(Sums(torch.add, tied=True)) is None


def test_tied_weights_are_trained_all_the_same() -> None:
    task = own(Sums(torch.add, tied=True))
    assert not supports(task)
    assert_close(
        SequentialTrainer(task).train(PLANS["plain"], jobs(task)),
        BatchedTrainer(task).train(PLANS["plain"], jobs(task)),
    )


class Line(nn.Module):
    """A convolution over a line, something after it, and the maximum over all places."""

    def __init__(self, middle: nn.Module, stride: int = 1, keep: bool = False, again: bool = False) -> None:
        super().__init__()
        self.conv, self.relu, self.out = nn.Conv1d(3, 4, 2, stride), middle, nn.Linear(4, 2)
        self.keep, self.again = keep, again

    def forward(self, x: Tensor) -> Tensor:
        found = self.relu(self.conv(x))
        most = found.amax(2, keepdim=True).flatten(1) if self.keep else found.amax(2)
        return self.out(most + found.mean(2) if self.again else most)  # type: ignore[no-any-return]


def test_convolution_relu_and_maximum_over_a_line_are_one() -> None:
    stacked = Stacked.of(Line(nn.ReLU()))
    assert stacked is not None and list(stacked.together.lines.values()) == ["conv"]
    assert len(stacked.together.passed) == 2
    stacked = Stacked.of(built_in("textcnn").module)
    assert stacked is not None and sorted(stacked.together.lines.values()) == ["convs.0", "convs.1", "convs.2"]


@pytest.mark.parametrize(
    "module",
    [Line(nn.LeakyReLU(0.3)), Line(nn.Tanh()), Line(nn.ReLU(), stride=2), Line(nn.ReLU(), keep=True),
     Line(nn.ReLU(), again=True)],
    ids=["another function by that name", "tanh", "stride", "kept dimension", "used twice"],
)  # fmt: skip
def test_what_only_looks_like_that_stays_as_it_is(module: nn.Module) -> None:
    stacked = Stacked.of(module)
    assert stacked is not None and not stacked.together.lines and not stacked.together.passed
