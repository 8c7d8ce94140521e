"""Pruned networks for real: smaller modules, and the way between their vectors and the full one."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aedfl.layout import Layout

from .groups import ChannelGroups, Site
from .kinds import together


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A smaller network. `index` gives for each entry of its flat vector the place in the full one."""

    module: nn.Module
    layout: Layout
    index: Tensor


def shrink(module: nn.Module, groups: ChannelGroups, vector: Tensor, mask: Tensor) -> Shrunk:
    """The network without the units that `mask` [count] removes, holding the kept values of `vector` [size].

    Its outputs equal those of the full module with `vector * groups.expand(mask)`. `module` stays as it is.
    """
    small = _structure(module, groups, mask)
    small.layout.load(small.module, vector[small.index])
    return small


def grow(small: Tensor, index: Tensor, full: Tensor) -> Tensor:
    """A copy of the full vector(s) [..., size] with the kept entries replaced by `small` [..., kept]."""
    return full.index_copy(-1, index, small)


class Shrinker:
    """`shrink` for one module, remembering the structures of the last masks it saw."""

    def __init__(self, module: nn.Module, groups: ChannelGroups, capacity: int = 64) -> None:
        self._module, self._groups, self._capacity = module, groups, capacity
        self._seen: OrderedDict[bytes, Shrunk] = OrderedDict()

    def shrink(self, vector: Tensor, mask: Tensor) -> Shrunk:
        """As the function; every call gives a module of its own, the layout and index are shared."""
        key = bytes(mask.to("cpu", torch.uint8).tolist())
        if key not in self._seen:
            self._seen[key] = _structure(self._module, self._groups, mask)
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        known = self._seen[key]
        module = deepcopy(known.module)
        known.layout.load(module, vector[known.index])
        return Shrunk(module, known.layout, known.index)


def _structure(module: nn.Module, groups: ChannelGroups, mask: Tensor) -> Shrunk:
    kept = torch.cat([mask, mask.new_ones(1)])
    small = deepcopy(module)
    for name, site in groups.sites.items():
        _narrow(small.get_submodule(name), site, kept)
    return Shrunk(small, Layout.of(small), groups.expand(mask).nonzero().squeeze(1))


def _narrow(layer: nn.Module, site: Site, kept: Tensor) -> None:
    """Takes the removed channels out of one layer, in place."""
    per_group = together(layer)
    for tensor, sides in site.kind.tensors.items():
        value = getattr(layer, tensor, None)
        if value is None:
            continue
        data = value.detach()
        for dim, side in enumerate(sides):
            if side is not None:
                data = data.index_select(dim, kept[site.sides[side]].nonzero().squeeze(1).to(data.device))
        trained = isinstance(value, nn.Parameter)
        setattr(layer, tensor, nn.Parameter(data, value.requires_grad) if trained else data)
    for width, side in site.kind.widths.items():
        setattr(layer, width, int(kept[site.sides[side]].sum()))
    if isinstance(layer, nn.GroupNorm):
        layer.num_groups = layer.num_channels // per_group
