"""Dropout whose mask is a function of a key, so that it does not depend on the back end or on the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MULTIPLY = (-7046029254386353131, -4417276706812531889)
_LAYER = 7640891576956012809


class Dropout(nn.Module):
    """As `nn.Dropout`, but the numbers come from hashing `key` (set before each step) and the element's place."""

    def __init__(self, p: float, channels: bool, layer: int) -> None:
        super().__init__()
        self.p = p
        self.channels = channels
        self.layer = layer
        self.key: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0 or self.key is None:
            return x
        return x * keep(self, x.shape, self.key).to(x.dtype) / (1 - self.p or 1.0)


def keep(layer: Dropout, shape: torch.Size, key: Tensor) -> Tensor:
    """Which elements of an activation of that shape stay; whole channels where the layer drops channels."""
    wanted = shape[:2] + (1,) * (len(shape) - 2) if layer.channels else shape
    place = torch.arange(int(torch.Size(wanted).numel()), device=key.device).view(wanted)
    return _uniform(place, key + layer.layer * _LAYER) >= layer.p


def _uniform(place: Tensor, key: Tensor) -> Tensor:
    """Numbers in [0, 1) by mixing the bits of place and key twice; 64-bit products wrap around."""
    bits = place * _MULTIPLY[0] + key
    for factor in _MULTIPLY:
        bits = (bits ^ (bits >> 29)) * factor
    return ((bits >> 33) & 0xFFFFFF).float() / 2**24


def keyed(module: nn.Module) -> nn.Module:
    """Replaces `nn.Dropout` layers of the module by keyed ones, in place, and returns it."""
    counter = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
                counter += 1
                setattr(parent, name, Dropout(child.p, not isinstance(child, nn.Dropout), counter))
    return module


def dropouts(module: nn.Module) -> list[Dropout]:
    return [layer for layer in module.modules() if isinstance(layer, Dropout)]
