"""Chains of layers that are trained and run in one call on a CPU, against PyTorch's modules and the plain loop."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from aedfl import native
from aedfl.data import from_user
from aedfl.layout import Layout
from aedfl.ops import HeldOut
from aedfl.task import Task
from aedfl.training import chain as place
from aedfl.training.chain import Chain
from aedfl.training.evaluate import Evaluator
from aedfl.training.plan import Plan, TrainJob
from aedfl.training.sequential import SequentialTrainer
from training.chains import Text, chain_of, dense, images
from training.tasks import PLANS, SAMPLES, assert_close, built_in, jobs, own, same_bits, with_masks
from training.test_fused import compiled_for, targets, whole

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so there are no kernels")
CHAINS = ("mlp", "cnn", "lenet5", "textcnn")


def whole_weights(module: nn.Module) -> Tensor:
    """Small whole numbers, so that all sums of a few layers are exact."""
    layout = Layout.of(module)
    layout.load(module, whole(layout.size, key=5).clamp(-1, 1))
    return layout.flatten(module)


def assert_says_the_same(module: nn.Module, x: Tensor) -> None:
    vector = whole_weights(module)
    with torch.no_grad():
        assert torch.equal(chain_of(module, tuple(x.shape[1:])).run(vector, x), module(x))


@pytest.fixture(params=targets())
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found = compiled_for(request.param)
    monkeypatch.setattr(place, "library", lambda: found)
    return str(request.param)


def test_values_are_those_of_pytorch(target: str) -> None:
    assert_says_the_same(images((3, 20, 17), [(6, 5, 0), (17, 3, 1)], [33, 7, 5]), whole(7, 3, 20, 17))
    assert_says_the_same(images((9, 1, 1), [], [70, 20]), whole(130, 9, 1, 1))
    words = torch.randint(0, 30, (11, 20), generator=torch.Generator().manual_seed(1))
    assert_says_the_same(Text(30, 7, [(20, 3), (33, 5), (1, 7)]), words)
    assert_says_the_same(Text(30, 33, [(5, 1)], bias=False), words)


@pytest.mark.parametrize("name", CHAINS)
def test_training_on_other_processors(target: str, name: str) -> None:
    task, plan = built_in(name), PLANS["everything"]
    work = with_masks(task, jobs(task), structured=True)
    assert_close(SequentialTrainer(task).train(plan, work), SequentialTrainer(task, kernels=False).train(plan, work))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_images_of_any_shape(data: st.DataObject) -> None:
    small = st.integers(1, 20)
    layer = st.tuples(small, st.integers(1, 4), st.integers(0, 1))
    convolutions = data.draw(st.lists(layer, max_size=2))
    size = data.draw(st.integers(1, 4)), 24, 24
    module = images(size, convolutions, data.draw(st.lists(small, min_size=1, max_size=3)))
    assert_says_the_same(module, whole(data.draw(st.integers(1, 120)), *size))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_texts_of_any_shape(data: st.DataObject) -> None:
    branches = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 7)), min_size=1, max_size=3))
    words, places = data.draw(st.integers(1, 50)), data.draw(st.integers(7, 30))
    x = torch.from_numpy(np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, words, (5, places)))
    assert_says_the_same(Text(words, data.draw(st.integers(1, 35)), branches, data.draw(st.booleans())), x)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("masks", ["none", "structured", "any"])
def test_training_is_that_of_the_plain_loop(name: str, plan: str, masks: str) -> None:
    """Every option of a step, with and without masks, against autograd; the same bits on any thread."""
    task = built_in(name)
    work = [replace(job, anchor=0.9 * job.vector) for job in jobs(task)]
    work = work if masks == "none" else with_masks(task, work, masks == "structured")
    trainer = SequentialTrainer(task)
    assert trainer._worker()._full.chain is not None
    ours = trainer.train(PLANS[plan], work)
    assert_close(ours, SequentialTrainer(task, kernels=False).train(PLANS[plan], work))
    assert same_bits(ours, SequentialTrainer(task, workers=2).train(PLANS[plan], work))


@pytest.mark.parametrize("bias", [True, False])
def test_layers_with_and_without_a_bias_are_trained(bias: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, 12, (SAMPLES, 9), generator=generator)
    pictures = torch.randn(SAMPLES, 2, 9, 9, generator=generator)
    y = words.sum(1) % 3
    convolution = nn.Sequential(
        OrderedDict(
            first=nn.Conv2d(2, 5, 2, bias=bias), relu=nn.ReLU(), pool=nn.MaxPool2d(2),
            flat=nn.Flatten(), out=nn.Linear(80, 3, bias=bias),
        )
    )  # fmt: skip
    for module, x in ((Text(12, 6, [(4, 2), (3, 3)], bias), words), (convolution, pictures)):
        task = Task(module, from_user((x, y), (x, y)))
        plain = SequentialTrainer(task, kernels=False).train(PLANS["momentum"], jobs(task))
        trainer = SequentialTrainer(task)
        assert trainer._worker()._full.chain is not None
        assert_close(trainer.train(PLANS["momentum"], jobs(task)), plain)


@pytest.mark.parametrize("name", CHAINS)
def test_samples_that_are_too_many_for_one_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    task, plan = built_in(name), PLANS["everything"]
    work = with_masks(task, jobs(task))
    together = SequentialTrainer(task).train(plan, work)
    calls: list[str] = []
    call = Chain._call

    def counted(self: Chain, kernel: str, *more: Any) -> None:
        calls.append(kernel)
        call(self, kernel, *more)

    monkeypatch.setattr(Chain, "_call", counted)
    monkeypatch.setattr(place, "AT_ONCE", 1)
    trainer = SequentialTrainer(task)
    calls.clear()
    parts = trainer.train(plan, work)
    assert len(calls) == sum(plan.steps(len(job.samples)) // plan.epochs * job.epochs for job in work)
    for one, other in zip(together, parts, strict=True):
        assert torch.equal(one.vector, other.vector) and torch.equal(one.gradient, other.gradient)
        assert torch.equal(one.first_loss, other.first_loss)
        torch.testing.assert_close(one.loss, other.loss)


def test_a_sample_may_be_there_twice_and_none_at_all() -> None:
    task = built_in("lenet5")
    rows = np.array([7, 3, 7, 7, 20, 3])
    work = [TrainJob(task.start, rows, (1, 2), 0.05, 2), TrainJob(task.start, rows[:0], (1, 3), 0.05, 2)]
    ours, plain = (SequentialTrainer(task, kernels=k).train(PLANS["momentum"], work) for k in (True, False))
    assert_close(ours, plain)
    assert torch.equal(ours[1].vector, task.start) and ours[1].loss == 0


def test_weights_that_overflow_stay_to_be_seen() -> None:
    for name in CHAINS:
        task = built_in(name)
        (result,) = SequentialTrainer(task).train(Plan(batch_size=4), [replace(jobs(task)[3], lr=1e30)])
        assert not result.loss.isfinite() and not result.vector.isfinite().all()


@pytest.mark.parametrize("name", CHAINS)
def test_scores_are_those_of_the_plain_module(name: str) -> None:
    task, rows = built_in(name), np.arange(20)
    vectors = [job.vector for job in jobs(task)]
    ours, theirs = (Evaluator(task, kernels).score(vectors, rows, test=True) for kernels in (True, False))
    assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-6)


@pytest.mark.parametrize("name", CHAINS)
def test_held_out_losses_and_gradients_are_those_of_autograd(name: str) -> None:
    """With and without a mask; the plain one is what a task without kernels does."""
    task = built_in(name)
    plain = Task(task.module, task.dataset, kernels=False)
    vector, rows = jobs(task)[1].vector, np.array([3, 0, 7, 7])
    mask = torch.rand(len(vector), generator=torch.Generator().manual_seed(1)) < 0.7
    assert task.chain is not None and plain.chain is None
    work = [(vector, None, rows), (vector, mask, rows)]
    for ours, theirs in zip(HeldOut(task).run(work), HeldOut(plain).run(work), strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-6)
        assert theirs[1].abs().max() > 1e-3
    for wide in (vector.double(), vector):
        for kept in (mask.double(), mask.float()):
            torch.testing.assert_close(HeldOut(task).run([(wide, kept, rows)])[0], HeldOut(task).run(work[1:])[0])
    ((_, gradient),) = HeldOut(task).run(work[1:])
    assert not gradient[~mask].any()


@pytest.mark.parametrize("name", ["lenet5", "resnet8", "textcnn"])
def test_held_out_gradients_of_many_models_at_once_are_those_of_each_alone(name: str) -> None:
    """What a GPU does, here on a CPU: some with a mask, and other samples each, not all as many."""
    task = Task(built_in(name).module, built_in(name).dataset, kernels=False)
    mask = torch.rand(task.layout.size, generator=torch.Generator().manual_seed(1)) < 0.7
    rows = [np.array([0, 1, 2]), np.array([3, 0, 6, 2]), np.array([7, 7, 1]), np.array([4, 5, 0, 1])]
    work = [(job.vector, (mask, None)[at // 2], rows[at]) for at, job in enumerate(jobs(task))]
    op = HeldOut(task)
    assert task.stacks
    for ours, (alone,) in zip(op.by_count(work), ([result] for one in work for result in op.run([one])), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-6)


def test_an_infinite_weight_spoils_nothing_else() -> None:
    """As a class that is switched off: nothing times infinity would be no number."""
    task = own(dense())
    vector = task.start.clone()
    vector[-1] = -torch.inf
    rows = np.flatnonzero(task.dataset.train.y.numpy() < 3)
    work = [TrainJob(vector, rows, (1,), 0.1, 1)]
    ours, plain = (SequentialTrainer(task, kernels=k).train(PLANS["plain"], work) for k in (True, False))
    assert_close(ours, plain)
    assert ours[0].vector[:-1].isfinite().all()


def test_the_loss_of_a_model_that_is_sure_is_small_and_not_zero() -> None:
    task = own(dense())
    rows = np.flatnonzero(task.dataset.train.y.numpy() == 3)[:4]
    vector = task.start.clone()
    vector[-1] += 12
    work = [TrainJob(vector, rows, (1,), 0.0, 1)]
    (ours,), (plain,) = (SequentialTrainer(task, kernels=k).train(PLANS["plain"], work) for k in (True, False))
    assert 0 < float(plain.loss) < 1e-3 and float(ours.loss) == pytest.approx(float(plain.loss), rel=1e-3)


def test_unusual_arrays_of_numbers_and_masks() -> None:
    """Samples that run backwards or cannot be written to, masks with gaps between their numbers, huge batches."""
    task = built_in("lenet5")
    rows = np.arange(9)
    rows.flags.writeable = False
    mask = (torch.arange(2 * task.layout.size).float() % 3 > 0).float()[::2]
    assert not mask.is_contiguous()
    job = jobs(task)[0]
    work = [replace(job, samples=given, mask=kept) for given in (rows, rows[::-1]) for kept in (None, mask)]
    for plan in (PLANS["momentum"], Plan(batch_size=10**7)):
        ours, plain = (SequentialTrainer(task, kernels=k).train(plan, work) for k in (True, False))
        assert_close(ours, plain)


def test_rows_are_gathered_once_for_all_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    task = own(dense())
    asked: list[int] = []
    gather = task.gather
    monkeypatch.setattr(task, "gather", lambda rows, test=False: (asked.append(len(rows)), gather(rows, test))[1])
    work = [TrainJob(task.start, np.arange(10), (1,), 0.1, 3)]
    trainer = SequentialTrainer(task)
    trainer._worker()
    assert task.least_batch == 1
    asked.clear()
    trainer.train(PLANS["plain"], work)
    assert asked == [10]
