"""The count of multiply-accumulates, against PyTorch's own counter of FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from aedfl.models import build, count_macs, example_input, layer_macs


def by_pytorch(module: nn.Module, x: Tensor) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module.eval()(x)
    return counter.get_total_flops() // 2 // len(x)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("lenet5", (3, 32, 32), 10),
        ("resnet8", (3, 32, 32), 10),
        ("vgg9", (3, 32, 32), 10),
        ("textcnn", (64,), 2),
        ("mlp", (1, 8, 8), 10),
        ("cnn", (1, 8, 8), 10),
    ],
)
def test_agrees_with_pytorch(name: str, shape: tuple[int, ...], classes: int) -> None:
    module = build(name, shape, classes)
    assert count_macs(module, shape) == by_pytorch(module, example_input(module, shape))


class Odd(nn.Module):
    """Strides, dilation, a depthwise layer, one layer called twice, a linear layer on a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, (3, 2), stride=2, dilation=(1, 2))
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.grouped = nn.Conv2d(6, 4, 1, groups=2)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.depthwise(self.first(x)))
        y: Tensor = self.linear(self.grouped(x).flatten(2).transpose(1, 2))
        return y


def test_unusual_layers() -> None:
    module, x = Odd(), torch.zeros(3, 2, 11, 13)
    assert count_macs(module, x) == by_pytorch(module, x)
    assert count_macs(module, x) == count_macs(module, (2, 11, 13))


def test_by_layer_and_without_side_effects() -> None:
    module = build("cnn", (1, 8, 8), 10).train()
    counts = layer_macs(module, (1, 8, 8))
    assert counts == {"conv1": 8 * 9 * 64, "conv2": 16 * 8 * 9 * 16, "fc": 64 * 32, "out": 320}
    assert module.training
    assert not any(layer._forward_hooks for layer in module.modules())


def test_an_embedding_is_free() -> None:
    assert count_macs(nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 2)), (4,)) == 4 * 5 * 2
