"""ASO-Fed: Chen, Ning, Slawski, Rangwala, *Asynchronous online federated learning for edge devices with non-IID data*,
IEEE Big Data 2020.

A client minimises `F_k(w) + lam/2 ||w - w_global||^2` with the step size times `max(1, log(mean delay))`, the delay
being the seconds from an order to its update. It sends its change, corrected by the ones before:

    s = w_global - w_k,    zeta = s - s_prev + h,    h = beta h + (1 - beta) s_prev.

The server takes `w -= n_k/n zeta` on every arrival and learns features: it weighs each input of the first layer by
`alpha = softmax(|w|)` over the inputs of a unit.

Adapted: `s` is the change of a whole local update, which takes the place of a gradient on streaming data. Taken
literally, `w = alpha w` at every arrival multiplies the first layer by about one over its number of inputs each
time, and after a few arrivals it is zero. So by default the factors have mean 1 over a unit's inputs, and weigh the
model that is sent and evaluated; the sum behind it is kept without them. Running statistics (BatchNorm) are mixed.

Confirmed: learning on streaming data, a decaying correction, a step size that grows with the delay, a pull towards the
global model, feature learning at the server (public summaries of the paper); the share `n_k/n`, the correction and
`max(1, log(mean delay))` (a third party's implementation, ASOFed in FedOpt, which takes the decimal logarithm and
counts delays in versions). The values of lam and beta could not be confirmed. A pull of lam = 1, which is quoted,
belongs to very small steps: with steps as they are here a client then gets no farther than one gradient over lam,
however long it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..context import Context, Method, option
from ..graph import Job, Op
from ..layout import Entry, Layout
from ._server import MESSAGES, Desk, deliver, merging, next_order, report, start


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of ASO-Fed."""

    lam: float = option(0.3, "strength of the pull towards the global model")
    beta: float = option(0.001, "share of the old correction that is kept")
    features: Literal["scaled", "paper", "off"] = option("scaled", "first layer: factors of mean 1, the paper's, none")


@dataclass(frozen=True)
class Correct(Op):
    """Jobs are (start, end, s_prev, h) of one client; results are zeta, s and the next h, all [size].

    Behind the parameters zeta carries the client's own values.
    """

    parameters: int
    beta: float
    outputs: ClassVar[int] = 3

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [self._one(*job) for job in jobs]

    def _one(self, begin: Tensor, end: Tensor, before: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        s = begin - end
        zeta = s - before + h
        zeta[self.parameters :] = end[self.parameters :]
        return zeta, s, self.beta * h + (1 - self.beta) * before


@dataclass(frozen=True)
class Absorb(Op):
    """Jobs are (sum, zeta, share); results are the next sum and the model with its features weighed."""

    layout: Layout
    features: str
    outputs: ClassVar[int] = 2

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [self._one(*job) for job in jobs]

    def _one(self, total: Tensor, zeta: Tensor, share: float) -> tuple[Tensor, ...]:
        count = self.layout.parameters
        parameters = total[:count] - share * zeta[:count]
        total = torch.cat([parameters, (1 - share) * total[count:] + share * zeta[count:]])
        if self.features == "off":
            return total, total
        model = weigh_features(total, first_layer(self.layout), self.features == "scaled")
        return (model if self.features == "paper" else total), model


def first_layer(layout: Layout) -> Entry:
    """The first weight matrix (or filter bank) of the model."""
    return next(entry for entry in layout.entries if entry.trainable and len(entry.shape) > 1)


def weigh_features(vector: Tensor, layer: Entry, scaled: bool) -> Tensor:
    """The first layer times `alpha = softmax(|w|)` over each unit's inputs, or times alpha over its mean."""
    rows = vector[layer.offset : layer.end].view(layer.shape[0], -1)
    alpha = torch.softmax(rows.abs(), 1) * (rows.shape[1] if scaled else 1)
    result = vector.clone()
    result[layer.offset : layer.end] = (alpha * rows).flatten()
    return result


async def server(ctx: Context, hyper: Hyper) -> None:
    desk = Desk.open(ctx)
    total = desk.saved.get("total", desk.model.vector)
    while (update := await desk.update()) is not None:
        share = update.samples / sum(desk.samples.values())
        total, vector = await ctx.compute(
            Absorb(ctx.task.layout, hyper.features),
            total,
            update.model.vector,
            share,
            flops=2 * merging(desk.model, 2),
            purpose="aggregation",
        )
        desk.publish(replace(desk.model, vector=vector), [update], {"total": total}, weights=[share])
        desk.hand(update.client)


async def client(ctx: Context, hyper: Hyper) -> None:
    state = ctx.restore() or _begin(ctx)
    report(ctx)
    while ctx.running:
        order = await next_order(ctx)
        began = ctx.now
        plan = ctx.plan()
        plan = replace(plan, proximal=hyper.lam, lr=plan.lr * step_size(state["delay"]))
        trained = await ctx.train(start(order), plan, anchor=order.model)
        zeta, state["s"], state["h"] = await ctx.compute(
            Correct(ctx.task.layout.parameters, hyper.beta),
            start(order).vector,
            trained.model.vector,
            state["s"],
            state["h"],
            flops=3 * merging(trained.model, 1),
            purpose="correction",
        )
        deliver(ctx, order, trained, replace(trained.model, vector=zeta))
        state["rounds"] += 1
        state["delay"] += (ctx.now - began - state["delay"]) / state["rounds"]
        ctx.save(state)


def _begin(ctx: Context) -> dict[str, Any]:
    zero = ctx.known(torch.zeros(ctx.task.layout.size))
    return {"s": zero, "h": zero, "rounds": 0, "delay": 0.0}


def step_size(mean_delay: float) -> float:
    """`max(1, log(mean delay))` with the delay in seconds: who comes seldom takes larger steps."""
    return max(1.0, log(mean_delay)) if mean_delay > 0 else 1.0


METHOD = Method(
    "aso-fed", "asynchronous, with corrected changes and feature learning", Hyper(), client, server,
    "Chen et al., IEEE Big Data 2020", messages=MESSAGES,
)  # fmt: skip
