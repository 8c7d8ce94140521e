"""The sequential trainer against a loop that anybody would write with `torch.optim.SGD`."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from aedfl.task import Task
from aedfl.training.plan import Plan, TrainJob, batches
from aedfl.training.sequential import SequentialTrainer
from training.tasks import built_in, jobs, own


def reference(task: Task, plan: Plan, job: TrainJob) -> tuple[nn.Module, float, float]:
    """The trained module, the mean loss over the steps, and the first loss."""
    module = deepcopy(task.module).train()
    task.layout.load(module, job.vector)
    momentum, decay = plan.momentum, plan.weight_decay
    optimiser = torch.optim.SGD(module.parameters(), lr=job.lr, momentum=momentum, weight_decay=decay)
    anchor = [p.detach().clone() for p in module.parameters()]
    losses = []
    for rows in batches(job, plan.batch_size):
        x, y = task.gather(torch.from_numpy(rows[rows >= 0]))
        optimiser.zero_grad()
        loss = task.loss(module(x), y)
        losses.append(loss.item())
        pull = sum(((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchor, strict=True))
        (loss + plan.proximal / 2 * pull).backward()
        if plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), plan.clip_norm)
        optimiser.step()
    return module, sum(losses) / len(losses), losses[0]


@pytest.mark.parametrize("name", ["mlp", "cnn", "textcnn", "resnet8-batch"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(batch_size=4),
        Plan(batch_size=4, momentum=0.9, weight_decay=0.01),
        Plan(batch_size=4, proximal=0.5),
        Plan(batch_size=4, clip_norm=0.05),
    ],
    ids=["plain", "momentum and decay", "proximal", "clipped"],
)
def test_sequential_training_is_plain_sgd(name: str, plan: Plan) -> None:
    task = built_in(name)
    for job in jobs(task, sizes=(6, 9)):
        module, loss, first = reference(task, plan, job)
        (result,) = SequentialTrainer(task).train(plan, [job])
        torch.testing.assert_close(result.vector, task.layout.flatten(module), rtol=1e-4, atol=2e-5)
        assert result.loss.item() == pytest.approx(loss, rel=1e-4)
        assert result.first_loss.item() == pytest.approx(first, rel=1e-4)


def test_the_probed_gradient_is_that_of_the_first_mini_batch() -> None:
    task = built_in("mlp")
    (job,) = jobs(task, sizes=(9,))
    rows = torch.from_numpy(batches(job, 4)[0])
    x, y = task.gather(rows)
    vector = job.vector.clone().requires_grad_()
    loss = task.loss(torch.func.functional_call(task.module, task.layout.views(vector), (x,)), y)
    (gradient,) = torch.autograd.grad(loss, vector)
    (result,) = SequentialTrainer(task).train(Plan(batch_size=4, probe=True), [job])
    torch.testing.assert_close(result.gradient, gradient)


def test_without_a_probe_there_is_no_gradient() -> None:
    task = built_in("mlp")
    (result,) = SequentialTrainer(task).train(Plan(batch_size=4), jobs(task, sizes=(9,)))
    assert not result.gradient.any()


def test_a_user_loss_is_minimised_as_it_is() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - torch.nn.functional.one_hot(target, 4)) ** 2).sum(1).max()

    task = own(nn.Linear(6, 4), loss=loss)
    (job,) = jobs(task, sizes=(9,))
    module, mean, _ = reference(task, Plan(batch_size=4), job)
    (result,) = SequentialTrainer(task).train(Plan(batch_size=4), [job])
    torch.testing.assert_close(result.vector, task.layout.flatten(module), rtol=1e-4, atol=1e-5)
    assert result.loss.item() == pytest.approx(mean, rel=1e-4)
