"""FedNova: Wang, Liu, Liang, Joshi, Poor, *Tackling the objective inconsistency problem in heterogeneous federated
optimization*, NeurIPS 2020.

Clients that take more local steps must not count more. With `G_k = w - w_k` and `a_k` the sum of the coefficients
with which a client's gradients enter its change, the server takes

    w -= tau_eff sum_k p_k G_k / a_k,    tau_eff = sum_k p_k a_k,    p_k = n_k/n over the round's clients.

`a_k` is the number of steps for plain SGD; with momentum `c = rho c + 1` per step and `a += c`; with a proximal
term `a = (1 - lr mu) a + c`. Adapted: nothing in the rule; running statistics (BatchNorm) are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import forms
from ..context import Context, Method, option
from ._server import MESSAGES, Desk, deliver, next_order, report, start


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedNova."""

    mu: float = option(0.0, "strength of a proximal term at the clients")
    share: float = option(1.0, "share of the clients that take part in a round")


def coefficients(steps: int, lr: float, momentum: float, mu: float) -> float:
    """`a_k`: the summed weights of a client's gradients in its change, divided by the learning rate."""
    total = weight = 0.0
    for _ in range(steps):
        weight = momentum * weight + 1
        total = (1 - lr * mu) * total + weight
    return total


def factors(samples: list[int], totals: list[float]) -> list[float]:
    """`tau_eff p_k / a_k` of every client: how far the server goes along its change."""
    shares = [count / sum(samples) for count in samples]
    effective = sum(share * a for share, a in zip(shares, totals, strict=True))
    return [effective * share / a for share, a in zip(shares, totals, strict=True)]


async def server(ctx: Context, hyper: Hyper) -> None:
    desk = Desk.open(ctx)
    while ctx.running:
        updates = await desk.round(hyper.share)
        if not updates:
            continue
        weights = factors([update.samples for update in updates], [update.fields["a"] for update in updates])
        await desk.step(updates, weights)


async def client(ctx: Context, hyper: Hyper) -> None:
    report(ctx)
    while ctx.running:
        order = await next_order(ctx)
        plan = replace(ctx.plan(), proximal=hyper.mu)
        trained = await ctx.train(start(order), plan, anchor=order.model)
        deliver(ctx, order, trained, a=coefficients(trained.steps, plan.lr, plan.momentum, hyper.mu))


METHOD = Method(
    "fednova", "FedAvg with changes normalised by local steps", Hyper(), client, server, "Wang et al., NeurIPS 2020",
    messages={**MESSAGES, "update": forms.Form({**MESSAGES["update"].fields, "a": forms.positive})},
)  # fmt: skip
