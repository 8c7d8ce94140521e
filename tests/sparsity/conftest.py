"""Networks to prune: the built-in ones, and shapes that a user's own model may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from aedfl.layout import Layout
from aedfl.models import build
from aedfl.sparsity import ChannelGroups, Objective, flat_loss


class Residual(nn.Module):
    """Convolutions with bias and BatchNorm, an identity shortcut, a strided one, PReLU, a flattened head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.a, self.norm_a = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.norm_b = nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.down, self.act = nn.Conv2d(6, 10, 2, stride=2), nn.PReLU(10)
        self.skip = nn.Conv2d(6, 10, 1, stride=2)
        self.out = nn.Linear(10 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))
        x = self.act(self.down(x) + self.skip(x))
        y: Tensor = self.out(x.flatten(1))
        return y


class Concat(nn.Module):
    """Two branches joined, one of them used again, and a sigmoid, whose zero is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 5, 3), nn.Conv2d(2, 4, 3)
        self.both, self.again = nn.Conv2d(9, 6, 3), nn.Conv2d(4, 6, 3)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.sigmoid(self.left(x)), F.relu(self.right(x))
        x = self.both(torch.cat([left, right], 1)) + self.again(right)
        y: Tensor = self.out(F.relu(x).mean((2, 3)))
        return y


class Depthwise(nn.Module):
    """Pointwise, depthwise, pointwise, as mobile networks have it, with GroupNorm in groups of two."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm = nn.Conv2d(2, 8, 1), nn.GroupNorm(4, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.project = nn.Conv2d(8, 6, 1)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.expand(x)))
        x = F.relu(self.project(F.relu(self.depthwise(x))))
        y: Tensor = self.out(x.mean((2, 3)))
        return y


class Loop(nn.Module):
    """A layer whose inputs and outputs are the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.loop, self.out = nn.Linear(7, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        y: Tensor = self.out(x + F.relu(self.loop(x)))
        return y


@dataclass(frozen=True)
class Case:
    """A module with inputs for it, what can be pruned, and its flat vector."""

    module: nn.Module
    x: Tensor
    groups: ChannelGroups
    vector: Tensor

    @property
    def layout(self) -> Layout:
        return self.groups.layout


def image(*shape: int) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))


def tokens(length: int) -> Tensor:
    return torch.randint(0, 100, (3, length), generator=torch.Generator().manual_seed(0))


MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "lenet5": (lambda: build("lenet5", (1, 28, 28), 26), lambda: image(1, 28, 28)),
    "resnet8": (lambda: build("resnet8", (3, 16, 16), 10), lambda: image(3, 16, 16)),
    "resnet8-batch": (lambda: build("resnet8", (3, 16, 16), 10, norm="batch"), lambda: image(3, 16, 16)),
    "vgg9": (lambda: build("vgg9", (3, 16, 16), 10), lambda: image(3, 16, 16)),
    "vgg9-group": (lambda: build("vgg9", (3, 16, 16), 10, norm="group"), lambda: image(3, 16, 16)),
    "textcnn": (lambda: build("textcnn", (20,), 2, vocabulary=100), lambda: tokens(20)),
    "mlp": (lambda: build("mlp", (1, 8, 8), 10), lambda: image(1, 8, 8)),
    "cnn": (lambda: build("cnn", (1, 8, 8), 10), lambda: image(1, 8, 8)),
    "residual": (Residual, lambda: image(2, 8, 8)),
    "concat": (Concat, lambda: image(2, 8, 8)),
    "depthwise": (Depthwise, lambda: image(2, 8, 8)),
    "loop": (Loop, lambda: image(7)),
}
_made: dict[str, Case] = {}


def make(name: str) -> Case:
    """The case of that name with start values other than zero everywhere; made once."""
    if name not in _made:
        maker, inputs = MAKERS[name]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module, x = maker(), inputs()
            layout = Layout.of(module)
            noise = torch.randn(layout.size) * 0.1
        vector = layout.flatten(module)
        for entry in layout.entries:
            part, shift = vector[entry.offset : entry.end], noise[entry.offset : entry.end]
            part += shift.abs() if not entry.trainable and entry.dtype.is_floating_point else shift
            if not entry.dtype.is_floating_point:
                part.zero_()
        layout.load(module, vector)
        _made[name] = Case(module, x, ChannelGroups.of(module, x[:1]), vector)
    return _made[name]


@pytest.fixture(params=list(MAKERS))
def case(request: pytest.FixtureRequest) -> Case:
    """Each network in turn."""
    return make(request.param)


@pytest.fixture(params=[name for name in MAKERS if not name.startswith("vgg9")])
def small_case(request: pytest.FixtureRequest) -> Case:
    """Each network whose units x entries fit into a matrix."""
    return make(request.param)


@pytest.fixture
def made() -> Callable[[str], Case]:
    """A network by its name."""
    return make


@pytest.fixture
def random_mask() -> Callable[..., Tensor]:
    """A mask that keeps a random share of the units, and at least one in each layer."""

    def draw(groups: ChannelGroups, seed: int, *lead: int, share: float = 0.5) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(*lead, groups.count, generator=generator) < share
        for units in groups.layers.values():
            mask[..., units.start] |= ~mask[..., units].any(-1)
        return mask

    return draw


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """These networks are too small for more, and other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Trained:
    """A network trained on scikit-learn's 8x8 digits, with the samples its curvature is looked at on."""

    module: nn.Module
    groups: ChannelGroups
    vector: Tensor
    initial: Tensor
    objective: Objective


def train(module: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float, samples: int) -> Trained:
    """Plain SGD on batches of 50, or of everything where there is less."""
    layout = Layout.of(module)
    initial = layout.flatten(module)
    for number in range(steps):
        rows = torch.arange(number * 50, number * 50 + 50) % len(x)
        loss = F.cross_entropy(module(x[rows]), y[rows])
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for value, gradient in zip(module.parameters(), gradients, strict=True):
                value -= rate * gradient
    objective = flat_loss(module, layout, x[:samples], y[:samples])
    groups = ChannelGroups.of(module, x[:1])
    return Trained(module, groups, layout.flatten(module), initial, objective)


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    """1797 images [1, 8, 8] with values from 0 to 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)


@pytest.fixture(scope="session")
def lenet(digits: tuple[Tensor, Tensor]) -> Trained:
    """LeNet-5 on digits blown up to 28x28, trained to some 90 %; curvature on 50 samples."""
    x, y = digits
    x = F.interpolate(x[:600], size=(28, 28), mode="bilinear")
    return train(build("lenet5", (1, 28, 28), 10, seed=0), x, y[:600], 200, 0.1, 50)


@pytest.fixture(scope="session")
def tiny(digits: tuple[Tensor, Tensor]) -> Trained:
    """An MLP of 294 parameters on four digits of 4x4 pixels, small enough to write its Hessian out."""
    x, y = digits
    few = y < 4
    x = F.avg_pool2d(x[few], 2).flatten(1)
    x = 3 * (x - x.mean(0))
    return train(build("mlp", (16,), 4, seed=0, hidden=(10, 8)), x[:200], y[few][:200], 200, 0.1, 200)
