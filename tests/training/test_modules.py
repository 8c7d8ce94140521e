"""Users' own modules, losses and targets on both back ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aedfl.errors import UserError
from aedfl.task import Task
from aedfl.training.batched import BatchedTrainer, supports
from aedfl.training.plan import Plan, TrainJob, TrainResult
from aedfl.training.sequential import SequentialTrainer
from training.tasks import PLANS, assert_close, data, jobs, own, same_bits, with_masks


def both(task: Task, plan: Plan = PLANS["momentum"], **settings: Any) -> tuple[list[TrainResult], list[TrainResult]]:
    """The same jobs on the sequential and on the batched back end."""
    given = jobs(task, **settings)
    return SequentialTrainer(task).train(plan, given), BatchedTrainer(task).train(plan, given)


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 4)
    )


# Batch statistics -----------------------------------------------------------------------------------------------


def buffers(task: Task, result: TrainResult) -> dict[str, Tensor]:
    return {e.name: result.vector[e.offset : e.end] for e in task.layout.entries if not e.trainable}


def test_batch_norm_buffers_travel_with_the_model() -> None:
    task = own(norm_net())
    one, other = both(task, sizes=(8, 11, 4))
    assert_close(one, other, atol=3e-4)
    for result, epochs, steps in zip(other, (1, 2, 1), (2, 3, 1), strict=True):
        assert buffers(task, result)["1.num_batches_tracked"].item() == epochs * steps
        assert not torch.equal(buffers(task, result)["1.running_mean"], torch.zeros(8))


def test_padding_does_not_touch_running_statistics() -> None:
    """The mean of a batch of three is that of the three, whoever else is trained beside it in batches of four."""
    task = own(norm_net())
    plan = Plan(batch_size=4)
    (job, _) = given = [TrainJob(task.start, np.arange(n), (0, n), 0.0, 1) for n in (3, 12)]
    x, _ = task.gather(torch.arange(3))
    with torch.no_grad():
        hidden = task.module[0](x)
    for trainer in (SequentialTrainer, BatchedTrainer):
        result = trainer(task).train(plan, given)[0]
        torch.testing.assert_close(buffers(task, result)["1.running_mean"], 0.1 * hidden.mean(0))
        torch.testing.assert_close(buffers(task, result)["1.running_var"], 0.9 + 0.1 * hidden.var(0))
    assert len(job.samples) == 3


def test_a_lone_sample_of_a_batch_norm_is_left_out() -> None:
    """It has no variance: nine samples in batches of four are two steps, a single sample is none."""
    task = own(norm_net())
    assert task.least_batch == 2
    one, other = both(task, sizes=(9, 1))
    assert_close(one, other, atol=3e-4)
    assert buffers(task, other[0])["1.num_batches_tracked"].item() == 2
    assert torch.equal(other[1].vector, jobs(task, sizes=(9, 1))[1].vector)
    assert other[1].loss.item() == 0.0


def test_a_norm_over_pixels_takes_a_lone_sample() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4))
    task = Task(module, data((1, 4, 4)))
    assert task.least_batch == 1
    assert_close(*both(task, sizes=(5, 1)), atol=3e-4)


class Centred(nn.Module):
    """Batch statistics of a user's own making."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output - output.mean(0)


def test_a_module_that_mixes_samples_never_sees_padding() -> None:
    task = own(Centred())
    assert task.whole_batches and not own(nn.Linear(6, 4)).whole_batches
    assert_close(*both(task))


# Buffers and parameters of every sort ---------------------------------------------------------------------------


class Scaled(nn.Module):
    """A buffer that gradients pass through, next to some that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.scale
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        output: Tensor = self.last(self.norm(hidden))
        return output


class Replacing(nn.Module):
    """A buffer that a forward pass replaces instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
        output: Tensor = self.layer(x)
        return output


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.second(self.first(x).relu()))
        return output


def frozen_net() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    module[0].requires_grad_(False)
    return module


def test_constant_and_changing_buffers_live_side_by_side() -> None:
    task = own(Scaled())
    assert supports(task)
    one, other = both(task, sizes=(4, 8, 11))
    assert_close(one, other, atol=3e-4)
    for result in one + other:
        assert torch.equal(buffers(task, result)["scale"], torch.linspace(0.5, 1.5, 8))
        torch.testing.assert_close(buffers(task, result)["mean"], buffers(task, result)["norm.running_mean"])


def test_a_replaced_buffer_is_not_forgotten_and_not_mixed_up() -> None:
    task = own(Replacing())
    assert not supports(task)
    results = SequentialTrainer(task).train(PLANS["plain"], jobs(task, sizes=(4, 12, 4)))
    assert [buffers(task, result)["calls"].item() for result in results] == [1, 2 * 3, 1]


def test_tied_weights_stay_tied() -> None:
    assert_close(*both(own(Tied())))


def test_frozen_parameters_stay_as_they_are() -> None:
    task = own(frozen_net())
    assert task.layout.parameters == 8 * 4 + 4
    one, other = both(task)
    assert_close(one, other)
    for result in one + other:
        assert torch.equal(result.vector[task.layout.parameters :], task.start[task.layout.parameters :])


# Dropout and other randomness -----------------------------------------------------------------------------------


def test_dropout_is_the_same_on_both_back_ends_and_in_any_batch() -> None:
    task = own(dropout_net())
    assert supports(task)
    one, other = both(task)
    assert_close(one, other)
    given = jobs(task)
    trainer = BatchedTrainer(task)
    assert same_bits(other, [trainer.train(PLANS["momentum"], [job])[0] for job in given])


def test_dropout_next_to_batch_statistics_is_the_same_on_both_back_ends() -> None:
    module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    assert_close(*both(own(module), sizes=(8, 11, 4)), atol=3e-4)


def test_dropout_is_the_same_under_masks() -> None:
    task = own(dropout_net())
    for structured in (False, True):
        given = with_masks(task, jobs(task), structured)
        one, other = (trainer(task).train(PLANS["plain"], given) for trainer in (SequentialTrainer, BatchedTrainer))
        assert_close(one, other)


def test_dropout_drops_something_and_follows_the_key() -> None:
    task, dry = own(dropout_net()), own(nn.Sequential(*(m for m in dropout_net() if not isinstance(m, nn.Dropout))))
    a, b = (TrainJob(task.start, np.arange(8), (0, key), 0.1, 1) for key in (1, 2))
    plan = Plan(batch_size=8)
    first, again, other = (SequentialTrainer(task).train(plan, [job])[0] for job in (a, a, b))
    assert torch.equal(first.vector, again.vector) and not torch.equal(first.vector, other.vector)
    without = SequentialTrainer(dry).train(plan, [a])[0]
    assert not torch.allclose(first.vector, without.vector)


class Noisy(nn.Module):
    """Dropout as a function: its numbers come from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(F.dropout(self.first(x), 0.5, self.training))
        return output


def test_global_randomness_is_noticed_and_reproducible() -> None:
    task = own(Noisy())
    assert task.draws_randomness and not supports(task) and not own(dropout_net()).draws_randomness
    given = jobs(task)
    torch.manual_seed(1)
    first = SequentialTrainer(task, workers=2).train(PLANS["plain"], given)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    again = [SequentialTrainer(task).train(PLANS["plain"], [job])[0] for job in given]
    assert same_bits(first, again)
    assert torch.equal(state, torch.random.get_rng_state())


class Branching(nn.Module):
    """Control flow that depends on data, which `vmap` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output if output.sum() > 0 else 2 * output


def test_a_module_that_vmap_refuses_is_not_supported() -> None:
    assert not supports(own(Branching()))


def test_asking_what_a_module_does_leaves_it_and_the_generator_alone() -> None:
    task = own(norm_net())
    before, state = task.layout.flatten(task.module), torch.random.get_rng_state()
    _ = task.draws_randomness, task.whole_batches, task.least_batch, task.replaces_buffers, supports(task)
    assert torch.equal(before, task.layout.flatten(task.module))
    assert torch.equal(state, torch.random.get_rng_state())


# Losses and targets ---------------------------------------------------------------------------------------------


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    """Not a mean over samples: the worst of them."""
    return F.cross_entropy(output, target, reduction="none").max()


@pytest.mark.parametrize(
    "loss",
    [
        own_loss,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 0.1, 3.0])),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.2),
    ],
    ids=["own", "mean", "weighted", "ignoring", "sum", "smooth"],
)
def test_losses_are_the_same_on_both_back_ends(loss: Any) -> None:
    assert_close(*both(own(nn.Linear(6, 4), loss=loss), lr=0.005))


@pytest.mark.parametrize("loss", [None, nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), F.mse_loss])
def test_regression_is_the_same_on_both_back_ends(loss: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    assert_close(*both(own(module, None, loss=loss), lr=0.002))


def test_regression_by_default_takes_a_column_of_outputs() -> None:
    """Outputs [B, 1] and targets [B] are not broadcast to [B, B]: what was learned is the sum of the inputs."""
    task = own(nn.Linear(6, 1), None)
    job = TrainJob(task.start, np.arange(40), (0,), 0.1, 100)
    for trainer in (SequentialTrainer, BatchedTrainer):
        (result,) = trainer(task).train(Plan(batch_size=8), [job])
        torch.testing.assert_close(result.vector, torch.tensor([1.0] * 6 + [0.0]), rtol=0, atol=1e-3)


def test_an_elementwise_loss_of_other_shapes_is_refused() -> None:
    with pytest.raises(UserError, match=r"Linear does not fit .*each output has shape \(1,\), targets \(\)"):
        own(nn.Linear(6, 1), None, loss=nn.MSELoss())


def test_a_model_that_does_not_fit_is_said_in_one_sentence() -> None:
    with pytest.raises(UserError) as error:
        own(nn.Linear(5, 4))
    message = str(error.value)
    assert message.startswith("model Linear does not fit data set custom with inputs of shape (6,): ")
    assert "\n" not in message
