"""A small convolutional network: for 8x8 digits, examples and tests."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .options import whole, wholes


class CNN(nn.Module):
    """Two padded 3x3 convolutions with pooling, one ReLU layer. Inputs [B, channels, size, size]."""

    def __init__(self, classes: int, channels: int, size: int, widths: tuple[int, int], hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.conv2 = nn.Conv2d(widths[0], widths[1], 3, padding=1)
        self.fc = nn.Linear(widths[1] * (size // 4) ** 2, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU after pooling: the same numbers for a quarter of the work.
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.out(F.relu(self.fc(x.flatten(1))))
        return logits


def cnn(classes: int, channels: int = 1, size: int = 8, *, widths: tuple[int, int] = (8, 16), hidden: int = 32) -> CNN:
    """25 thousand MACs on 8x8 digits."""
    first, second = wholes("widths", widths, 2)
    return CNN(classes, channels, size, (first, second), whole("hidden", hidden))
