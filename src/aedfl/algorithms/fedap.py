"""FedAP: Zhang, Liu, Jia, Zhou, Dai, Dou, *FedDUAP: Federated learning with dynamic update and adaptive pruning using
shared data on the server*, IJCAI 2022.

Every device has a rate of its own by the gap rule on its Hessian's spectrum. The rates are merged as
`p = sum_k v_k p_k / sum_k v_k`, `v_k = n_k / (D_k + 1e-4)`, where `D_k` is the Jensen-Shannon divergence of the
device's label shares from the overall ones. A threshold on all magnitudes at that rate gives each layer its share;
in each layer the filters whose feature maps have the lowest rank go.

Adapted: there is no server on AEDFL-0. Devices tell their out-neighbours how many samples of each label they hold, when
they begin, and their rate, when they prune; a device merges what its in-neighbours have told it by then, and
their labels and its own stand for all. The gap rule degenerates on real networks (it says nearly nothing, or nearly
all), so a device's own rate is bounded by `max_rate`. The server's shared data are not part of FedAP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import costs, forms
from ..context import Context, Method, option
from ..graph import Job, Op, Value
from ..randomness import Key, torch_seed
from ..sparsity import ChannelGroups
from ..sparsity.curvature import curvature, rademacher
from ..sparsity.lanczos import lanczos
from ..sparsity.objective import flat_loss
from ..sparsity.rate import gap_rate, lipschitz
from ..task import Task
from ..training.plan import Indices
from ._pruning import Cut, cut, lowest_go, outcome, prune_once
from ._state import State
from .aedfl import MESSAGES
from .hrank import batches, rank_flops, ranks_of


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedAP."""

    max_rate: float = option(0.5, "largest rate of a device's own")
    batches: int = option(5, "mini-batches that ranks are averaged over")
    samples: int = option(50, "samples that curvature is estimated on")
    lanczos_steps: int = option(16, "steps of Lanczos for the gap rule")
    update: int = option(30, "local updates before the cut")


@dataclass(frozen=True)
class Labels(Op):
    """Jobs are (rows,); the result is how many of them have each label, [classes]; [1] without classes."""

    task: Task
    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        classes = self.task.dataset.classes
        targets = self.task.dataset.train.y
        return [
            (torch.bincount(targets[rows], minlength=classes) if classes else torch.tensor([len(rows)]),)
            for (rows,) in jobs
        ]


@dataclass(frozen=True)
class GapRate(Op):
    """Jobs are (vector, initial, rows, key of the start vector); the result is the device's own rate []."""

    task: Task
    steps: int
    most: float
    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [(self._one(*job),) for job in jobs]

    def _one(self, vector: Tensor, initial: Tensor, rows: Indices, key: tuple[Key, ...]) -> Tensor:
        task, count = self.task, self.task.layout.parameters
        x, y = task.gather(torch.from_numpy(rows).to(task.device))
        loss = flat_loss(task.module, task.layout, x, y, task.loss, vector)
        at = curvature(loss, vector[:count])
        signs = rademacher(torch_seed(*key, "start"), (count,), vector.device)
        spectrum = lanczos(at.hessian, signs, self.steps)
        return gap_rate(spectrum, lipschitz(loss, vector[:count], initial[:count], at=at)).clamp(max=self.most)


@dataclass(frozen=True)
class AdaptiveCut(Cut):
    """Jobs are (vector, rows [batches, size], rates, their weights)."""

    def one(
        self, vector: Tensor, rows: Sequence[Indices], rates: Sequence[Tensor], weights: Sequence[float]
    ) -> tuple[Tensor, ...]:
        groups = self.task.filters
        merged = sum(w * float(rate) for w, rate in zip(weights, rates, strict=True)) / sum(weights)
        shares = layer_shares(vector, groups, merged)
        return outcome(groups, lowest_go(ranks_of(self.task, vector, rows), groups, shares))


def layer_shares(vector: Tensor, groups: ChannelGroups, rate: float) -> dict[str, float]:
    """The share of each layer's weights below the magnitude that cuts off `rate` of all prunable ones."""
    count = groups.layout.parameters
    size = vector[:count].abs()
    ordered = size[groups.prunable].sort().values
    number = int(rate * len(ordered))
    threshold = ordered[number - 1] if number else -1.0
    maker = groups.owners[0][:count]
    return {
        name: float((size[(maker >= units.start) & (maker < units.stop)] <= threshold).float().mean())
        for name, units in groups.layers.items()
    }


def divergence(counts: Sequence[float], overall: Sequence[float]) -> float:
    """Jensen-Shannon divergence of two label distributions, given as counts; at most log 2."""
    p, q = (np.asarray(c, dtype=float) / max(1e-12, sum(c)) for c in (counts, overall))
    middle = (p + q) / 2
    return float(sum(_entropy_gap(side, middle) for side in (p, q)) / 2)


def _entropy_gap(p: Any, q: Any) -> float:
    held = p > 0
    return float((p[held] * np.log(p[held] / q[held])).sum())


def importances(labels: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """`v_k = n_k / (D_k + 1e-4)` of every device whose label counts are known."""
    overall = np.sum([*labels.values()], axis=0)
    return {device: sum(counts) / (divergence(counts, overall) + 1e-4) for device, counts in labels.items()}


async def device(ctx: Context, hyper: Hyper) -> None:
    labels: dict[int, Sequence[float]] = {}
    rates: dict[int, Value] = {}
    ctx.spawn(listen(ctx, labels, rates))
    (counts,) = await ctx.compute(
        Labels(ctx.task), ctx.batch(ctx.samples, "labels"), flops=float(ctx.samples), purpose="pruning"
    )
    (labels[ctx.index],) = await ctx.read(counts)
    for other in ctx.out_neighbours:
        ctx.send(other, kind="labels", counts=tuple(labels[ctx.index]))

    async def cutter(ctx: Context, state: State) -> dict[str, Any]:
        rates[ctx.index] = await own_rate(ctx, hyper, state)
        for other in ctx.out_neighbours:
            ctx.send(other, kind="rate", rate=rates[ctx.index])
        worth = importances({k: counts for k, counts in labels.items() if len(counts) == len(labels[ctx.index])})
        known = [device for device in sorted(rates) if device in worth]
        rows = batches(ctx, hyper.batches)
        metrics = await cut(
            ctx, state, AdaptiveCut(ctx.task), rows, tuple(rates[k] for k in known), tuple(worth[k] for k in known),
            flops=rank_flops(ctx.task.macs, rows),
        )  # fmt: skip
        return metrics | {"raw_rate": rates[ctx.index]}

    await prune_once(ctx, hyper.update, cutter)


async def own_rate(ctx: Context, hyper: Hyper, state: State) -> Value:
    rows = ctx.batch(hyper.samples, "curvature")
    products = hyper.lanczos_steps + 5
    (rate,) = await ctx.compute(
        GapRate(ctx.task, hyper.lanczos_steps, hyper.max_rate),
        state.model.vector, ctx.initial().vector, rows, (ctx.index, ctx.update),
        flops=products * costs.hessian_product(ctx.task.macs, len(rows)), purpose="pruning",
    )  # fmt: skip
    return rate


async def listen(ctx: Context, labels: dict[int, Sequence[float]], rates: dict[int, Value]) -> None:
    """Notes what the in-neighbours tell, label counts first."""
    ctx.spawn(_hear(ctx, "labels", "counts", labels))
    await _hear(ctx, "rate", "rate", rates)


async def _hear(ctx: Context, kind: str, name: str, known: dict[int, Any]) -> None:
    while True:
        message = await ctx.wait(kind=kind)
        if message is not None and message.source in ctx.in_neighbours:
            known[message.source] = message.fields[name]


METHOD = Method(
    "fedap", "AEDFL-0, filters pruned at adaptive rates", Hyper(), device, paper="Zhang et al., IJCAI 2022",
    messages={
        **MESSAGES, "labels": forms.Form({"counts": forms.counts}, model=False),
        "rate": forms.Form({"rate": forms.share}, model=False),
    },
)  # fmt: skip
