"""Which channels hang together, as Torch-Pruning's dependency graph of a traced module says."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from aedfl.errors import UserError

from .kinds import Side, kind_of, together

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


def find_layers(module: nn.Module, example: Tensor) -> tuple[list[Layer], dict[str, str]]:
    """The units by layer in the module's order, and the layers that must stay, each with the reason."""
    coupling = _couple(module, example)
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


def _couple(module: nn.Module, example: Tensor) -> Coupling:
    """Traces the module and joins all slots that can only be pruned together."""
    graph = _trace(module, example)
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


@cache
def _torch_pruning() -> Any:
    """Imported when it is needed, and without timm: it would import it, where it is installed, for counters that are
    not used here, and with it another thousand modules, which takes seconds."""
    hidden = "timm" not in sys.modules
    if hidden:
        sys.modules["timm"] = None  # type: ignore[assignment]
    try:
        import torch_pruning
    finally:
        if hidden:
            del sys.modules["timm"]
    return torch_pruning


def _trace(module: nn.Module, example: Tensor) -> Any:
    try:
        with torch.enable_grad():
            return _torch_pruning().DependencyGraph().build_dependency(module, (example,), verbose=False)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"model {type(module).__name__} cannot be traced for pruning: {text}") from error


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
        if kind is not None and kind.widths:
            coupling.join(start, (names[layer], side, channel))
            coupling.join(start, (names[layer], side, channel - channel % together(layer)))
        elif kind is None and (layer in names or isinstance(layer, nn.Parameter)):
            coupling.stay(start, f"it feeds a {type(layer).__name__}, which cannot be narrowed")
