"""Channel groups: what structured pruning removes, written on the flat vector.

A *unit* is an output channel or neuron with everything coupled to it: its bias, its norm, the next layer's
inputs, its partners across a residual connection, its block of a flattened feature map. Masking a unit and
taking it out give the same outputs. That is why the channels that share one group of a GroupNorm are one
unit: the norm's statistics run over the whole group, so a zeroed channel would still be counted in the
others' mean and variance, while a zeroed group is on its own and stays zero. One channel per group (instance
norm) would be exact as well, but it erases every channel's mean; groups of a few channels keep most of
GroupNorm's strength.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from aedfl.layout import Entry, Layout

from .kinds import Kind, Side
from .tables import Products, SegmentTable


@dataclass(frozen=True)
class Site:
    """A layer that pruning touches: for each channel of a side its unit's number; `count` = never pruned."""

    kind: Kind
    sides: Mapping[Side, Tensor]


@dataclass(frozen=True, eq=False)
class ChannelGroups:
    """The prunable units 0 … count-1 of a module, layer by layer. Masks are bool [..., count], True: kept."""

    layout: Layout
    layers: Mapping[str, slice]
    """Units of each layer. Layers that share their channels are one, named 'a+b'."""
    sites: Mapping[str, Site]
    costs: Mapping[str, int]
    """Multiply-accumulates per layer name and sample, unpruned."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Layers whose channels stay, each with the reason."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, module: nn.Module, example: Tensor) -> ChannelGroups:
        """The units of any module, found by tracing it on `example` (an input with its batch dimension).

        Units that could not be taken out without changing the function, as a run on random weights shows,
        are left out and named in `skipped`.
        """
        from .discover import discover  # it builds on this class

        return discover(module, example)

    @property
    def count(self) -> int:
        """Number of units."""
        return max((units.stop for units in self.layers.values()), default=0)

    def to(self, device: torch.device | str) -> ChannelGroups:
        """The same units with their index tensors on another device."""
        moved = {
            name: Site(site.kind, {side: ids.to(device) for side, ids in site.sides.items()})
            for name, site in self.sites.items()
        }
        return replace(self, sites=moved, device=torch.device(device))

    def without(self, *layers: str) -> ChannelGroups:
        """The groups in which the units of these layers are none: they stay, whatever goes."""
        if not layers:
            return self
        slices: dict[str, slice] = {}
        numbers: list[int] = []
        for name, units in self.layers.items():
            if name not in layers:
                slices[name] = slice(len(numbers), len(numbers) + units.stop - units.start)
                numbers.extend(range(units.start, units.stop))
        new = torch.full((self.count + 1,), len(numbers), device=self.device)
        new[numbers] = torch.arange(len(numbers), device=self.device)
        sites = {
            name: Site(site.kind, {side: new[ids] for side, ids in site.sides.items()})
            for name, site in self.sites.items()
        }
        reasons = dict.fromkeys(layers, "not asked for")
        return replace(self, layers=slices, sites=sites, skipped={**self.skipped, **reasons})

    def full(self, *lead: int) -> Tensor:
        """The mask that keeps everything, bool [*lead, count]."""
        return torch.ones(*lead, self.count, dtype=torch.bool, device=self.device)

    def follows(self, entry: Entry) -> dict[int, Tensor]:
        """Which dimensions of a tensor shrink, each with the unit of every index along it."""
        layer, _, tensor = entry.name.rpartition(".")
        if layer not in self.sites:
            return {}
        site = self.sites[layer]
        sides = enumerate(site.kind.tensors.get(tensor, ()))
        return {dim: site.sides[side] for dim, side in sides if side is not None}

    @cached_property
    def owners(self) -> tuple[Tensor, Tensor]:
        """Two units of every entry of the flat vector [size], by its first and second shrinking dimension.

        `count` stands for none; an entry whose two dimensions name the same unit has it once.
        """
        both = torch.full((2, self.layout.size), self.count, dtype=torch.int64, device=self.device)
        for entry in self.layout.entries:
            for row, (dim, ids) in enumerate(self.follows(entry).items()):
                shape = [1] * len(entry.shape)
                shape[dim] = -1
                both[row, entry.offset : entry.end] = ids.view(shape).expand(entry.shape).reshape(-1)
        first, second = both
        return first, second.where(second != first, self.count)

    def expand(self, mask: Tensor) -> Tensor:
        """The mask per entry of the flat vector, bool [..., size]: kept where all of its units are kept."""
        kept = torch.cat([mask, mask.new_ones(*mask.shape[:-1], 1)], -1)
        first, second = self.owners
        return kept[..., first] & kept[..., second]

    @cached_property
    def prunable(self) -> Tensor:
        """Trainable entries that belong to a unit, bool [layout.parameters]."""
        first, second = (owner[: self.layout.parameters] for owner in self.owners)
        return (first < self.count) | (second < self.count)

    @cached_property
    def _segments(self) -> SegmentTable:
        return SegmentTable.of(self.layout, self.follows, self.owners, self.count)

    def sums(self, values: Tensor) -> Tensor:
        """Sum of `values` [..., layout.parameters] over every unit's entries, [..., count].

        An entry counts for both of its units. The order of summation is fixed, so the result is the same bit
        for bit every time, on a GPU too, which `index_add` would not promise.
        """
        return self._segments.sums(values)

    def spread(self, values: Tensor) -> Tensor:
        """For every trainable entry the sum of its units' `values` [..., count]: [..., layout.parameters].

        The transpose of `sums`; of a one-hot vector it is that unit's indicator.
        """
        padded = torch.cat([values, values.new_zeros(*values.shape[:-1], 1)], -1)
        first, second = (owner[: self.layout.parameters] for owner in self.owners)
        return padded[..., first] + padded[..., second]

    @cached_property
    def sizes(self) -> Tensor:
        """Trainable entries of every unit, float32 [count]."""
        return self.sums(torch.ones(self.layout.parameters, device=self.device))

    @cached_property
    def _products(self) -> Products:
        return Products.of([self.follows(e) for e in self.layout.entries], self.count, self.device)

    def _weights(self, amounts: list[float]) -> Tensor:
        return torch.tensor(amounts, dtype=torch.float64, device=self.device)

    @cached_property
    def _entry_amounts(self) -> Tensor:
        return self._weights([float(prod(e.shape)) for e in self.layout.entries])

    @cached_property
    def _mac_amounts(self) -> Tensor:
        weights = {f"{layer}.weight" if layer else "weight": macs for layer, macs in self.costs.items()}
        return self._weights([float(weights.get(e.name, 0)) for e in self.layout.entries])

    @cached_property
    def entry_macs(self) -> Tensor:
        """Multiply-accumulates per sample that go with each trainable entry, int64 [layout.parameters]."""
        counts = torch.tensor([prod(e.shape) for e in self.layout.entries], device=self.device)
        return (self._mac_amounts / counts).round().long().repeat_interleave(counts)[: self.layout.parameters]

    def kept_entries(self, mask: Tensor) -> Tensor:
        """Entries of the flat vector that are kept, buffers included: what a message carries. int64 [...]."""
        return self._products.total(mask, self._entry_amounts).round().long()

    def kept_parameters(self, mask: Tensor) -> Tensor:
        """Trainable entries that are kept, int64 [...]."""
        trainable = self._weights([float(e.trainable) for e in self.layout.entries])
        return self._products.total(mask, self._entry_amounts * trainable).round().long()

    def macs(self, mask: Tensor) -> Tensor:
        """Multiply-accumulates of one sample's forward pass through the smaller network, float64 [...].

        A layer's cost is proportional to its kept outputs times its kept inputs; no network is built.
        """
        return self._products.total(mask, self._mac_amounts).round()

    def kept_units(self, mask: Tensor) -> dict[str, Tensor]:
        """Kept units of each layer, int64 [...]."""
        return {name: mask[..., units].sum(-1) for name, units in self.layers.items()}
