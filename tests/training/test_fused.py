"""A convolution, its ReLU and pooling in one kernel on a CPU, against PyTorch's own."""

from __future__ import annotations

import platform
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from aedfl import models, native
from aedfl.training import fused as place
from aedfl.training.evaluate import Evaluator
from aedfl.training.fused import ConvPool, Fusion, conv_pool
from aedfl.training.sequential import SequentialTrainer
from training.tasks import PLANS, assert_close, built_in, jobs, same_bits, with_masks

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so there are no kernels")

TARGETS = {
    "native": native.TARGETS[0],
    "AVX2": ("-march=x86-64-v3",),
    "SSE": ("-march=x86-64",),
}
Sides = tuple[int, int]


def whole(*shape: int, key: int = 0) -> Tensor:
    """Small whole numbers: all sums are exact, in any order, and many answers are equal."""
    generator = torch.Generator().manual_seed(key)
    return torch.randint(-3, 4, shape, generator=generator).float()


def plainly(x: Tensor, w: Tensor, b: Tensor | None, padding: Sides) -> Tensor:
    return F.relu(F.max_pool2d(F.conv2d(x, w, b, padding=padding), 2))


def with_slopes(run: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor | None, padding: Sides) -> list[Tensor]:
    leaves = [None if part is None else part.clone().requires_grad_() for part in (x, w, b)]
    y = run(*leaves, padding)
    y.backward(whole(*y.shape, key=9))
    return [y.detach(), *[leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]]


def assert_equal(shape: tuple[int, ...], filters: int, kernel: Sides, padding: Sides, bias: bool = True) -> None:
    x, w = whole(*shape), whole(filters, shape[1], *kernel, key=1)
    b = whole(filters, key=2) if bias else None
    ours, theirs = with_slopes(conv_pool, x, w, b, padding), with_slopes(plainly, x, w, b, padding)
    assert len(ours) == len(theirs) == 3 + bias
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels as other processors would run them."""
    name: str = request.param
    if name != "native" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("for other processors")
    found = native.compiled(TARGETS[name])
    if found is None:
        pytest.skip(f"the compiler does not know {TARGETS[name]}")
    monkeypatch.setattr(place, "library", lambda: found)
    return name


@pytest.mark.parametrize(
    ("shape", "filters", "kernel", "padding"),
    [
        ((5, 3, 32, 32), 6, (5, 5), (0, 0)),
        ((5, 6, 14, 14), 16, (5, 5), (0, 0)),
        ((5, 1, 28, 28), 6, (5, 5), (0, 0)),
        ((3, 1, 8, 8), 8, (3, 3), (1, 1)),
        ((2, 4, 13, 17), 33, (3, 2), (1, 2)),
        ((2, 3, 70, 41), 13, (1, 1), (0, 0)),
        ((1, 20, 6, 6), 17, (3, 3), (2, 0)),
        ((2, 2, 3, 2), 1, (2, 1), (0, 0)),
    ],
)
def test_values_and_gradients_are_those_of_pytorch(
    target: str, shape: tuple[int, ...], filters: int, kernel: Sides, padding: Sides
) -> None:
    assert_equal(shape, filters, kernel, padding)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    size = st.integers(1, 24)
    kernel, padding = data.draw(st.tuples(*[st.integers(1, 5)] * 2)), data.draw(st.tuples(*[st.integers(0, 3)] * 2))
    height, width = (
        max(data.draw(size), side + 1 - 2 * gap, 1) for side, gap in zip(kernel, padding, strict=True)
    )
    samples, channels, filters = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), data.draw(size)
    assert_equal((samples, channels, height, width), filters, kernel, padding, data.draw(st.booleans()))


def test_inputs_in_another_order_of_memory() -> None:
    x, w, b = whole(4, 3, 12, 12), whole(5, 3, 3, 3, key=1), whole(5, key=2)
    other = x.contiguous(memory_format=torch.channels_last), w.contiguous(memory_format=torch.channels_last), b
    for one, two in zip(with_slopes(conv_pool, x, w, b, (0, 0)), with_slopes(conv_pool, *other, (0, 0)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_to_be_seen(target: str, value: float) -> None:
    for place_of_it in range(4):
        x = whole(1, 1, 6, 6)
        x.view(-1)[place_of_it * 7] = value
        w, b = whole(20, 1, 3, 3, key=1), whole(20, key=2)
        ours, theirs = conv_pool(x, w, b), plainly(x, w, b, (0, 0))
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


class Before(nn.Module):
    """The ReLU before the pooling, as most people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.features(x).flatten(1))
        return logits


def test_networks_whose_convolutions_are_all_pooled_are_fused() -> None:
    lenet, small = models.build("lenet5", (3, 32, 32), 10), models.build("cnn", (1, 8, 8), 10)
    for module, shape, count in ((lenet, (3, 32, 32), 2), (small, (1, 8, 8), 2), (Before(), (1, 8, 8), 1)):
        fusion = Fusion.of(module)
        assert fusion is not None
        faster = fusion.apply(module)
        assert sum(isinstance(layer, ConvPool) for layer in faster.modules()) == count
        assert {id(p) for p in faster.parameters()} == {id(p) for p in module.parameters()}
        x = torch.randn(3, *shape)
        assert torch.allclose(faster(x), module(x), atol=1e-6)


class Twice(Before):
    """Needs what comes out of the convolution for something else as well."""

    def forward(self, x: Tensor) -> Tensor:
        answers = self.features[0](x)
        logits: Tensor = self.out(F.relu(F.max_pool2d(answers, 2)).flatten(1)) + answers.mean()
        return logits


@pytest.mark.parametrize(
    "module",
    [
        models.build("vgg9", (3, 16, 16), 4),
        models.build("mlp", (1, 8, 8), 4),
        Twice(),
        Before().double(),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(3)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
    ],
)
def test_other_networks_are_left_alone(module: nn.Module) -> None:
    assert Fusion.of(module) is None


@pytest.mark.parametrize("name", ["cnn", "lenet5"])
@pytest.mark.parametrize("plan", ["plain", "everything"])
@pytest.mark.parametrize("masks", ["none", "structured", "any"])
def test_training_is_that_of_the_plain_loop(name: str, plan: str, masks: str) -> None:
    task = built_in(name)
    work = jobs(task) if masks == "none" else with_masks(task, jobs(task), masks == "structured")
    plain = SequentialTrainer(task, kernels=False).train(PLANS[plan], work)
    ours = SequentialTrainer(task).train(PLANS[plan], work)
    assert_close(ours, plain)
    assert same_bits(ours, SequentialTrainer(task, workers=2).train(PLANS[plan], work))


def test_scores_are_those_of_the_plain_module(monkeypatch: pytest.MonkeyPatch) -> None:
    task = built_in("lenet5")
    rows = torch.arange(20).numpy()
    ours = Evaluator(task).score([task.start], rows, test=True)
    monkeypatch.setattr(place, "library", lambda: None)
    theirs = Evaluator(task).score([task.start], rows, test=True)
    assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-6)


def test_without_a_compiler_pytorch_does_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("AEDFL_CACHE", str(tmp_path))
    native.library.cache_clear()
    try:
        assert native.library() is None
        assert Fusion.of(models.build("lenet5", (3, 32, 32), 10)) is None
        task = built_in("lenet5")
        work = jobs(task)
        plain = SequentialTrainer(task, kernels=False).train(PLANS["plain"], work)
        assert same_bits(SequentialTrainer(task).train(PLANS["plain"], work), plain)
    finally:
        native.library.cache_clear()


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("AEDFL_CACHE", str(tmp_path))
    assert native.compiled(("-march=no-such-processor",)) is None
    assert native.compiled(native.TARGETS[-1]) is not None
    folder = native.cache_folder() / "kernels"
    assert [path.suffix for path in folder.iterdir()] == [".so"]
