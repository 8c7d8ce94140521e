"""Which units go: the lowest scores, until the wanted share of parameters is gone."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from .groups import ChannelGroups


def prune(
    scores: Tensor,
    groups: ChannelGroups,
    rate: Tensor | float,
    keep_min: int = 1,
    max_layer_share: float = 0.95,
) -> Tensor:
    """The mask [..., count] that removes the units of lowest `scores` [..., count].

    Units go one after the other until the removed share of the prunable parameters reaches `rate` [...]. A
    layer keeps its best `keep_min` units and never loses more than `max_layer_share` of them; where that
    stops it, less than `rate` is removed. All units are candidates, so one that was pruned before comes back
    if its score says so. Of equal scores the lower number goes first; one that is not a number goes last.
    """
    scores = scores.nan_to_num(torch.inf, posinf=torch.inf)
    safe = _protected(scores, groups, keep_min, max_layer_share)
    rank = _ranks(scores, safe)
    goal = torch.as_tensor(rate, dtype=torch.float64, device=scores.device) * groups.prunable.sum()
    number = (_gone(rank, groups) < goal[..., None]).sum(-1, keepdim=True)
    return (rank >= number) | safe


def _protected(scores: Tensor, groups: ChannelGroups, keep_min: int, max_layer_share: float) -> Tensor:
    """The best units of each layer, which stay whatever the rate; bool [..., count]."""
    safe = torch.zeros_like(scores, dtype=torch.bool)
    for units in groups.layers.values():
        width = units.stop - units.start
        kept = min(width, max(keep_min, ceil((1 - max_layer_share) * width - 1e-9)))
        best = scores[..., units].sort(dim=-1, stable=True).indices[..., width - kept :]
        safe[..., units] = safe[..., units].scatter(-1, best, True)
    return safe


def _ranks(scores: Tensor, safe: Tensor) -> Tensor:
    """At which turn each unit goes, 0 first; protected ones come after all others. int64 [..., count]"""
    order = scores.sort(dim=-1, stable=True).indices
    late = safe.gather(-1, order).sort(dim=-1, stable=True).indices
    order = order.gather(-1, late)
    turns = torch.arange(scores.shape[-1], device=scores.device).expand(order.shape)
    return torch.zeros_like(order).scatter(-1, order, turns)


def _gone(rank: Tensor, groups: ChannelGroups) -> Tensor:
    """Parameters removed once the first 0, 1, …, count units have gone, int64 [..., count + 1].

    A parameter goes with the first of its two units.
    """
    never = rank.new_full((*rank.shape[:-1], 1), groups.count)
    turns = torch.cat([rank, never], -1)
    first, second = (owner[: groups.layout.parameters] for owner in groups.owners)
    turn = torch.minimum(turns[..., first], turns[..., second])
    counts = rank.new_zeros(*rank.shape[:-1], groups.count + 1)
    counts = counts.scatter_add(-1, turn, torch.ones_like(turn))
    return torch.cat([torch.zeros_like(never), counts[..., :-1].cumsum(-1)], -1)
