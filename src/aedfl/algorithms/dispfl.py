"""DisPFL: Dai, Shen, He, Tian, Tao, *DisPFL: Towards communication-efficient personalized federated learning via
decentralized sparse training*, ICML 2022.

Every device has a mask of its own (per parameter, Erdős-Rényi-Kernel densities, half of all parameters). In a round
it sends its model and mask to its out-neighbours, takes for each parameter the mean over those of its
in-neighbours and itself that hold it (0 where nobody does), applies its own mask, and trains. Then in every layer it
drops the share `alpha/2 (1 + cos(pi t/T))` of the kept weights that is smallest, and lets as many grow where the dense
gradient of one batch is largest.

Adapted: the neighbours are those of the run's topology (the paper draws them anew each round). Synchrony is local: a
device waits for its in-neighbours' models of the same round. A round may take `PATIENCE` times as long as any before
(the first one, `SPREAD` times the own update); who is not there then is left out until a model comes again. After
a crash a device does one update without waiting, and goes on in its neighbours' round. MACs and bytes count by density.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, cos, pi
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import costs, forms
from ..context import Context, Message, Method, Model, Size, option
from ..graph import Job, Op
from ..layout import Entry, Layout
from ..models.macs import layer_macs
from ..ops import HeldOut
from ..placement import parts
from ..replay import copies
from ..rules.merge import weighted_mean
from ..task import Task
from ._server import PATIENCE, SPREAD

WAITING = 4
"""Models of later rounds that are kept of a neighbour; one that keeps the rounds is never that far ahead."""


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of DisPFL."""

    density: float = option(0.5, "share of the parameters that a device keeps")
    alpha: float = option(0.5, "share of the kept weights that is replaced, at the beginning")
    rounds: int = option(500, "rounds after which masks stay as they are (the paper's T)")
    lr_decay: float = option(0.998, "learning rate's factor per round, in place of the run's own decay")
    clip: float = option(10.0, "largest norm of a gradient")


def densities(layout: Layout, density: float) -> dict[str, float]:
    """Erdős-Rényi-Kernel: the density of a tensor is proportional to `sum(shape)/prod(shape)`, at most 1."""
    entries = [entry for entry in layout.entries if entry.trainable]
    raw = {entry.name: sum(entry.shape) / entry.numel for entry in entries}
    dense: set[str] = set()
    while True:
        wanted = density * layout.parameters - sum(e.numel for e in entries if e.name in dense)
        scale = wanted / max(1e-12, sum(raw[e.name] * e.numel for e in entries if e.name not in dense))
        over = {name for name, share in raw.items() if name not in dense and scale * share > 1}
        if not over:
            return {name: 1.0 if name in dense else max(0.0, scale * share) for name, share in raw.items()}
        dense |= {name for name in over if raw[name] == max(raw[other] for other in over)}


def replaced(number: int, alpha: float, rounds: int) -> float:
    """The share of a layer's kept weights that is dropped and regrown in that round."""
    return alpha / 2 * (1 + cos(pi * min(number, rounds) / rounds))


@dataclass(frozen=True)
class Mix(Op):
    """Jobs are (vectors, masks, own mask): per entry the mean over those that hold it, else 0; times the own mask."""

    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [self._one(*job) for job in jobs]

    def _one(self, vectors: Sequence[Tensor], masks: Sequence[Tensor], own: Tensor) -> tuple[Tensor, ...]:
        mean = weighted_mean(vectors, [1.0] * len(vectors), masks, torch.zeros_like(vectors[0]))
        return (mean * own,)


@dataclass(frozen=True)
class Regrow(Op):
    """Jobs are (vector, mask, dense gradient, share); the result is the next mask [size]."""

    entries: tuple[Entry, ...]
    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        vector = jobs[0][0]
        if not vector.is_cuda:
            return [(self._one(*job),) for job in jobs]
        return [(mask,) for part in parts(len(jobs), 16 * vector.nbytes) for mask in self.together(jobs[part])]

    def _one(self, vector: Tensor, mask: Tensor, gradient: Tensor, share: float) -> Tensor:
        mask = mask.clone()
        for entry in self.entries:
            own = slice(entry.offset, entry.end)
            mask[own] = regrow(vector[own].abs(), mask[own], gradient[own].abs(), share)
        return mask

    def together(self, jobs: Sequence[Job]) -> Sequence[Tensor]:
        """The same for all jobs at once, without waiting for a count: a GPU sorts faster than it answers."""
        vectors, masks, gradients, shares = zip(*jobs, strict=True)
        sizes, slopes, stack = torch.stack(vectors).abs(), torch.stack(gradients).abs(), torch.stack(masks)
        share = torch.tensor(shares, dtype=torch.float64).to(stack.device, non_blocking=True)
        for entry in self.entries:
            own = slice(entry.offset, entry.end)
            stack[:, own] = regrow_all(sizes[:, own], stack[:, own], slopes[:, own], share)
        return copies(stack.unbind())


def regrow(size: Tensor, mask: Tensor, slope: Tensor, share: float) -> Tensor:
    """One layer's mask without the smallest kept weights, and with as many of the steepest missing ones."""
    count = ceil(share * int(mask.sum()))
    mask = mask.index_fill(0, _least(size, mask, count), False)
    return mask.index_fill(0, _least(-slope, ~mask, count), True)


def _least(values: Tensor, among: Tensor, count: int) -> Tensor:
    """Places of the `count` smallest values among some, the first of equal ones; NaN counts as large. It does not sort:
    a table of words has as many numbers as all the rest of a network a hundred times."""
    places = among.nonzero().squeeze(1)
    found = values[places].nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if not 0 < count < len(places):
        return places[:count]
    limit = found.kthvalue(count).values
    below = found < limit
    equal = (found == limit).nonzero().squeeze(1)[: count - int(below.sum())]
    return places[below.index_fill(0, equal, True)]


def regrow_all(sizes: Tensor, masks: Tensor, slopes: Tensor, shares: Tensor) -> Tensor:
    """`regrow` of one layer of many models [N, n], with a share of each [N]."""
    counts = (shares * masks.sum(1)).ceil().long()
    masks = masks & ~_least_of_all(sizes, masks, counts)
    return masks | _least_of_all(-slopes, ~masks, counts)


def _least_of_all(values: Tensor, among: Tensor, counts: Tensor) -> Tensor:
    """Flags of what `_least` takes in each row [N, n], by one sort of whole numbers in their order."""
    bits = (values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    first = (ordered + (~among).long() * 2**33).sort(dim=1, stable=True).indices
    taken = torch.arange(values.shape[1], device=values.device) < torch.minimum(counts, among.sum(1))[:, None]
    return torch.zeros_like(among).scatter_(1, first, taken)


def kept_size(task: Task, shares: dict[str, float]) -> Size:
    """What a device trains and sends at these densities, which never change."""
    x, _ = task.gather(torch.arange(1))
    macs = {f"{name}.weight".lstrip("."): count for name, count in layer_macs(task.module, x).items()}
    kept = sum(int(shares[e.name] * e.numel) if e.trainable else e.numel for e in task.layout.entries)
    return Size(kept, sum(count * shares.get(name, 1.0) for name, count in macs.items()))


def first_mask(ctx: Context, shares: dict[str, float]) -> Tensor:
    """A random mask with these densities, the device's own."""
    mask = torch.ones(ctx.task.layout.size, dtype=torch.bool)
    for entry in ctx.task.layout.entries:
        if entry.trainable:
            gone = ctx.random(f"mask {entry.name}").permutation(entry.numel)[int(shares[entry.name] * entry.numel) :]
            mask[entry.offset + torch.from_numpy(gone)] = False
    return mask


async def device(ctx: Context, hyper: Hyper) -> None:
    state = ctx.restore() or begin(ctx, hyper)
    model, mask, number, lr = state["model"], state["mask"], state["round"], state["lr"]
    peers, models = Peers(ctx), list[Message]()
    while ctx.running:
        began = ctx.now
        sources = [model, *(message.model for message in models if message.model is not None)]
        (vector,) = await ctx.compute(
            Mix(), tuple(m.vector for m in sources), tuple(m.mask for m in sources), mask,
            flops=costs.merging(model.size.parameters, len(sources)), purpose="merging",
        )  # fmt: skip
        plan = replace(ctx.plan(), lr=lr * hyper.lr_decay**number, clip_norm=hyper.clip)
        trained = await ctx.train(Model(vector, model.size, mask), plan)
        model = trained.model
        mask = await next_mask(ctx, hyper, model, number, plan.batch_size)
        number += 1
        for other in ctx.out_neighbours:
            ctx.send(other, model, round=number)
        ctx.publish(model, loss=trained.loss, merged=[(message.source, 1) for message in models])
        ctx.save({"model": model, "mask": mask, "round": number, "lr": lr})
        models, number = await peers.models(number, began)


def begin(ctx: Context, hyper: Hyper) -> dict[str, Any]:
    shares = densities(ctx.task.layout, hyper.density)
    mask = ctx.known(first_mask(ctx, shares))
    model = Model(ctx.initial().vector, kept_size(ctx.task, shares), mask)
    return {"model": model, "mask": mask, "round": 0, "lr": ctx.plan().lr}


async def next_mask(ctx: Context, hyper: Hyper, model: Model, number: int, count: int) -> Any:
    """The mask for the next round, by magnitude and by the dense gradient of one batch at the trained model."""
    rows = ctx.batch(count, "growth")
    _, gradient = await ctx.compute(
        HeldOut(ctx.task), model.vector, None, rows,
        flops=costs.training(ctx.task.macs, len(rows)), purpose="growth",
    )  # fmt: skip
    entries = tuple(entry for entry in ctx.task.layout.entries if entry.trainable)
    share = replaced(number, hyper.alpha, hyper.rounds)
    (mask,) = await ctx.compute(
        Regrow(entries), model.vector, model.mask, gradient, share,
        flops=costs.merging(ctx.task.layout.parameters, 2), purpose="growth",
    )  # fmt: skip
    return mask


class Peers:
    """What has come from the in-neighbours, and how long they are waited for."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.queues: dict[int, list[Message]] = {}
        self.silent: set[int] = set()
        self.longest = 0.0

    async def models(self, number: int, began: float) -> tuple[list[Message], int]:
        """The neighbours' models of this round, by device number, and the round.

        A neighbour sends in order, so a later round's model means that this one's was lost; it is taken instead. If
        all are later, theirs is the round.
        """
        limit = began + (PATIENCE * self.longest or SPREAD * (self.ctx.now - began))
        while self.ctx.running and (missing := self._missing(number)):
            message = await self.ctx.wait(max(0.0, limit - self.ctx.now), kind="model")
            if message is None:
                self.silent |= missing
            else:
                queue = self.queues.setdefault(message.source, [])
                queue.append(message)
                del queue[:-WAITING]
                self.silent.discard(message.source)
        if self.ctx.now < limit:
            self.longest = max(self.longest, self.ctx.now - began)
        models = [self.queues[peer][0] for peer in sorted(self.ctx.in_neighbours) if self.queues.get(peer)]
        return models, min((message.fields["round"] for message in models), default=number)

    def _missing(self, number: int) -> set[int]:
        """Neighbours without a model of this round or a later one; older ones are thrown away."""
        for queue in self.queues.values():
            queue[:] = [message for message in queue if message.fields["round"] >= number]
        there = {peer for peer, queue in self.queues.items() if queue}
        return {*self.ctx.in_neighbours} - {self.ctx.index} - there - self.silent


METHOD = Method(
    "dispfl", "synchronous averaging of sparse models", Hyper(), device, paper="Dai et al., ICML 2022",
    messages={"model": forms.Form({"round": forms.count}, masked=True)},
)  # fmt: skip
