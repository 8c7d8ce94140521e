"""Finding the units of any module: Torch-Pruning's dependency graph says which channels hang together.

The graph is a good guess, not a proof: it takes an operation it does not know for an element-wise one. So
each layer is tried on random weights, and what cannot be taken out exactly is not offered for pruning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.func import functional_call

from aedfl.errors import UserError
from aedfl.layout import Layout
from aedfl.models.macs import layer_macs

from .groups import ChannelGroups, Site
from .kinds import Side, kind_of, together
from .physical import shrink

Slot = tuple[str, Side, int]
"""One channel of one side of one layer."""


@dataclass(frozen=True)
class Layer:
    """Units made by the same layers; a unit is the slots that go together."""

    name: str
    units: list[list[Slot]]


class Coupling:
    """Slots that hang together: a union-find forest, and for some slots the reason why they must stay."""

    def __init__(self) -> None:
        self._parent: dict[Slot, Slot] = {}
        self._stays: dict[Slot, str] = {}

    def find(self, slot: Slot) -> Slot:
        root = slot
        while (above := self._parent.setdefault(root, root)) != root:
            root = above
        while slot != root:
            self._parent[slot], slot = root, self._parent[slot]
        return root

    def join(self, one: Slot, other: Slot) -> None:
        self._parent[self.find(other)] = self.find(one)

    def stay(self, slot: Slot, reason: str) -> None:
        self._stays.setdefault(slot, reason)

    def sets(self) -> Iterator[tuple[list[Slot], str | None]]:
        """Every set of coupled slots, with a reason if it must stay."""
        members: dict[Slot, list[Slot]] = defaultdict(list)
        for slot in list(self._parent):
            members[self.find(slot)].append(slot)
        reasons = {self.find(slot): reason for slot, reason in self._stays.items()}
        for root, slots in members.items():
            yield slots, reasons.get(root)


def discover(module: nn.Module, example: Tensor) -> ChannelGroups:
    """See `ChannelGroups.of`."""
    twin = deepcopy(module).eval().requires_grad_(True)
    layers, skipped = _layers(twin, _couple(twin, example))
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


def _couple(module: nn.Module, example: Tensor) -> Coupling:
    """Traces the module and joins all slots that can only be pruned together."""
    graph = tp.DependencyGraph().build_dependency(module, (example,), verbose=False)
    names = {layer: name for name, layer in module.named_modules()}
    coupling = Coupling()
    for layer, name in names.items():
        kind = kind_of(layer)
        if kind is not None and kind.makes and layer in graph.module2node:
            prune = graph.get_pruner_of_module(layer).prune_out_channels
            channels = range(graph.get_out_channels(layer))
            for item in graph.get_pruning_group(layer, prune, list(channels)):
                _join(coupling, name, item, names, graph)
    return coupling


def _join(coupling: Coupling, root: str, item: Any, names: dict[nn.Module, str], graph: Any) -> None:
    """Joins the channels of one dependent layer to those of the root that they follow."""
    node, layer = item.dep.target, item.dep.target.module
    kind = kind_of(layer) if layer in names else None
    outward = graph.is_out_channel_pruning_fn(item.dep.handler)
    side: Side = "out" if outward or (kind is not None and not kind.mixes) else "in"
    for channel, origin in zip(item.idxs, item.root_idxs, strict=True):
        start: Slot = (root, "out", origin)
        coupling.find(start)
        if outward and not node.outputs:
            coupling.stay(start, "it is an output")
        if kind is not None:
            coupling.join(start, (names[layer], side, channel))
            size = together(layer)
            coupling.join(start, (names[layer], side, channel - channel % size))
        elif layer in names or isinstance(layer, nn.Parameter):
            coupling.stay(start, f"it feeds a {type(layer).__name__}, which cannot be narrowed")


def _layers(module: nn.Module, coupling: Coupling) -> tuple[list[Layer], dict[str, str]]:
    """The coupled sets as layers in the module's order, and the layers that must stay, with the reason."""
    order = {name: number for number, (name, _) in enumerate(module.named_modules())}
    makers = {name for name, layer in module.named_modules() if (kind := kind_of(layer)) and kind.makes}
    found: dict[str, list[list[Slot]]] = defaultdict(list)
    skipped: dict[str, str] = {}
    for slots, reason in coupling.sets():
        slots.sort(key=lambda slot: (order[slot[0]], slot[1], slot[2]))
        name = "+".join(dict.fromkeys(layer for layer, side, _ in slots if side == "out" and layer in makers))
        if reason is None:
            found[name].append(slots)
        else:
            skipped[name] = reason
    for name in [name for name, units in found.items() if len(units) < 2]:
        del found[name]
        skipped[name] = "all of its channels hang together"
    layers = [Layer(name, sorted(units, key=_first_made)) for name, units in found.items()]
    return sorted(layers, key=lambda layer: order[layer.units[0][0][0]]), skipped


def _first_made(unit: list[Slot]) -> tuple[int, ...]:
    return tuple(channel for _, side, channel in unit if side == "out")


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
