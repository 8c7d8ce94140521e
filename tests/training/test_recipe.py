"""Which networks are chains of layers that kernels know; all others are left to PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aedfl import models, native
from aedfl.training.chain import DENSE, IMAGE, WORDS, Recipe
from aedfl.training.sequential import SequentialTrainer
from training.chains import Text, chain_of, dense
from training.tasks import PLANS, built_in, jobs, own, same_bits

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so there are no kernels")


def test_labels_and_words_that_are_out_of_bounds_are_left_to_pytorch() -> None:
    task = built_in("mlp")
    chain = chain_of(task.module, (1, 8, 8))
    x, y = task.gather(torch.arange(4))
    assert chain.takes(x, y)
    assert not chain.takes(x, torch.tensor([0, 1, -100, 2])), "cross entropy ignores -100"
    assert not chain.takes(x, torch.tensor([0, 1, 4, 2]))
    assert not chain.takes(x.double(), y) and not chain.takes(x[:, :, 1:], y) and not chain.takes(x[:0])
    text = chain_of(built_in("textcnn").module, (8,))
    assert text.takes(torch.full((2, 8), 19)) and not text.takes(torch.full((2, 8), 20))
    assert not text.takes(torch.full((2, 8), -1))
    with torch.autocast("cpu", torch.bfloat16):
        assert not chain.takes(x, y)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(weight=torch.ones(4)), F.multi_margin_loss]
)
def test_other_losses_are_trained_step_by_step(loss: Any) -> None:
    task = own(dense(), loss=loss)
    assert SequentialTrainer(task).recipe is None and task.chain is None
    assert SequentialTrainer(own(dense(), loss=nn.CrossEntropyLoss())).recipe is not None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.other(torch.relu(self.one(x)))
        return logits


class Again(Tied):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.one(torch.relu(self.one(x)))
        return logits


class Beside(Tied):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.one(x) + x
        return logits


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    module[0].weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "module",
    [
        Again(),
        Beside(),
        frozen(),
        nn.Linear(6, 4).double(),
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)),
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)),
        nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4)),
        nn.Sequential(nn.Linear(6, 4), nn.Softmax(1)),
        nn.Sequential(nn.Flatten(0), nn.Linear(6, 4)),
        nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(18, 4)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)),
        models.build("resnet8", (3, 8, 8), 4),
        models.build("vgg9", (3, 8, 8), 4),
    ],
)
def test_what_is_no_such_chain_is_left_alone(module: nn.Module) -> None:
    assert Recipe.of(module) is None


def test_tables_with_rules_of_their_own_are_left_alone() -> None:
    for options in ({"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        module = Text(9, 4, [(3, 2)])
        assert Recipe.of(module) is not None
        module.table = nn.Embedding(9, 4, **options)  # type: ignore[arg-type]
        assert Recipe.of(module) is None


def test_shapes_that_do_not_fit_are_left_to_pytorch() -> None:
    tied = Recipe.of(Tied())
    assert tied is None or tied.chain(Tied(), (6,)) is None
    lenet = models.build("lenet5", (1, 28, 28), 4)
    recipe = Recipe.of(lenet)
    assert recipe is not None and recipe.chain(lenet, (1, 28, 28)) is not None
    for inputs in ((3, 28, 28), (1, 32, 32), (1, 4, 4), (784,)):
        assert recipe.chain(lenet, inputs) is None
    rows = Recipe.of(dense())
    assert rows is not None and rows.chain(dense(), (6,)) is not None
    assert rows.chain(dense(), (3, 6)) is None, "not flattened"
    text = Text(9, 4, [(3, 5)])
    assert chain_of(text, (5,)).words == 9
    short = Recipe.of(text)
    assert short is not None and short.chain(text, (4,)) is None


class Hidden(nn.Module):
    """Does something between its layers that a trace does not show."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.other, self.how = nn.Linear(6, 5), nn.Linear(5, 4), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no gradient":
            with torch.no_grad():
                x = torch.relu(self.one(x))
        elif self.how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.relu(self.one(x)).float()
        else:
            x = Backwards.apply(torch.relu(self.one(x)))  # type: ignore[no-untyped-call]
        logits: Tensor = self.other(x)
        return logits


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return -slopes[0]


@pytest.mark.parametrize("how", ["no gradient", "autocast", "backwards"])
def test_what_a_trace_does_not_show_is_noticed(how: str) -> None:
    task = own(Hidden(how))
    assert SequentialTrainer(task).recipe is None
    ours, plain = (SequentialTrainer(task, kernels=k).train(PLANS["plain"], jobs(task)) for k in (True, False))
    assert same_bits(ours, plain)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.out(x),)


def test_outputs_that_are_no_tensor_are_left_alone() -> None:
    assert Recipe.of(Several()) is None


class TiedText(Text):
    """Its table is registered after the layer whose weights it shares."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.out = nn.Linear(4, 9)
        self.table = nn.Embedding(9, 4)
        self.table.weight = self.out.weight
        self.lines = nn.ModuleList([nn.Conv1d(4, 4, 2)])


def test_a_table_that_is_shared_is_left_alone() -> None:
    recipe = Recipe.of(TiedText())
    assert recipe is None or recipe.chain(TiedText(), (5,)) is None


def test_what_a_recipe_says() -> None:
    """Layers in their order, those over words side by side in the order in which their answers are joined."""
    lenet, text = Recipe.of(models.build("lenet5", (1, 28, 28), 4)), Recipe.of(Text(9, 4, [(3, 2), (2, 3)]))
    assert lenet is not None and text is not None
    assert [(link.kind, link.name, link.level, link.relu) for link in lenet.links] == [
        (IMAGE, "conv1", 0, True), (IMAGE, "conv2", 1, True),
        (DENSE, "fc1", 2, True), (DENSE, "fc2", 3, True), (DENSE, "out", 4, False),
    ]  # fmt: skip
    assert [(link.kind, link.name, link.level) for link in text.links] == [
        (WORDS, "lines.1", 0), (WORDS, "lines.0", 0), (DENSE, "out", 1),
    ]  # fmt: skip
