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
    amounts: Tensor | None = None,
) -> Tensor:
    """The mask [..., count] that removes the units of lowest `scores` [..., count].

    Units go one after the other until the removed share of the prunable parameters reaches `rate` [...]. A
    layer keeps its best `keep_min` units and never loses more than `max_layer_share` of them; where that
    stops it, less than `rate` is removed. All units are candidates, so one that was pruned before comes back
    if its score says so. Of equal scores the lower number goes first; one that is not a number goes last.
    With `amounts` [layout.parameters] the rate is a share of what these sum to over the prunable parameters,
    and the units of lowest score per amount go.
    """
    if amounts is None:
        each = groups.prunable.long()
    else:
        each = amounts * groups.prunable
        scores = scores / groups.sums(each.float()).clamp(min=torch.finfo(torch.float32).tiny)
    scores = scores.nan_to_num(torch.inf, posinf=torch.inf)
    safe = _protected(scores, groups, keep_min, max_layer_share)
    rank = _ranks(scores, safe)
    goal = torch.as_tensor(rate, dtype=torch.float64, device=scores.device) * each.sum()
    number = (_gone(rank, groups, each) < goal[..., None]).sum(-1, keepdim=True)
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


def _gone(rank: Tensor, groups: ChannelGroups, each: Tensor) -> Tensor:
    """What is removed once the first 0, 1, …, count units have gone, int64 [..., count + 1].

    A parameter, which counts as `each` says, goes with the first of its two units.
    """
    never = rank.new_full((*rank.shape[:-1], 1), groups.count)
    turns = torch.cat([rank, never], -1)
    first, second = (owner[: groups.layout.parameters] for owner in groups.owners)
    turn = torch.minimum(turns[..., first], turns[..., second])
    counts = each.new_zeros(*rank.shape[:-1], groups.count + 1)
    counts = counts.scatter_add(-1, turn, each.expand(turn.shape))
    return torch.cat([torch.zeros_like(counts[..., :1]), counts[..., :-1].cumsum(-1)], -1)
