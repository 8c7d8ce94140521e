"""A convolution, its ReLU and pooling in one kernel on a CPU, against PyTorch's own."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from aedfl import models, native
from aedfl.task import Task
from aedfl.training import fused as place
from aedfl.training.evaluate import Evaluator
from aedfl.training.fused import Fused, Fusion, conv_pool
from aedfl.training.sequential import SequentialTrainer
from training.tasks import PLANS, assert_close, built_in, data, jobs, same_bits, with_masks

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


def targets() -> list[str]:
    """Processors to compile for; the kernels run as they would there."""
    others = platform.machine() in ("x86_64", "AMD64")
    return [name for name in TARGETS if name == "native" or others]


def compiled_for(name: str) -> ctypes.CDLL:
    try:
        return native.compiled(TARGETS[name])
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(params=targets())
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found = compiled_for(request.param)
    monkeypatch.setattr(place, "library", lambda: found)
    return str(request.param)


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
        assert sum(isinstance(layer, Fused) for layer in faster.modules()) == count
        assert {id(p) for p in faster.parameters()} == {id(p) for p in module.parameters()}
        x = torch.randn(3, *shape)
        assert torch.allclose(faster(x), module(x), atol=1e-6)


def listening() -> nn.Module:
    module = Before()
    module.features[0].register_forward_hook(lambda *_: None)
    return module


def replaced() -> nn.Module:
    module = Before()
    module.features[0].forward = lambda x: x  # type: ignore[method-assign]
    return module


class Asserting(Before):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return super().forward(x)


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
        listening(),
        replaced(),
        Asserting(),
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


class Odd(nn.Module):
    """Calls by keyword, sizes as a list, and a layer named like those that are put in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(1, 4, 3), nn.MaxPool2d([2, 2])  # type: ignore[arg-type]
        self.register_module(f"{place.PREFIX}", nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(place.PREFIX)(F.relu(self.pool(self.conv(input=x))))
        return y


def test_unusual_ways_to_write_it() -> None:
    module, x = Odd(), torch.randn(2, 1, 8, 8)
    fusion = Fusion.of(module)
    assert fusion is not None
    assert torch.allclose(fusion.apply(module)(x), module(x), atol=1e-6)


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (torch.zeros(2, 2, 8, 8), RuntimeError),  # another number of channels
        (torch.zeros(2, 1, 2, 2), RuntimeError),  # smaller than the filter
        (torch.zeros(2, 1, 3, 3), RuntimeError),  # nothing left to pool
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), RuntimeError),
        (torch.zeros(2, 1, 8, 8, dtype=torch.float64), RuntimeError),
    ],
)
def test_what_pytorch_refuses_is_refused(x: Tensor, kind: type[Exception]) -> None:
    w, b = whole(4, 1, 3, 3), whole(4)
    with pytest.raises(kind):
        plainly(x, w, b, (0, 0))
    with pytest.raises(kind):
        conv_pool(x, w, b)


def test_single_images_and_autocast_are_left_to_pytorch() -> None:
    x, w, b = whole(1, 8, 8), whole(4, 1, 3, 3, key=1), whole(4, key=2)
    assert torch.equal(conv_pool(x, w, b), plainly(x, w, b, (0, 0)))
    with torch.autocast("cpu"):
        found = conv_pool(x.unsqueeze(0), w, b)
    assert found.dtype == torch.bfloat16


class Drawing(Before):
    """Takes one of two ways, by chance."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if torch.rand(()) < 0.5 else 2)


def test_what_is_drawn_is_not_frozen() -> None:
    assert SequentialTrainer(Task(Drawing(), data((1, 8, 8)))).fusion is None


def test_threads_may_train_and_fuse_while_another_one_traces() -> None:
    module, x = models.build("lenet5", (1, 28, 28), 4), torch.randn(2, 1, 28, 28)
    fusion = Fusion.of(module)
    assert fusion is not None
    with torch.no_grad():
        wanted = fusion.apply(module)(x)
    stop = threading.Event()

    def use() -> int:
        count = 0
        while not stop.is_set():
            with torch.no_grad():
                assert torch.equal(fusion.apply(module)(x), wanted)
                module(x)
            count += 1
        return count

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            users = [pool.submit(use) for _ in range(3)]
            traced = [Fusion.of(models.build("cnn", (1, 8, 8), 4)) for _ in range(20)]
            stop.set()
            assert all(user.result() > 0 for user in users) and all(one is not None for one in traced)
    finally:
        sys.setswitchinterval(interval)
        stop.set()


def by_steps(task: Task, workers: int = 1) -> SequentialTrainer:
    """With fused layers, but one step after the other (see test_chain.py)."""
    trainer = SequentialTrainer(task, workers)
    assert trainer.fusion is not None
    trainer.recipe = None
    return trainer


@pytest.mark.parametrize("name", ["cnn", "lenet5"])
@pytest.mark.parametrize("plan", ["plain", "everything"])
@pytest.mark.parametrize("masks", ["none", "structured", "any"])
def test_training_is_that_of_the_plain_loop(name: str, plan: str, masks: str) -> None:
    task = built_in(name)
    work = jobs(task) if masks == "none" else with_masks(task, jobs(task), masks == "structured")
    plain = SequentialTrainer(task, kernels=False).train(PLANS[plan], work)
    ours = by_steps(task).train(PLANS[plan], work)
    assert_close(ours, plain)
    assert same_bits(ours, by_steps(task, workers=2).train(PLANS[plan], work))


def test_scores_are_those_of_the_plain_module() -> None:
    task = built_in("lenet5")
    rows = torch.arange(20).numpy()
    scorer = Evaluator(task)
    scorer.speaker.chain = None
    ours = scorer.score([task.start], rows, test=True)
    theirs = Evaluator(task, kernels=False).score([task.start], rows, test=True)
    assert ours[0] == theirs[0] and ours[1] == pytest.approx(theirs[1], abs=1e-6)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "cc 'x", "false"])
def test_without_a_compiler_pytorch_does_the_work(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CC", compiler)
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


def test_a_compiler_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AEDFL_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="no-such-processor"):
        native.compiled(("-march=no-such-processor",))
    assert not list(tmp_path.glob("kernels-*"))


def test_what_cannot_be_loaded_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AEDFL_CACHE", str(tmp_path))
    native.compiled(native.TARGETS[-1])
    (made,) = tmp_path.glob(f"kernels-*/{native.BINARY}")
    made.unlink()
    made.write_bytes(b"no library")
    assert native.compiled(native.TARGETS[-1]).conv_pool
    monkeypatch.setenv("CC", "cc -O1")
    native.compiled(native.TARGETS[-1])
    assert len(list(tmp_path.glob("kernels-*"))) == 2, "another command is another library"


def test_a_compiler_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(native, "SECONDS", 0.2)
    asked = []
    run = native._run
    monkeypatch.setattr(native, "_run", lambda *command: (asked.append(command), run(*command))[1])
    native.library.cache_clear()
    try:
        assert native.library() is None and len(asked) == 1
    finally:
        native.library.cache_clear()
