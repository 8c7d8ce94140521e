"""ResNet-8: He et al.'s CIFAR network (2016) with one basic block per stage of 16, 32 and 64 channels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .norms import GROUP_CHANNELS, kaiming, norm


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, width: int, stride: int, kind: str, group_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(kind, width, group_channels)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(kind, width, group_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), norm(kind, width, group_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet8(nn.Module):
    """Inputs [B, channels, S, S] of any S from 4 on: the last feature maps are averaged."""

    def __init__(self, classes: int, channels: int, kind: str, group_channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = norm(kind, 16, group_channels)
        self.block1 = Block(16, 16, 1, kind, group_channels)
        self.block2 = Block(16, 32, 2, kind, group_channels)
        self.block3 = Block(32, 64, 2, kind, group_channels)
        self.out = nn.Linear(64, classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.block3(self.block2(self.block1(x)))
        logits: Tensor = self.out(x.mean((2, 3)))
        return logits


def resnet8(
    classes: int,
    channels: int = 3,
    size: int = 32,
    *,
    norm: str = "group",
    group_channels: int = GROUP_CHANNELS,
) -> ResNet8:
    """12.5 MMACs on 32x32x3 with 10 classes. `norm` is group, batch or none.

    `size` changes nothing but the cost. A GroupNorm's group has `group_channels` channels everywhere.
    """
    return ResNet8(classes, channels, norm, group_channels)
