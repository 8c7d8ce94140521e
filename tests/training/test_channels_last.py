"""On a CPU images are trained with their channels side by side, where the module allows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aedfl.task import Task
from aedfl.training.plan import Plan
from aedfl.training.sequential import SequentialTrainer
from aedfl.training.traits import channels_last, likes_channels_last
from training.tasks import built_in, data, jobs


class Viewing(nn.Module):
    """`view` refuses what is not laid out as it expects."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.out = nn.Linear(4 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.conv(x).view(len(x), -1))
        return y


class Reading(Viewing):
    """Looks at its input in the order of memory, and so says something else when that changes."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.conv(x.as_strided(x.shape, (192, 64, 8, 1))).flatten(1))
        return y


@pytest.mark.parametrize("channels", [1, 3])
def test_values_stay_and_strides_tell_a_convolution_which_order_is_meant(channels: int) -> None:
    x = torch.randn(2, channels, 5, 7)
    laid = channels_last(x)
    assert torch.equal(laid, x) and laid.stride() == (channels * 35, 1, channels * 7, channels)
    assert nn.Conv2d(channels, 8, 3)(laid).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 4, 4, 4)])
def test_what_is_no_image_stays_as_it_is(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert channels_last(x) is x


def test_modules_are_asked_whether_they_allow_it() -> None:
    x = torch.randn(2, 3, 8, 8)
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    assert likes_channels_last(convolution, x)
    assert not likes_channels_last(Viewing(), x) and not likes_channels_last(Reading(), x)
    assert not likes_channels_last(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), x)
    assert built_in("cnn").channels_last and not built_in("mlp").channels_last and not built_in("textcnn").channels_last


def test_a_module_that_refuses_is_trained_as_its_data_lie() -> None:
    task = Task(Viewing(), data((3, 8, 8), 10))
    assert not task.channels_last
    (job,) = jobs(task, sizes=(6,))
    (result,) = SequentialTrainer(task).train(Plan(batch_size=4), [job])
    assert not torch.equal(result.vector, job.vector)


def test_training_does_what_it_did_with_the_other_order() -> None:
    task = built_in("cnn")
    given = jobs(task, sizes=(6, 9))
    found = SequentialTrainer(task).train(Plan(batch_size=4), given)
    task.__dict__["channels_last"] = False
    try:
        plain = SequentialTrainer(task).train(Plan(batch_size=4), given)
    finally:
        task.__dict__["channels_last"] = True
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one.vector, other.vector, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.loss, other.loss)
