"""HRank: Lin, Ji, Wang, Zhang, Zhang, Tian, Shao, *HRank: Filter pruning using high-rank feature map*, CVPR 2020.

Filters whose feature maps have a low rank, averaged over a few batches, carry little and go: the same share of every
layer. Adapted: on AEDFL-0 each device prunes its own model once, at a certain local update; what follows
takes the place of the paper's fine-tuning. A neuron's map is 1x1; its rank is 1 where it is active.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import costs
from ..context import Context, Method, option
from ..sparsity.scores import feature_ranks
from ..task import Task
from ..training.plan import Indices
from ._pruning import Cut, cut, lowest_go, outcome, prune_once
from ._state import State
from .aedfl import MESSAGES


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of HRank."""

    rate: float = option(0.4, "share of every layer's filters that goes")
    batches: int = option(5, "mini-batches that ranks are averaged over")
    update: int = option(30, "local updates before the cut")


@dataclass(frozen=True)
class RankCut(Cut):
    """Jobs are (vector, rows [batches, size])."""

    rate: float

    def one(self, vector: Tensor, rows: Sequence[Indices]) -> tuple[Tensor, ...]:
        groups = self.task.filters
        ranks = ranks_of(self.task, vector, rows)
        return outcome(groups, lowest_go(ranks, groups, dict.fromkeys(groups.layers, self.rate)))


def ranks_of(task: Task, vector: Tensor, rows: Sequence[Indices]) -> Tensor:
    """The mean rank of every unit's feature maps over these mini-batches, [count]."""
    batches = [task.gather(torch.from_numpy(part).to(task.device))[0] for part in rows]
    return feature_ranks(task.module, task.filters, vector, batches)


def batches(ctx: Context, count: int) -> tuple[Indices, ...]:
    """So many mini-batches of the device's samples, fewer if it has not that many."""
    size = ctx.plan().batch_size
    rows = ctx.batch(count * size, "ranks")
    return tuple(rows[begin : begin + size] for begin in range(0, len(rows), size))


def rank_flops(macs: float, rows: Sequence[Indices]) -> float:
    """A forward pass, and about as much again for the decompositions of the maps."""
    return 2 * costs.forward(macs, sum(len(part) for part in rows))


async def device(ctx: Context, hyper: Hyper) -> None:
    async def cutter(ctx: Context, state: State) -> dict[str, Any]:
        rows = batches(ctx, hyper.batches)
        return await cut(ctx, state, RankCut(ctx.task, hyper.rate), rows, flops=rank_flops(ctx.task.macs, rows))

    await prune_once(ctx, hyper.update, cutter)


METHOD = Method(
    "hrank", "AEDFL-0, filters of low rank pruned once", Hyper(), device,
    paper="Lin et al., CVPR 2020", messages=MESSAGES,
)  # fmt: skip
