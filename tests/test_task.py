"""What a task knows about a module, its loss and its data."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aedfl.data import from_user
from aedfl.errors import UserError
from aedfl.task import Task
from training.tasks import CLASSES, SAMPLES, built_in, data, own


def test_loss_and_metric_follow_the_targets() -> None:
    classification, regression = own(nn.Linear(6, 4)), own(nn.Linear(6, 1), None)
    assert classification.loss is F.cross_entropy and classification.metric_name == "accuracy"
    assert regression.metric_name == "negative_squared_error"
    output, target = torch.tensor([[2.0], [5.0]]), torch.tensor([1.0, 1.0])
    assert regression.loss(output, target).item() == pytest.approx((1 + 16) / 2)
    assert regression.metric(output, target).tolist() == [-1.0, -16.0]


def test_accuracy_counts_hits() -> None:
    output = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert own(nn.Linear(6, 4)).metric(output, torch.tensor([1, 1, 1])).tolist() == [1.0, 0.0, 1.0]


def test_the_users_module_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    before = deepcopy(module.state_dict())
    task = own(module)
    task.module_with(task.start * 2)
    assert type(module[1]) is nn.Dropout
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_the_module_comes_back_as_it_was_given() -> None:
    """With the users' own layers, not with the ones that training puts in their place."""
    task = own(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)))
    module = task.module_with(2 * task.start)
    assert type(module[1]) is nn.Dropout and not module.training
    assert torch.equal(task.layout.flatten(module), 2 * task.start)


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (None, True),
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), False),
        (nn.CrossEntropyLoss(reduction="sum"), False),
        (nn.CrossEntropyLoss(ignore_index=0), False),
        (lambda output, target: F.cross_entropy(output, target), False),
    ],
)
def test_the_loss_of_each_sample_is_known_where_their_mean_is_the_loss(loss: nn.Module | None, known: bool) -> None:
    task = own(nn.Linear(6, 4), loss=loss)
    assert (task.example_loss is not None) == known
    if task.example_loss is not None:
        x, y = task.gather(torch.arange(9))
        output = task.module(x)
        torch.testing.assert_close(task.example_loss(output, y).mean(), task.loss(output, y))


def test_gathering_takes_rows_of_any_shape() -> None:
    task = built_in("cnn")
    x, y = task.gather(torch.tensor([[0, 5], [5, 1]]))
    assert x.shape == (2, 2, 1, 8, 8) and y.shape == (2, 2)
    assert torch.equal(x[0, 1], x[1, 0]) and y[0, 1] == y[1, 0] == task.dataset.train.y[5]


def test_gathering_scales_images() -> None:
    images = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(20) % 2
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), from_user((images, labels), (images, labels)))
    x, _ = task.gather(torch.arange(20))
    assert x.dtype == torch.float32
    assert x.mean((0, 2, 3)).abs().max() < 1e-5 and (x.std((0, 2, 3)) - 1).abs().max() < 0.02


def test_macs_are_those_of_one_sample() -> None:
    assert own(nn.Linear(6, 4)).macs == 24.0


@pytest.mark.parametrize(
    ("module", "classes"),
    [(nn.Linear(5, 4), CLASSES), (nn.Linear(6, 2), CLASSES), (nn.Conv2d(1, 2, 3), CLASSES), (nn.Linear(6, 3), None)],
    ids=["inputs", "outputs", "dimensions", "targets"],
)
def test_a_misfit_is_one_sentence(module: nn.Module, classes: int | None) -> None:
    with pytest.raises(UserError) as error:
        own(module, classes)
    name = type(module).__name__
    assert str(error.value).startswith(f"model {name} does not fit data set custom with inputs of shape (6,): ")
    assert "\n" not in str(error.value)


class Pair(nn.Linear):
    """Gives more than the outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Wide(nn.Linear):
    """In float64, behind inputs and outputs in float32."""

    def __init__(self) -> None:
        super().__init__(6, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double()).float()


@pytest.mark.parametrize(
    ("module", "parts", "said"),
    [
        (Pair(6, 4), {}, "its forward must give one tensor, not a tuple"),
        (nn.Identity(), {}, "model Identity has no parameters to train"),
        (nn.Linear(6, 4).requires_grad_(False), {}, "model Linear has no parameters to train"),
        (nn.Linear(6, 4).double(), {}, "'weight' is of type torch.float64; parameters must be float32"),
        (Wide(), {}, "'weight' is of type torch.float64; parameters must be float32"),
        (nn.Linear, {}, "model: must be a torch.nn.Module, not the class Linear"),
        (3, {}, "model: must be a torch.nn.Module, not a int"),
        (nn.Linear(6, 4), {"metric": "foo"}, "metric = 'foo': must be a function"),
        (nn.Linear(6, 4), {"loss": 0}, "loss = 0: must be a function"),
    ],
)
def test_what_is_no_learning_problem_is_one_sentence(module: nn.Module, parts: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        own(module, **parts)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_test_and_training_data_are_kept_apart() -> None:
    train, test = data((6,)), torch.full((3, 6), 9.0)
    task = Task(nn.Linear(6, 4), from_user((train.train.x, train.train.y), (test, np.zeros(3, dtype=np.int64))))
    assert torch.equal(task.gather(torch.arange(3), test=True)[0], test)
    assert len(task.train_data) == SAMPLES and len(task.test_data) == 3
