"""What watches a simulation: steps that trainers run, time on a GPU's stream, and the steady half of a run."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch

from aedfl.bench.timing import REST, Course, Instant, Ledger, steps_run, watch
from aedfl.graph import Queue, Value
from aedfl.ops import WeightedMean
from aedfl.replay import Captures
from aedfl.training.batched import BatchedTrainer, Stack
from aedfl.training.grouped import Batch, GroupedTrainer
from aedfl.training.op import Train
from aedfl.training.plan import Plan, TrainJob
from aedfl.training.sequential import SequentialTrainer
from training.tasks import built_in

PLAN = Plan(batch_size=8)


def ragged(samples: list[int]) -> list[TrainJob]:
    start = built_in("mlp").start
    return [TrainJob(start, np.arange(many), (0, own), 0.05, 1 + own % 2) for own, many in enumerate(samples)]


@pytest.mark.parametrize("samples", [[40, 3, 17, 25, 8], [9], [30] * 7])
def test_steps_run_are_those_that_the_trainers_run(samples: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    task, jobs, rows = built_in("mlp"), ragged(samples), list[int]()
    grouped, batched = GroupedTrainer.step, BatchedTrainer._step

    def grouped_step(self: GroupedTrainer, plan: Plan, batch: Batch, first: bool) -> None:
        rows.append(len(batch.lr))
        grouped(self, plan, batch, first)

    def batched_step(self: BatchedTrainer, plan: Plan, stack: Stack) -> None:
        rows.append(len(stack.lr))
        batched(self, plan, stack)

    monkeypatch.setattr(GroupedTrainer, "step", grouped_step)
    monkeypatch.setattr(BatchedTrainer, "_step", batched_step)
    for trainer in (GroupedTrainer(task), BatchedTrainer(task)):
        trainer.limit = 4
        rows.clear()
        with torch.no_grad():
            trainer.train(PLAN, jobs)
        assert steps_run(trainer, PLAN.batch_size, jobs) == sum(rows) > 0
    one_by_one = sum(epochs * -(-many // 8) for many, epochs in zip(samples, [1, 2] * 4, strict=False))
    assert steps_run(SequentialTrainer(task), PLAN.batch_size, jobs) == one_by_one


def test_what_training_was_asked_for_is_counted_without_its_models() -> None:
    queue, task = Queue(), built_in("mlp")
    ledger = watch(queue, profile=True)
    op = Train(GroupedTrainer(task), PLAN.shape())
    start = Value(task.start)
    kept = [
        queue.submit(op, (start, None, None, np.arange(many), (0, many), 0.05, epochs), [0, 1, 2, 3])
        for many, epochs in ((10, 2), (3, 1))
    ]
    queue.flush()
    assert len(kept) == 2 and ledger.kinds["Train"].jobs == 2
    assert ledger.training() == {
        "useful_steps": 5,  # 2 epochs of 8 + 2 samples, and one of 3
        "run_steps": 8,  # two rows until the longer job is done
        "useful_samples": 23,
        "slots_of_useful_steps": 40,
        "slots_run": 64,
    }
    assert all(not len(job.vector) for _, jobs in ledger.trainings for job in jobs)


class FakeEvent:
    """On a stream on which every event comes a second after the one before."""

    ticks = count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: int | None = None

    def record(self) -> None:
        self.at = next(self.ticks)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.at is not None and later.at is not None
        return 1e3 * (later.at - self.at)


def test_time_on_the_stream_is_read_at_the_end_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    queue = Queue()
    ledger = watch(queue, profile=True, gpu=True)
    one = Value(torch.tensor([1.0]))
    begin = Instant(True)
    for number in range(2):
        kept = queue.submit(WeightedMean(), ((one, one), (1, number + 1)), [number])
        queue.flush()
        assert kept[0].get().tolist() == [1.0]
    found = ledger.breakdown(begin, Instant(True))
    assert list(found) == ["WeightedMean", REST]
    assert (found["WeightedMean"]["calls"], found["WeightedMean"]["gpu_seconds"]) == (2, 2.0)
    assert found[REST]["gpu_seconds"] == 3.0, "before, between and after the two"


def test_without_a_profile_no_event_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "Event")
    ledger = Ledger(profile=False, gpu=True)
    with ledger.during("op", 3):
        pass
    assert ledger.kinds["op"].jobs == 3 and ledger.kinds["op"].spans == []


@pytest.mark.parametrize(
    ("evaluations", "nearest"),
    [([0.0, 15.0, 30.0, 45.0, 62.0], 30.0), ([0.0, 15.0, 17.0], 15.0), ([0.0, 15.0], None), ([0.0], None)],
)
def test_the_middle_of_a_run_is_an_evaluation_that_is_neither_first_nor_last(
    evaluations: list[float], nearest: float | None
) -> None:
    queue = Queue()
    course = Course([], queue, gpu=False)
    for virtual in evaluations:
        course.points.append(course.mark(virtual))
        queue.batches.append(7)
    half = course.half(evaluations[-1])
    assert (half and (half.virtual, half.jobs)) == (nearest and (nearest, 7 * evaluations.index(nearest)))


def test_captures_are_compared_with_an_earlier_moment() -> None:
    captures = Captures(2, 1.5)
    before = captures.now()
    captures.count, captures.seconds = 5, 4.0
    assert captures.since(before) == Captures(3, 2.5) and before == Captures(2, 1.5)
