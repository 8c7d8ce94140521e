"""Every built-in model: its size, its cost, and that it runs under the transforms that the library uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from aedfl.layout import Layout
from aedfl.models import build, count_macs

CASES: list[tuple[str, tuple[int, ...], int, dict[str, Any], int, int]] = [
    ("lenet5", (1, 28, 28), 26, {}, 282_984, 45_786),
    ("lenet5", (3, 32, 32), 10, {}, 651_720, 62_006),
    ("resnet8", (3, 32, 32), 10, {}, 12_501_632, 78_042),
    ("resnet8", (3, 32, 32), 10, {"norm": "batch"}, 12_501_632, 78_723),
    ("resnet8", (3, 64, 64), 200, {}, 50_016_768, 90_392),
    ("vgg9", (3, 32, 32), 10, {}, 34_064_896, 874_858),
    ("vgg9", (3, 64, 64), 200, {}, 136_103_936, 2_496_552),
    ("textcnn", (256,), 2, {}, 4_854_592, 1_019_490),
    ("mlp", (1, 8, 8), 10, {}, 6_464, 6_570),
    ("cnn", (1, 8, 8), 10, {}, 25_408, 3_658),
]
IDS = [f"{name}-{shape[-1]}{''.join(options.values())}" for name, shape, _, options, *_ in CASES]
SMALL = [case for case in CASES if case[1][-1] != 64]
SMALL_IDS = [name for name, case in zip(IDS, CASES, strict=True) if case[1][-1] != 64]


def samples(name: str, shape: tuple[int, ...], count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if name == "textcnn":
        return torch.randint(0, 10_000, (count, *shape), generator=generator)
    return torch.randn(count, *shape, generator=generator)


@pytest.mark.parametrize(("name", "shape", "classes", "options", "macs", "size"), CASES, ids=IDS)
def test_size_and_cost(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], macs: int, size: int
) -> None:
    module = build(name, shape, classes, **options)
    assert count_macs(module, shape) == macs
    assert Layout.of(module).size == size
    assert module(samples(name, shape, 2)).shape == (2, classes)


def test_costs_are_those_of_the_paper() -> None:
    assert round(count_macs(build("lenet5", (1, 28, 28), 26), (1, 28, 28)) / 1e6, 3) == 0.283
    assert round(count_macs(build("lenet5", (3, 32, 32), 10), (3, 32, 32)) / 1e6, 3) == 0.652
    assert round(count_macs(build("resnet8", (3, 32, 32), 10), (3, 32, 32)) / 1e6, 1) == 12.5


def test_words_start_far_apart() -> None:
    """With embeddings of a tenth of this length, a thousand steps of plain SGD bring little more than chance."""
    weight = next(build("textcnn", (256,), 2, seed=0, vocabulary=2_000).parameters())
    assert weight.shape == (2_000, 50)
    assert weight.std().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("name", "shape", "classes", "options", "macs", "size"), SMALL, ids=SMALL_IDS)
def test_gradients_of_many_models_at_once_are_those_of_each(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], macs: int, size: int
) -> None:
    module = build(name, shape, classes, seed=1, **options).eval()
    layout = Layout.of(module)
    buffers = layout.flatten(module)[layout.parameters :]
    stack = torch.stack([layout.flatten(build(name, shape, classes, seed=s, **options)) for s in (2, 3)])
    x = torch.stack([samples(name, shape, 3, s) for s in (4, 5)])
    y = torch.tensor([[0, 1, 1], [1, 0, 1]])

    def loss(vector: Tensor, x: Tensor, y: Tensor) -> Tensor:
        named = layout.views(torch.cat([vector, buffers]))
        return F.cross_entropy(functional_call(module, named | dict(module.named_buffers()), (x,)), y)

    together = vmap(grad(loss))(stack[:, : layout.parameters], x, y)
    for row in range(2):
        alone = grad(loss)(stack[row, : layout.parameters], x[row], y[row])
        torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "shape", "classes", "options", "macs", "size"), SMALL, ids=SMALL_IDS)
def test_one_graph_without_breaks(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, Any], macs: int, size: int
) -> None:
    """A break would mean control flow on data, which neither a CUDA graph nor `vmap` can follow."""
    module = build(name, shape, classes, seed=1, **options).eval()
    x = samples(name, shape, 2)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("name", ["resnet8", "vgg9"])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    """With plain SGD at the paper's learning rate, and without any norm in VGG-9."""
    module = build(name, (3, 16, 16), 4, seed=0)
    y = torch.arange(32) % 4
    x = samples(name, (3, 16, 16), 32) + F.one_hot(y, 4)[:, :3, None, None] * 2.0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.03)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_group_norm_has_groups_of_equal_width() -> None:
    norms = [m for m in build("resnet8", (3, 32, 32), 10).modules() if isinstance(m, nn.GroupNorm)]
    assert norms
    assert {norm.num_channels // norm.num_groups for norm in norms} == {4}
