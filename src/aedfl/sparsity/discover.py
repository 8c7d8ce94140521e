"""Finding the units of any module: what Torch-Pruning says hangs together, tried out.

Its dependency graph is a good guess, not a proof: an operation it does not know is taken for an element-wise
one. So each layer is tried on random weights, and what cannot be taken out exactly is not offered for pruning.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from aedfl.errors import UserError
from aedfl.layout import Layout
from aedfl.models.macs import layer_macs

from .coupling import Layer, find_layers
from .groups import ChannelGroups, Site
from .kinds import kind_of
from .physical import shrink


def discover(module: nn.Module, example: Tensor) -> ChannelGroups:
    """See `ChannelGroups.of`."""
    twin = deepcopy(module).eval().requires_grad_(True)
    layers, skipped = find_layers(twin, example)
    costs = layer_macs(twin, example)
    exact = []
    for layer in layers:
        if _removable(twin, _assemble(twin, [layer], costs, example.device), example):
            exact.append(layer)
        else:
            skipped[layer.name] = "taking its channels out changes the outputs"
    groups = _assemble(twin, exact, costs, example.device, skipped)
    if exact and not _removable(twin, groups, example):
        name = type(module).__name__
        raise UserError(f"model {name} cannot be pruned: its layers depend on each other's widths")
    return groups


def _assemble(
    module: nn.Module,
    layers: Sequence[Layer],
    costs: dict[str, int],
    device: torch.device,
    skipped: dict[str, str] | None = None,
) -> ChannelGroups:
    """Numbers the units and writes their numbers at every slot."""
    count = sum(len(layer.units) for layer in layers)
    sites: dict[str, Site] = {}
    slices: dict[str, slice] = {}
    number = 0
    for layer in layers:
        slices[layer.name] = slice(number, number + len(layer.units))
        for unit in layer.units:
            for name, side, channel in unit:
                if name not in sites:
                    sites[name] = _blank(module.get_submodule(name), count, device)
                sites[name].sides[side][channel] = number
            number += 1
    return ChannelGroups(Layout.of(module), slices, sites, costs, skipped or {}, device)


def _blank(layer: nn.Module, count: int, device: torch.device) -> Site:
    kind = kind_of(layer)
    assert kind is not None
    widths = {side: int(getattr(layer, width)) for width, side in kind.widths.items()}
    return Site(kind, {side: torch.full((n,), count, device=device) for side, n in widths.items()})


def _removable(module: nn.Module, groups: ChannelGroups, example: Tensor) -> bool:
    """Whether taking out every other unit does what masking it does, on random weights in float64."""
    generator = torch.Generator().manual_seed(0)
    vector, x = _random_vector(module, groups.layout, generator).to(example.device), example
    if x.is_floating_point():
        x = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    mask = groups.full()
    for units in groups.layers.values():
        mask[units][1::2] = False
    try:
        small = shrink(module, groups, vector, mask)
        with torch.no_grad():
            there = functional_call(module, groups.layout.views(vector * groups.expand(mask)), (x,))
            here = functional_call(small.module, small.layout.views(vector[small.index]), (x,))
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return False
    return there.shape == here.shape and bool(torch.allclose(there, here, rtol=1e-6, atol=1e-9))


def _random_vector(module: nn.Module, layout: Layout, generator: torch.Generator) -> Tensor:
    """The module's tensors with noise, so that no zero hides a difference; variances stay positive."""
    vector = layout.flatten(module).cpu().double()
    for entry in layout.entries:
        if entry.dtype.is_floating_point:
            part = vector[entry.offset : entry.end]
            part += 0.1 * torch.randn(part.shape, generator=generator, dtype=torch.float64)
            if not entry.trainable:
                part.abs_()
    return vector
