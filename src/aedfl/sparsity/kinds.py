"""What pruning knows of a layer: which of its sides the dimensions of its tensors and its widths follow.

A layer has an output side and, where it mixes channels, an input side; every tensor dimension that follows a
side shrinks with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Side = Literal["out", "in"]
Sides = tuple[Side | None, ...]


@dataclass(frozen=True)
class Kind:
    """One type of layer."""

    tensors: Mapping[str, Sides]
    """For each parameter or buffer the sides of its leading dimensions; None for one that never shrinks."""
    widths: Mapping[str, Side]
    """Attributes that hold a number of channels."""
    mixes: bool = False
    """True where the two sides are different channels (a convolution); False where they are one (a norm)."""
    makes: bool = False
    """True where output channels begin: a unit is pruned only if such a layer makes it."""


_DENSE: dict[str, Sides] = {"weight": ("out", "in"), "bias": ("out",)}
_PLAIN: dict[str, Sides] = {"weight": ("out",), "bias": ("out",)}
_NORM: dict[str, Sides] = {**_PLAIN, "running_mean": ("out",), "running_var": ("out",)}

CONV = Kind(_DENSE, {"out_channels": "out", "in_channels": "in"}, mixes=True, makes=True)
DEPTHWISE = Kind(_PLAIN, {"out_channels": "out", "in_channels": "out", "groups": "out"})
LINEAR = Kind(_DENSE, {"out_features": "out", "in_features": "in"}, mixes=True, makes=True)
EMBEDDING = Kind({"weight": (None, "out")}, {"embedding_dim": "out"}, makes=True)
PER_CHANNEL_NORM = Kind(_NORM, {"num_features": "out"})
GROUP_NORM = Kind(_PLAIN, {"num_channels": "out"})
PRELU = Kind({"weight": ("out",)}, {"num_parameters": "out"})
TRANSPARENT = Kind({}, {})


def kind_of(layer: nn.Module) -> Kind | None:
    """How the layer shrinks; None for one that cannot, whose channels then stay."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if layer.groups == 1:
            return CONV
        return DEPTHWISE if layer.groups == layer.in_channels == layer.out_channels else None
    if isinstance(layer, nn.PReLU) and layer.num_parameters == 1:
        return TRANSPARENT
    for types, kind in _TYPES:
        if isinstance(layer, types):
            return kind
    return None


_TYPES: tuple[tuple[tuple[type[nn.Module], ...], Kind], ...] = (
    ((nn.Linear,), LINEAR),
    ((nn.Embedding,), EMBEDDING),
    ((_BatchNorm, _InstanceNorm), PER_CHANNEL_NORM),
    ((nn.GroupNorm,), GROUP_NORM),
    ((nn.PReLU,), PRELU),
)


def together(layer: nn.Module) -> int:
    """Neighbouring channels that are pruned as one, because the layer's statistics run over all of them."""
    return layer.num_channels // layer.num_groups if isinstance(layer, nn.GroupNorm) else 1
