"""The batched back end gives what the sequential one gives, job by job; bits never depend on company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from aedfl.training.batched import BatchedTrainer, supports
from aedfl.training.plan import TrainJob
from aedfl.training.sequential import SequentialTrainer
from training.tasks import NAMES, PLANS, assert_close, built_in, jobs, same_bits, with_masks

SMALL = ("mlp", "cnn", "textcnn", "resnet8-batch")
CASES = [(name, plan) for name in NAMES for plan in PLANS if name in SMALL or plan == "everything"]


def anchored(given: list[TrainJob]) -> list[TrainJob]:
    """Every job but the first has an anchor of its own."""
    return [given[0], *(replace(job, anchor=0.9 * job.vector) for job in given[1:])]


def tolerance(name: str) -> float:
    """The variance of a few samples magnifies what rounding leaves; a near tie in pooling may be decided by it."""
    return 5e-4 if name.endswith("batch") else 5e-5 if name == "vgg9" else 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_every_built_in_model_can_be_batched(name: str) -> None:
    assert supports(built_in(name))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_batched_training_equals_sequential_training(name: str, plan: str) -> None:
    task = built_in(name)
    given = anchored(jobs(task))
    one, other = (trainer(task).train(PLANS[plan], given) for trainer in (SequentialTrainer, BatchedTrainer))
    assert_close(one, other, tolerance(name))
    assert all((result.vector - job.vector).abs().max() > 1e-4 for result, job in zip(one, given, strict=True))


@pytest.mark.parametrize("structured", [False, True], ids=["entries", "units"])
@pytest.mark.parametrize("name", NAMES)
def test_batched_training_equals_sequential_training_under_masks(name: str, structured: bool) -> None:
    task = built_in(name)
    given = with_masks(task, anchored(jobs(task)), structured)
    one, other = (trainer(task).train(PLANS["everything"], given) for trainer in (SequentialTrainer, BatchedTrainer))
    assert_close(one, other, tolerance(name))
    for result, job in zip(other, given, strict=True):
        if job.mask is not None:
            assert torch.equal(result.vector[~job.mask], job.vector[~job.mask])
            assert not result.gradient[~job.mask[: task.layout.parameters]].any()


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_other_jobs_of_a_batch(name: str) -> None:
    """Alone, in pairs, all together, in another order, with many more: the same numbers to the last bit."""
    task, plan = built_in(name), PLANS["everything"]
    given = with_masks(task, anchored(jobs(task)))
    trainer = BatchedTrainer(task)
    alone = [trainer.train(plan, [job])[0] for job in given]
    pairs = trainer.train(plan, given[:2]) + trainer.train(plan, given[2:])
    backwards = trainer.train(plan, given[::-1])[::-1]
    crowd = trainer.train(plan, given + jobs(task, sizes=(2, 11, 7, 4, 5, 8, 3)))[: len(given)]
    assert same_bits(alone, pairs)
    assert same_bits(alone, backwards)
    assert same_bits(alone, crowd)


def test_bits_do_not_depend_on_where_a_large_batch_is_cut() -> None:
    task, plan = built_in("mlp"), PLANS["momentum"]
    given = jobs(task, sizes=(3, 9, 6, 4, 5))
    whole, cut = BatchedTrainer(task), BatchedTrainer(task)
    cut.limit = 2
    assert same_bits(whole.train(plan, given), cut.train(plan, given))


def test_a_job_that_diverged_is_not_spoilt_by_longer_ones() -> None:
    """Its only step leaves weights so large that a further one would overflow; only others take one."""
    task, plan = built_in("mlp"), PLANS["plain"]
    short, long = jobs(task, sizes=(3, 12))
    broken = replace(short, lr=1e20)
    trainer = BatchedTrainer(task)
    alone = trainer.train(plan, [broken])
    assert alone[0].vector.isfinite().all() and alone[0].vector.abs().max() > 1e17
    assert same_bits(alone, trainer.train(plan, [broken, long])[:1])


def test_steps_that_are_replayed_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a step on fixed tensors, which is run twice before it is captured."""

    def capture(step: Callable[[], object]) -> Callable[[], object]:
        step()
        step()
        return step

    monkeypatch.setattr("aedfl.training.batched.capture", capture)
    task, plan = built_in("mlp"), PLANS["everything"]
    given = with_masks(task, anchored(jobs(task)))
    trainer = BatchedTrainer(task)
    expected = trainer.train(plan, given)
    trainer._gpu = True
    assert same_bits(trainer.train(plan, given), expected), "captured"
    assert same_bits(trainer.train(plan, given), expected), "replayed"


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet8-batch"])
def test_one_and_two_workers_give_the_same_bits(name: str) -> None:
    task, plan = built_in(name), PLANS["everything"]
    given = with_masks(task, anchored(jobs(task)), structured=True)
    one, two = (SequentialTrainer(task, workers).train(plan, given * 3) for workers in (1, 2))
    assert same_bits(one, two)


@pytest.mark.parametrize("trainer", [SequentialTrainer, BatchedTrainer])
def test_training_leaves_its_inputs_alone(trainer: type[SequentialTrainer | BatchedTrainer]) -> None:
    task = built_in("resnet8-batch")
    given = with_masks(task, anchored(jobs(task)))
    before = [(job.vector.clone(), None if job.anchor is None else job.anchor.clone()) for job in given]
    start = task.start.clone()
    trainer(task).train(PLANS["everything"], given)
    assert torch.equal(task.start, start)
    for job, (vector, anchor) in zip(given, before, strict=True):
        assert torch.equal(job.vector, vector)
        assert job.anchor is None or torch.equal(job.anchor, anchor)
