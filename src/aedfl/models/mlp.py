"""A multilayer perceptron: for 8x8 digits, tables, examples and tests."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from torch import Tensor, nn
from torch.nn import functional as F

from .options import wholes


class MLP(nn.Module):
    """Flattens inputs [B, ...] of `features` numbers; one ReLU layer per entry of `hidden`."""

    def __init__(self, classes: int, features: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        widths = (features, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(before, width) for before, width in pairwise(widths))
        self.out = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        logits: Tensor = self.out(x)
        return logits


def mlp(classes: int, input_shape: tuple[int, ...] = (1, 8, 8), *, hidden: tuple[int, ...] = (64, 32)) -> MLP:
    """6.5 thousand MACs on 8x8 digits."""
    return MLP(classes, prod(input_shape), wholes("hidden", hidden))
