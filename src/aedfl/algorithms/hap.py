"""HAP: Yu, Yao, Gholami, Dong, Kim, Mahoney, Keutzer, *Hessian-aware pruning and optimal neural implant*, WACV 2022.

A channel's worth is its mean curvature times its size, `tr(H_cc)/|c| ||m_c||^2`, with the trace by Hutchinson's method;
the lowest of the whole network go, at most 95 % of a layer. Adapted: on AEDFL-0 each device prunes its own model
once, at a certain local update, on a sample of its data; the paper's low-rank implant is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import costs
from ..context import Context, Method, option
from ..placement import fitting
from ..randomness import Key, torch_seed
from ..sparsity import ChannelGroups
from ..sparsity.curvature import curvature, rademacher
from ..sparsity.objective import flat_loss
from ..sparsity.select import prune
from ..training.plan import Indices
from ._pruning import Cut, cut, outcome, prune_once
from ._state import State
from .aedfl import MESSAGES


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of HAP."""

    rate: float = option(0.4, "share of the prunable parameters that goes")
    probes: int = option(100, "random vectors behind the traces")
    samples: int = option(50, "samples that curvature is estimated on")
    update: int = option(30, "local updates before the cut")


CHUNK = 25
"""Probes that are multiplied at once, if there is room for so many."""


@dataclass(frozen=True)
class TraceCut(Cut):
    """Jobs are (vector, rows, key of the probes)."""

    rate: float
    probes: int

    def one(self, vector: Tensor, rows: Indices, key: tuple[Key, ...]) -> tuple[Tensor, ...]:
        task = self.task
        x, y = task.gather(torch.from_numpy(rows).to(task.device))
        m = vector[: task.layout.parameters]
        each = 4 * (2 * len(x) * task.spread + 3 * len(m))
        at = curvature(flat_loss(task.module, task.layout, x, y, task.loss, vector), m, fitting(each, CHUNK))
        probes = rademacher(torch_seed(*key, "probes"), (self.probes, len(m)), m.device)
        worth = sensitivity(m, probes, at.hessian(probes), task.filters)
        return outcome(task.filters, prune(worth, task.filters, self.rate, max_layer_share=0.95))


def sensitivity(m: Tensor, probes: Tensor, products: Tensor, groups: ChannelGroups) -> Tensor:
    """`tr(H_cc)/|c| ||m_c||^2` of every unit [count], from signs z [K, P] and products H z."""
    trace = groups.sums(probes * products).mean(0)
    return trace / groups.sizes * groups.sums(m**2)


async def device(ctx: Context, hyper: Hyper) -> None:
    async def cutter(ctx: Context, state: State) -> dict[str, Any]:
        rows = ctx.batch(hyper.samples, "curvature")
        op = TraceCut(ctx.task, hyper.rate, hyper.probes)
        flops = hyper.probes * costs.hessian_product(ctx.task.macs, len(rows))
        return await cut(ctx, state, op, rows, (ctx.index, ctx.update), flops=flops)

    await prune_once(ctx, hyper.update, cutter)


METHOD = Method(
    "hap", "AEDFL-0, channels of low curvature pruned once", Hyper(), device,
    paper="Yu et al., WACV 2022", messages=MESSAGES,
)  # fmt: skip
