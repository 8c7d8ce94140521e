"""SAFA: Wu, He, Lin, Mao, Maple, Jarvis, *SAFA: A semi-asynchronous protocol for fast federated learning with low
overhead*, IEEE Transactions on Computers 70(5), 2021.

All clients train. Before a round those that are up to date, and those whose model is more than `lag` versions old, take
the global model (the latter drop what they were doing); the others keep going. Arrivals are picked in order if they
were not picked in the last round, else they wait in a second line. The round closes when `share` of the clients are
picked, or at the deadline, when the second line fills up what is missing. The server has one entry per client: picked
ones get the new model, those too old the global one, then `w = sum_k p_k entry_k` over ALL clients. Arrivals that were
not picked go into their entries afterwards (the bypass) and count in the next round.

Adapted: the deadline, a constant of the paper's testbed, is a little more than the longest time from order to update
seen so far, once all clients have been seen (an option fixes it). Clients train epoch by epoch so that one too old
can drop its work. A round also closes when everybody at work has arrived. Entries begin as the initial model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from ..context import Context, Message, Method, Model, option
from ..ops import WeightedMean
from ._server import MARGIN, MESSAGES, Desk, Update, by_epoch, deliver, merging, next_order, report, start


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of SAFA."""

    lag: int = option(5, "versions that a client at work may be behind (the paper's tau)")
    share: float = option(0.5, "share of the clients that are picked in a round (the paper's C)")
    deadline: float = option(0.0, "longest round in seconds; 0 = 1.05 times the longest update so far")


async def server(ctx: Context, hyper: Hyper) -> None:
    desk = Desk.open(ctx)
    entries: dict[int, Model] = dict(desk.saved.get("entries", {}))
    last: set[int] = set()
    while ctx.running:
        for client in distribute(desk, hyper.lag):
            entries[client] = desk.model
        picked, passed = await pick(desk, last, ceil(hyper.share * ctx.devices), hyper.deadline)
        if not picked:
            continue
        entries = {client: entries.get(client, ctx.initial()) for client in sorted(desk.samples)}
        entries |= {update.client: update.model for update in picked}
        (vector,) = await ctx.compute(
            WeightedMean(),
            tuple(entry.vector for entry in entries.values()),
            tuple(float(desk.samples[client]) for client in entries),
            flops=merging(desk.model, len(entries)),
            purpose="aggregation",
        )
        entries |= {update.client: update.model for update in passed}
        names = [update.client for update in passed]
        desk.publish(replace(desk.model, vector=vector), picked, {"entries": entries}, passed=names)
        last = {update.client for update in picked}


def distribute(desk: Desk, lag: int) -> list[int]:
    """Gives the global model to everybody who is idle, and to those too old; the latter are returned."""
    old = [client for client, order in desk.orders.items() if desk.version - order.version > lag]
    for client in sorted([*desk.idle, *old]):
        desk.hand(client)
    return old


async def pick(desk: Desk, last: set[int], quota: int, limit: float) -> tuple[list[Update], list[Update]]:
    """Compensatory first-come-first-merge: the picked arrivals of a round, and those that were passed over."""
    picked: list[Update] = []
    line: list[Update] = []
    began = desk.ctx.now
    while desk.ctx.running and len(picked) < quota and (desk.orders or not (picked or line)):
        until = began + limit if limit else latest(desk, began)
        client, update = await desk.arrival(until if picked or line else inf) or (None, None)
        if update is not None:
            (line if update.client in last else picked).append(update)
        elif client is not None:
            desk.hand(client)
        elif desk.ctx.now >= until and (picked or line):
            break
    missing = quota - len(picked)
    return picked + line[:missing], line[missing:]


def latest(desk: Desk, began: float) -> float:
    """When a round without a fixed deadline ends: once the slowest could have done an update since it began."""
    if len(desk.longest) < len(desk.samples) and (unknown := desk.orders.keys() - desk.longest.keys()):
        return desk.overdue(unknown)[0]
    return began + MARGIN * (desk.slowest or inf)


async def client(ctx: Context, hyper: Hyper) -> None:
    report(ctx)
    order = await next_order(ctx)
    while ctx.running:
        newer: list[Message] = []

        async def replaced(newer: list[Message] = newer) -> bool:
            message = await ctx.wait(0, kind="order")
            newer += [] if message is None else [message]
            return bool(newer)

        trained = await by_epoch(ctx, start(order), ctx.plan(), replaced)
        if not await replaced():
            deliver(ctx, order, trained)
            newer.append(await next_order(ctx))
        order = newer[-1]


METHOD = Method(
    "safa", "semi-asynchronous rounds over a cache of all clients", Hyper(), client, server, "Wu et al., IEEE ToC 2021",
    messages=MESSAGES,
)  # fmt: skip
