"""Simple scores of units, for the baselines: magnitude, and the rank of feature maps (HRank)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .groups import ChannelGroups


def magnitude(vector: Tensor, groups: ChannelGroups) -> Tensor:
    """Root-mean-square value of every unit's parameters, [..., count]; `vector` is [..., size]."""
    return (groups.sums(vector[..., : groups.layout.parameters] ** 2) / groups.sizes).sqrt()


def feature_ranks(
    module: nn.Module,
    groups: ChannelGroups,
    vector: Tensor,
    batches: Sequence[Tensor],
    tolerance: float = 1e-4,
) -> Tensor:
    """HRank (Lin et al., CVPR 2020): the mean matrix rank of every unit's feature maps, [count].

    Taken after a ReLU on the last layer that holds the unit's channels (the norm, where there is one),
    averaged over samples and channels, and divided by the largest rank that the map's shape allows, so that
    layers compare: 0 is dead, 1 is full. A neuron's map is 1x1, so its value is the share of samples that
    activate it; that of a sequence is one row.
    """
    twin = deepcopy(module).eval()
    groups.layout.load(twin, vector)
    found: dict[str, list[Tensor]] = {}
    for name in groups.sites:
        twin.get_submodule(name).register_forward_hook(_recorder(found, name, tolerance))
    with torch.no_grad():
        for x in batches:
            twin(x)
    ranks = torch.zeros(groups.count, device=groups.device)
    for name, values in found.items():
        holds = groups.sites[name].sides["out"] == torch.arange(groups.count, device=groups.device)[:, None]
        channels = holds.sum(-1)
        mean = holds.float() @ torch.stack(values).mean(0) / channels.clamp(min=1)
        ranks = torch.where(channels > 0, mean, ranks)
    return ranks


def _recorder(found: dict[str, list[Tensor]], name: str, tolerance: float) -> Any:
    def record(layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        last = isinstance(layer, nn.Linear | nn.Embedding)
        maps = F.relu(output.detach()).movedim(-1 if last else 1, 1)
        maps = maps.reshape(*maps.shape[:2], *([1] * max(0, 4 - maps.dim())), *maps.shape[2:])
        found.setdefault(name, []).append(_ranks(maps, tolerance).float().mean(0) / min(maps.shape[-2:]))

    return record


def _ranks(maps: Tensor, tolerance: float) -> Tensor:
    """Of each matrix [..., H, W]. A row's is known without decomposing it, which a GPU would do one by one."""
    if min(maps.shape[-2:]) == 1:
        return (maps != 0).any(-1).any(-1)
    ranks: Tensor = torch.linalg.matrix_rank(maps, rtol=tolerance)
    return ranks
