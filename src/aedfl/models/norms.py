"""The normalisation layers that image models choose from, and the initialisation that suits ReLU."""

from __future__ import annotations

from torch import nn

from aedfl.errors import UserError

from .options import whole

GROUP_CHANNELS = 4
"""Channels that share one group of a GroupNorm, and that are pruned together (see `aedfl.sparsity`)."""

NORMS = ("group", "batch", "none")


def norm(kind: str, channels: int, group_channels: int = GROUP_CHANNELS) -> nn.Module:
    """A normalisation over `channels` feature maps; `kind` is one of `NORMS`."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "none":
        return nn.Identity()
    if kind != "group":
        raise UserError(f"norm = {kind!r} is not known; allowed are {', '.join(NORMS)}")
    if channels % whole("group_channels", group_channels):
        raise UserError(f"group_channels = {group_channels} does not divide a layer of {channels} channels")
    return nn.GroupNorm(channels // group_channels, channels)


def kaiming(module: nn.Module) -> None:
    """He's initialisation, so that a deep ReLU network without normalisation trains from the first step."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
