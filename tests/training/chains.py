"""Chains of any size to try."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aedfl.training.chain import Chain, Recipe


class Text(nn.Module):
    """A text network of any size, written in another way than the built-in one."""

    def __init__(self, words: int, channels: int, branches: list[tuple[int, int]], bias: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(words, channels)
        self.lines = nn.ModuleList(nn.Conv1d(channels, filters, width, bias=bias) for filters, width in branches)
        self.out = nn.Linear(sum(filters for filters, _ in branches), 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.table(x).transpose(-1, 1)
        found = [torch.relu(line(turned)).amax(-1) for line in self.lines]
        logits: Tensor = self.out(torch.cat(found[::-1], dim=1) if len(found) > 1 else found[0])
        return logits


def images(size: tuple[int, int, int], convolutions: list[tuple[int, int, int]], dense: list[int]) -> nn.Sequential:
    """Convolutions of so many filters, with kernels and padding, then dense layers of so many neurons."""
    channels, high, wide = size
    layers: list[nn.Module] = []
    for filters, kernel, padding in convolutions:
        layers += [nn.Conv2d(channels, filters, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU()]
        channels, high, wide = filters, (high + 2 * padding - kernel + 1) // 2, (wide + 2 * padding - kernel + 1) // 2
    layers.append(nn.Flatten())
    sizes = [channels * high * wide, *dense]
    for before, width in zip(sizes, dense, strict=False):
        layers += [nn.Linear(before, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4))


def chain_of(module: nn.Module, inputs: tuple[int, ...]) -> Chain:
    recipe = Recipe.of(module)
    found = recipe and recipe.chain(module, inputs)
    assert found
    return found
