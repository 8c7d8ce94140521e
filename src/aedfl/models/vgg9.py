"""VGG-9: six 3x3 convolutions and three fully connected layers, after Simonyan and Zisserman (2015)."""

from __future__ import annotations

from torch import Tensor, nn

from .norms import GROUP_CHANNELS, kaiming, norm

WIDTHS = (16, 32, 64, 64, 128, 128)


class VGG9(nn.Module):
    """Inputs [B, channels, size, size]; pooling follows the 2nd, 4th and 6th convolution."""

    def __init__(self, classes: int, channels: int, size: int, kind: str, group_channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, (before, width) in enumerate(zip((channels, *WIDTHS), WIDTHS, strict=False), 1):
            layers += [nn.Conv2d(before, width, 3, padding=1), norm(kind, width, group_channels), nn.ReLU()]
            if number % 2 == 0:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*[layer for layer in layers if not isinstance(layer, nn.Identity)])
        self.fc1 = nn.Linear(WIDTHS[-1] * (size // 8) ** 2, 256)
        self.fc2 = nn.Linear(256, 256)
        self.out = nn.Linear(256, classes)
        kaiming(self)
        # All classes begin alike: as sure as He's initialisation makes them, the mean of a fleet's models overflowed.
        nn.init.normal_(self.out.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(1)
        x = self.fc2(self.fc1(x).relu()).relu()
        logits: Tensor = self.out(x)
        return logits


def vgg9(
    classes: int,
    channels: int = 3,
    size: int = 32,
    *,
    norm: str = "none",
    group_channels: int = GROUP_CHANNELS,
) -> VGG9:
    """34 MMACs on 32x32x3. `norm` is none, group or batch; `group_channels` as in ResNet-8."""
    return VGG9(classes, channels, size, norm, group_channels)
