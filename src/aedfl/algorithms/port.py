"""Port: Su, Li, *How asynchronous can federated learning be?*, IWQoS 2022.

The server aggregates as soon as K updates are there. An update counts in proportion to

    n_k [a S/(tau_k + S) + b (cos(D_k, w_t - w_{t - tau_k}) + 1)/2],

where `D_k` is the client's change, `tau_k` its staleness, and the cosine asks whether it goes the way that the global
model has gone since; with nothing gone (tau = 0) it counts as 0. `w += sum_k weight_k D_k`, weights summing to 1.
No update may be staler than S: a client that would be is asked to send what it has at the end of its current epoch,
and the server waits for it.

Adapted: clients train epoch by epoch to be able to answer; one that does not answer is given up after a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from .. import forms
from ..context import Context, Message, Method, option
from ..graph import Job, Op
from ..ops import moved
from ..rules.reduce import dot, norm
from ._server import MESSAGES, Desk, Update, by_epoch, deliver, merging, next_order, report, start


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of Port."""

    buffer: int = option(0, "updates per aggregation (the paper's K); 0 = half of the clients")
    bound: int = option(10, "largest staleness (the paper's S)")
    staleness_weight: float = option(3.0, "the paper's a")
    similarity_weight: float = option(1.0, "the paper's b")


@dataclass(frozen=True)
class Aggregate(Op):
    """Jobs are (w, ends, starts, ages, samples); results are the next w [size] and the weights [clients].

    The start of an update is w_{t - tau}, so that `w - start` is how the global model has moved since.
    """

    parameters: int
    hyper: Hyper
    outputs: ClassVar[int] = 2

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [self._one(*job) for job in jobs]

    def _one(
        self, w: Tensor, ends: Sequence[Tensor], starts: Sequence[Tensor], ages: Sequence[int], samples: Sequence[int]
    ) -> tuple[Tensor, ...]:
        own, count = slice(self.parameters), zip(ends, starts, strict=True)
        similar = [cosine((end - begin)[own], (w - begin)[own]) for end, begin in count]
        weights = importance(torch.stack(similar), torch.tensor(ages), torch.tensor(samples), self.hyper).to(w)
        return moved(self.parameters, w, ends, starts, weights), weights


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """Cosine of two vectors; 0 if one of them is zero."""
    lengths = norm(left) * norm(right)
    return torch.where(lengths > 0, dot(left, right) / lengths, 0.0)


def importance(similarity: Tensor, ages: Tensor, samples: Tensor, hyper: Hyper) -> Tensor:
    """Weights [clients] from cosines, staleness and samples; they sum to 1."""
    fresh = hyper.staleness_weight * hyper.bound / (ages + hyper.bound).double().to(similarity.device)
    alike = hyper.similarity_weight * (similarity + 1) / 2
    raw = samples.to(similarity) * (fresh + alike)
    return raw / raw.sum()


async def server(ctx: Context, hyper: Hyper) -> None:
    desk = Desk.open(ctx)
    size = hyper.buffer or ceil(ctx.devices / 2)
    while ctx.running:
        buffer = await collect(desk, size, hyper.bound)
        if not buffer:
            continue
        vector, weights = await ctx.compute(
            Aggregate(ctx.task.layout.parameters, hyper),
            desk.model.vector,
            tuple(update.model.vector for update in buffer),
            tuple(update.start.vector for update in buffer),
            tuple(desk.version - update.version for update in buffer),
            tuple(update.samples for update in buffer),
            flops=5 * merging(desk.model, len(buffer)),
            purpose="aggregation",
        )
        desk.publish(replace(desk.model, vector=vector), buffer, weights=weights)
        for update in buffer:
            desk.hand(update.client)


async def collect(desk: Desk, size: int, bound: int) -> list[Update]:
    """So many updates (fewer if nobody else is at work), and all that would be too stale the next time."""
    urgent = {client for client, order in desk.orders.items() if desk.version - order.version >= bound}
    for late in sorted(urgent):
        desk.ctx.send(late, kind="urgent", version=desk.orders[late].version)
    buffer: list[Update] = []
    while desk.ctx.running:
        full = len(buffer) >= size
        missing = urgent & desk.orders.keys() if full else desk.orders
        if buffer and not missing:
            return buffer
        until = desk.overdue(missing)[0] if full else desk.deadline()
        client, update = await desk.arrival(until) or (None, None)
        if update is not None:
            buffer.append(update)
        elif client is not None:
            desk.hand(client)
        elif desk.ctx.now >= until:
            desk.forget(tuple(missing))
    return []


async def client(ctx: Context, hyper: Hyper) -> None:
    report(ctx)
    while ctx.running:
        order = await next_order(ctx)

        async def wanted(order: Message = order) -> bool:
            request = await ctx.wait(0, kind="urgent")
            return request is not None and request.fields["version"] == order.fields["version"]

        deliver(ctx, order, await by_epoch(ctx, start(order), ctx.plan(), wanted))


METHOD = Method(
    "port", "asynchronous, weighted by staleness and direction, bounded", Hyper(), client, server, "Su, Li, IWQoS 2022",
    messages={**MESSAGES, "urgent": forms.Form({"version": forms.count}, model=False, by_server=True)},
)  # fmt: skip
