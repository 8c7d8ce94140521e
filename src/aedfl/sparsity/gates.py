"""Slopes of a network's outputs in the size of each unit, sample by sample, without a gradient per sample.

What a layer gives is proportional to its parameters: scaling a channel's weights and bias scales its output, and
scaling the weights that read a channel scales that input. So the slope along a unit's parameters is the slope along
scales ("gates") on its channels, one scale per sample, and a backward pass that never forms a weight's gradient
finds it for all samples at once. (The slope of a PReLU is left out.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from .groups import ChannelGroups
from .kinds import Side
from .objective import Objective
from .tables import positions

Gates = dict[tuple[str, Side], Tensor]
"""Scales [samples, channels] on a side of a layer."""
Pull = tuple[Tensor, Callable[..., tuple[Gates]]]


def unit_slopes(objective: Objective, m: Tensor, groups: ChannelGroups, weights: Tensor) -> Tensor:
    """Slopes of `weights` [K, B, C] times the outputs along (m ⊙ 1_c) for every unit c, [K, B, count]."""
    samples = len(objective.x)
    places = [
        (name, side, ids)
        for name, site in groups.sites.items()
        for side, ids in site.sides.items()
        if not isinstance(layer := objective.module.get_submodule(name), nn.PReLU)
        and getattr(layer, "weight", None) is not None
    ]
    ones: Gates = {(name, side): m.new_ones(samples, len(ids)) for name, side, ids in places}

    def outputs(gates: Gates) -> Tensor:
        with _gated(objective.module, gates):
            return objective.outputs(m, objective.x).reshape(samples, -1)

    _, pull = cast("Pull", vjp(outputs, ones))
    slopes = vmap(lambda weight: pull(weight, create_graph=False)[0])(weights)
    flat = [slopes[name, side] for name, side, _ in places]
    padded = torch.cat([*flat, weights.new_zeros(*weights.shape[:2], 1)], -1)
    return padded[..., positions(torch.cat([ids for *_, ids in places]), groups.count)].sum(-1)


@contextmanager
def _gated(module: nn.Module, gates: Mapping[tuple[str, Side], Tensor]) -> Iterator[None]:
    """While it lasts, the module's layers scale their inputs and outputs by the gates."""
    hooks = []
    for (name, side), gate in gates.items():
        layer = module.get_submodule(name)
        scale = _scaler(gate, isinstance(layer, nn.Linear | nn.Embedding))
        if side == "out":
            hooks.append(layer.register_forward_hook(lambda _l, _i, output, scale=scale: scale(output)))
        else:
            hooks.append(layer.register_forward_pre_hook(lambda _l, inputs, scale=scale: scale(inputs[0])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _scaler(gate: Tensor, last: bool) -> Callable[[Any], Tensor]:
    """Multiplies [B, channels, ...], or [B, ..., channels] where the channels come last."""

    def scale(value: Tensor) -> Tensor:
        extra = [1] * (value.dim() - 2)
        return value * gate.view(len(gate), *extra, -1) if last else value * gate.view(*gate.shape, *extra)

    return scale
