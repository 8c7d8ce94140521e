"""The GPU's trainers against the sequential one on the CPU, and its scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aedfl.data import Dataset, Split
from aedfl.models import build
from aedfl.ops import HeldOut
from aedfl.task import Task
from aedfl.training.batched import BatchedTrainer
from aedfl.training.evaluate import Evaluator
from aedfl.training.grouped import GroupedTrainer, supports
from aedfl.training.plan import Plan, TrainJob
from aedfl.training.sequential import SequentialTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {
    "lenet5": (3, 32, 32), "resnet8": (3, 32, 32), "vgg9": (3, 32, 32), "cnn": (1, 8, 8), "mlp": (1, 8, 8),
    "textcnn": (70,),
}  # fmt: skip


def data(shape: tuple[int, ...]) -> Dataset:
    """Random images, or texts of 20,000 words where a sample is a line."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(400, *shape, generator=random)
    if len(shape) == 1:
        x = torch.randint(0, 20_000, (400, *shape), generator=random)
    y = torch.randint(0, 10, (400,), generator=random)
    return Dataset("random", Split(x, y), Split(x[:10], y[:10]), 10, None)


def jobs(task: Task, count: int) -> list[TrainJob]:
    """Ragged sizes, own learning rates, a mask on every second one."""
    found = []
    for i in range(count):
        mask = torch.rand(task.layout.size, generator=torch.Generator().manual_seed(i)) > 0.3 if i % 2 else None
        rows = np.arange(i * 3, i * 3 + 90 + 7 * i)
        found.append(TrainJob(task.start, rows, (0, i), 0.002 + 0.0005 * i, 1 + i % 2, mask))
    return found


def nudged(job: TrainJob, by: float = 1e-6) -> TrainJob:
    """A start that differs by about what rounding does on the way through a network."""
    noise = torch.randn(job.vector.shape, generator=torch.Generator().manual_seed(1))
    return TrainJob(job.vector * (1 + by * noise), job.samples, job.key, job.lr, job.epochs, job.mask)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other.cpu()).norm() / one.norm())


def on_gpu(job: TrainJob) -> TrainJob:
    mask = None if job.mask is None else job.mask.cuda()
    return TrainJob(job.vector.cuda(), job.samples, job.key, job.lr, job.epochs, mask)


@pytest.mark.parametrize("name", SHAPES)
def test_rounding_of_tf32_is_not_taken_for_samples_that_mix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert supports(Task(build(name, SHAPES[name], 10, seed=0), data(SHAPES[name]), device="cuda"))


@pytest.mark.parametrize("trainer", [BatchedTrainer, GroupedTrainer], ids=["batched", "grouped"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tf32", "tolerance"), [(False, 1e-5), (True, 1e-3)], ids=["fp32", "tf32"])
def test_training_on_a_gpu_equals_sequential_training_on_a_cpu(
    name: str, tf32: bool, tolerance: float, trainer: type[BatchedTrainer] | type[GroupedTrainer]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    module, plan = build(name, SHAPES[name], 10, seed=0), Plan(batch_size=50, momentum=0.5, probe=True)
    cpu, gpu = Task(module, data(SHAPES[name])), Task(module, data(SHAPES[name]), device="cuda")
    assert trainer is BatchedTrainer or supports(gpu)
    expected = SequentialTrainer(cpu).train(plan, jobs(cpu, 5))
    found = trainer(gpu).train(plan, [on_gpu(job) for job in jobs(cpu, 5)])
    # One unit that a rounding error switches on or off changes a gradient by far more than a rounding error: as much as
    # that does on the CPU, it may do on the GPU.
    rounded = SequentialTrainer(cpu).train(plan, [nudged(job) for job in jobs(cpu, 5)])
    noise = max(apart(one.vector, other.vector) for one, other in zip(expected, rounded, strict=True))
    slope_noise = max(apart(one.gradient, other.gradient) for one, other in zip(expected, rounded, strict=True))
    loss_noise = max(apart(one.loss, other.loss) for one, other in zip(expected, rounded, strict=True))
    for one, other, job in zip(expected, found, jobs(cpu, 5), strict=True):
        assert (one.vector - job.vector).norm() > 0
        assert apart(one.vector, other.vector) <= max(tolerance, 3 * noise)
        assert apart(one.gradient, other.gradient) <= max(50 * tolerance, 3 * slope_noise)
        assert apart(one.loss, other.loss) <= max(10 * tolerance, 3 * loss_noise)


@pytest.mark.parametrize("name", SHAPES)
def test_scores_on_a_gpu_equal_those_on_a_cpu_and_are_not_waited_for(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    module = build(name, SHAPES[name], 10, seed=0)
    cpu, gpu = Task(module, data(SHAPES[name])), Task(module, data(SHAPES[name]), device="cuda")
    random = torch.Generator().manual_seed(0)
    vectors = [cpu.start * (1 + 0.3 * torch.randn(cpu.start.shape, generator=random)) for _ in range(30)]
    _, losses = Evaluator(cpu).score(vectors, np.arange(400), test=False)
    evaluator, there = Evaluator(gpu), [vector.cuda() for vector in vectors]
    assert evaluator.score(there, np.arange(400), test=False)[1] == pytest.approx(losses, rel=1e-4)
    torch.cuda._sleep(2_000_000_000)
    later = evaluator.begin(there, np.arange(400), test=False)
    assert not later.ready, "Python is ahead of the GPU, which sleeps for a second"
    assert later.get()[1] == pytest.approx(losses, rel=1e-4)


def test_graphs_of_all_sizes_and_plans_share_the_memory_of_the_largest() -> None:
    task = Task(build("lenet5", SHAPES["lenet5"], 10, seed=0), data(SHAPES["lenet5"]), device="cuda")
    trainer, given = GroupedTrainer(task), [on_gpu(job) for job in jobs(task, 24)]

    def grown(plan: Plan, chosen: list[TrainJob]) -> int:
        """Bytes that PyTorch has taken from the GPU more than before, with nothing cached outside of the graphs."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        trainer.train(plan, chosen)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    first = grown(Plan(batch_size=50), given)
    fewer = grown(Plan(batch_size=50), given[:14]) + grown(Plan(batch_size=50), given[:6])
    other = grown(Plan(batch_size=50, probe=True), given)
    assert fewer < 0.1 * first and other < 0.5 * first


@pytest.mark.parametrize("name", SHAPES)
def test_held_out_gradients_of_many_models_on_a_gpu_equal_those_on_a_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once there, one after the other here."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    module = build(name, SHAPES[name], 10, seed=0)
    cpu, gpu = (Task(module, data(SHAPES[name]), device=device) for device in ("cpu", "cuda"))
    work = [(job.vector, job.mask, job.samples[: 20 + 5 * (i % 2)]) for i, job in enumerate(jobs(cpu, 5))]
    there = [(vector.cuda(), None if mask is None else mask.cuda(), rows) for vector, mask, rows in work]
    assert gpu.stacks
    for (loss, gradient), (other_loss, other) in zip(HeldOut(cpu).run(work), HeldOut(gpu).run(there), strict=True):
        assert float(other_loss) == pytest.approx(float(loss), rel=1e-4)
        assert apart(gradient, other) < 1e-4
