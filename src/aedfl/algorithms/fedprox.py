"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, *Federated optimization in heterogeneous networks*, MLSys 2020.

FedAvg whose clients minimise `F_k(w) + mu/2 ||w - w_global||^2`, so that a local step is
`w -= lr (gradient + mu (w - w_global))`. A client that is too slow does fewer epochs, and its model counts
all the same. Adapted: the paper draws how much work a straggler does; here the virtual clock decides it, by
`round_seconds`. Off by default, so that the amount of local training is that of every other method.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..context import Context, Method, option
from ._server import MESSAGES, averaging_rounds, by_epoch, deliver, next_order, report, start


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedProx."""

    mu: float = option(0.01, "strength of the pull towards the global model")
    share: float = option(1.0, "share of the clients that take part in a round")
    round_seconds: float = option(0.0, "a client begins no further epoch after so many seconds; 0 = it does all")


async def server(ctx: Context, hyper: Hyper) -> None:
    await averaging_rounds(ctx, hyper.share)


async def client(ctx: Context, hyper: Hyper) -> None:
    report(ctx)
    while ctx.running:
        order = await next_order(ctx)
        end = ctx.now + hyper.round_seconds
        plan = replace(ctx.plan(), proximal=hyper.mu)

        async def late(end: float = end) -> bool:
            return ctx.now >= end

        if hyper.round_seconds:
            trained = await by_epoch(ctx, start(order), plan, late, anchor=order.model)
        else:
            trained = await ctx.train(start(order), plan, anchor=order.model)
        deliver(ctx, order, trained)


METHOD = Method(
    "fedprox", "FedAvg with a proximal term at the clients", Hyper(), client, server, "Li et al., MLSys 2020",
    messages=MESSAGES,
)  # fmt: skip
