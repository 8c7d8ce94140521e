"""FedSA: Chen, Mao, Ma, *FedSA: A staleness-aware asynchronous federated learning algorithm with non-IID data*, Future
Generation Computer Systems 120, 2021.

On every arrival `w = (1 - a) w + a w_k` with `a = mixing (1 + tau)^-exponent`. Training has two stages: in the first
one clients train as long and with as large a step as the run allows; once the loss falls slowly they train
less and with a smaller step, the more so the staler they are.

Adapted, because the text of the paper was not at hand and its abstract gives the idea without the formulas: `a` is
FedAsync's polynomial (Xie et al., 2019) with that paper's values. The second stage begins when the mean training
loss of one generation of updates (as many as there are clients) is not lower than that of the generation before
by a share of at least `slow`. A client whose staleness is s times the mean one then does `later / max(1, s)` of its
epochs, rounded up, and of its learning rate.

Confirmed from public summaries of the paper (its entry at bohrium.com): asynchronous updates, a two-stage strategy,
and hyper-parameters of workers and server chosen as it goes. Not confirmed: every formula and value here. Another
FedSA is not this one: Ma et al., *A semi-asynchronous federated learning mechanism in heterogeneous edge computing*,
JSAC 39(12), 2021, merges a certain number of models per round by order of arrival and adapts the workers' learning
rates to how often they take part (its abstract).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from .. import forms
from ..context import Context, Method, option
from ..graph import Value
from ..ops import Combination
from ._server import MESSAGES, Desk, deliver, merging, next_order, report, start


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedSA."""

    mixing: float = option(0.6, "weight of a fresh model")
    exponent: float = option(0.5, "how fast the weight falls with staleness")
    slow: float = option(0.05, "relative fall of the loss per generation below which the second stage begins")
    later: float = option(0.5, "share of epochs and learning rate in the second stage, for a client of mean staleness")


def mixing(age: int, hyper: Hyper) -> float:
    """`a`: how much of the global model an update of that staleness replaces."""
    return float(hyper.mixing * (1 + age) ** -hyper.exponent)


def effort(age: int, mean: float, hyper: Hyper) -> float:
    """The share of its epochs and learning rate that a client of that staleness uses in the second stage."""
    return hyper.later / max(1.0, age / mean) if mean else hyper.later


async def server(ctx: Context, hyper: Hyper) -> None:
    desk = Desk.open(ctx)
    second, previous = desk.saved.get("second", False), desk.saved.get("previous")
    losses: list[Value] = []
    ages: list[int] = []
    while (update := await desk.update()) is not None:
        age = desk.version - update.version
        a = mixing(age, hyper)
        (vector,) = await ctx.compute(
            Combination(),
            (desk.model.vector, update.model.vector),
            (1 - a, a),
            flops=merging(desk.model, 2),
            purpose="aggregation",
        )
        losses.append(update.fields["loss"])
        ages = [*ages, age][-ctx.devices :]
        if len(losses) == ctx.devices:
            loss = sum(await ctx.read(*losses)) / len(losses)
            second = second or (previous is not None and loss > (1 - hyper.slow) * previous)
            previous, losses = loss, []
        desk.publish(
            replace(desk.model, vector=vector), [update], {"second": second, "previous": previous}, weights=[a]
        )
        desk.hand(update.client, effort=effort(age, sum(ages) / len(ages), hyper) if second else 1.0)


async def client(ctx: Context, hyper: Hyper) -> None:
    report(ctx)
    while ctx.running:
        order = await next_order(ctx)
        plan, share = ctx.plan(), order.fields.get("effort", 1.0)
        plan = replace(plan, epochs=ceil(share * plan.epochs), lr=share * plan.lr)
        trained = await ctx.train(start(order), plan)
        deliver(ctx, order, trained, loss=trained.loss)


METHOD = Method(
    "fedsa", "asynchronous mixing by staleness, in two stages", Hyper(), client, server, "Chen, Mao, Ma, FGCS 2021",
    messages={
        **MESSAGES, "update": forms.Form({**MESSAGES["update"].fields, "loss": forms.loss}),
        "order": forms.Form(MESSAGES["order"].fields, by_server=True, optional={"effort": forms.portion}),
    },
)  # fmt: skip
