"""What methods with a server share: orders and updates, and clients that come and go.

A client says `ready` when it has nothing to do (at its start, after a crash, and again every `ASK` seconds while
nothing comes, since messages may be lost). The server sends `order`s: its model and the version of it. The client
answers each with an `update`: the trained model, the version it started from, its number of samples.

A server never waits for ever. A client that was given an order is waited for `PATIENCE` times as long as it ever
took before; one that has never answered, `SPREAD` times as long as the fastest client took. After that it is
left out until it reports again. Both are ratios, so they hold for any fleet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

from .. import costs, forms
from ..context import SERVER, Context, Message, Model, Trained
from ..ops import Step, WeightedMean
from ..training.plan import Plan

ASK = 60.0
PATIENCE = 3.0
SPREAD = 100.0
MARGIN = 1.05
"""A span that is set by somebody's own time is so much longer, or that one would just miss it."""
MESSAGES = {
    "ready": forms.Form({"samples": forms.count}, model=False),
    "order": forms.Form({"version": forms.count}, by_server=True),
    "update": forms.Form({"version": forms.count, "samples": forms.some}),
}


def report(ctx: Context) -> None:
    """Tells the server that this client has nothing to do."""
    ctx.send(SERVER, kind="ready", samples=ctx.samples)


async def next_order(ctx: Context) -> Message:
    """The server's newest order; reports again when none comes."""
    while True:
        order = await ctx.wait(ASK, kind="order")
        if order is None:
            report(ctx)
            continue
        while (newer := await ctx.wait(0, kind="order")) is not None:
            order = newer
        return order


def deliver(ctx: Context, order: Message, trained: Trained, model: Model | None = None, **fields: Any) -> None:
    """Sends the update (the trained model, or another one that stands for it) and ends the local update."""
    version = order.fields["version"]
    ctx.send(SERVER, model or trained.model, kind="update", version=version, samples=ctx.samples, **fields)
    ctx.publish(trained.model, loss=trained.loss)


async def training_client(ctx: Context, _: Any) -> None:
    """The client that most methods share: it trains what it is sent."""
    report(ctx)
    while ctx.running:
        order = await next_order(ctx)
        deliver(ctx, order, await ctx.train(start(order)))


def start(order: Message) -> Model:
    """The model that came with an order."""
    assert order.model is not None
    return order.model


async def by_epoch(
    ctx: Context, model: Model, plan: Plan, enough: Callable[[], Awaitable[bool]], anchor: Model | None = None
) -> Trained:
    """Trains one epoch after the other and may stop between two; the loss is that of the last epoch."""
    one = replace(plan, epochs=1)
    trained = await ctx.train(model, one, anchor)
    done = 1
    while done < plan.epochs and not await enough():
        trained = await ctx.train(trained.model, one, anchor)
        done += 1
    return replace(trained, steps=trained.steps * done)


@dataclass(frozen=True)
class Order:
    """What a client at work was given, and when."""

    version: int
    model: Model
    time: float


@dataclass(frozen=True)
class Update:
    """What came back from a client, beside what it had started from."""

    client: int
    model: Model
    start: Model
    version: int
    samples: int
    fields: Mapping[str, Any]


@dataclass
class Desk:
    """A server's books: the model and its version, who is idle, who works on what since when."""

    ctx: Context
    model: Model
    version: int = 0
    saved: dict[str, Any] = field(default_factory=dict)
    """What the method itself had saved, after a restart."""
    orders: dict[int, Order] = field(default_factory=dict)
    idle: set[int] = field(default_factory=set)
    samples: dict[int, int] = field(default_factory=dict)
    """Of every client that was ever heard of."""
    longest: dict[int, float] = field(default_factory=dict)
    """Seconds between a client's order and its update, the most so far."""
    slowest: float = 0.0
    """The most of any client."""
    last: int | None = None
    """The client at work that is given up last, and when."""
    due: float = inf

    @classmethod
    def open(cls, ctx: Context) -> Desk:
        saved = ctx.restore() or {"model": ctx.initial(), "version": 0}
        return cls(ctx, saved.pop("model"), saved.pop("version"), saved)

    def hand(self, client: int, **fields: Any) -> None:
        """Gives the present model to a client, whatever it was doing."""
        self.ctx.send(client, self.model, kind="order", version=self.version, **fields)
        self.orders[client] = Order(self.version, self.model, self.ctx.now)
        self.idle.discard(client)
        self.last = None

    async def arrival(self, until: float = inf) -> tuple[int, Update | None] | None:
        """The next client that reports, with its update if it brings one; None at `until` or after `ASK` seconds.

        What was made from an order that has been replaced is dropped; its maker finds the newer order.
        """
        while True:
            message = await self.ctx.wait(min(ASK, max(0.0, until - self.ctx.now)))
            if message is None:
                return None
            client, given = message.source, message.fields
            order = self.orders.get(client)
            if order is None or message.model is None or given["version"] == order.version:
                break
        self.orders.pop(client, None)
        self.idle.add(client)
        self.samples[client] = given["samples"]
        if order is None or message.model is None:
            return client, None
        self.longest[client] = max(self.longest.get(client, 0.0), self.ctx.now - order.time)
        self.slowest = max(self.slowest, self.longest[client])
        return client, Update(client, message.model, order.model, order.version, given["samples"], given)

    async def update(self) -> Update | None:
        """The next update; whoever is idle without one gets the present model. None when the run is over."""
        while self.ctx.running:
            client, update = await self.arrival() or (None, None)
            if update is not None:
                return update
            if client is not None:
                self.hand(client)
        return None

    def overdue(self, clients: Collection[int]) -> tuple[float, int | None]:
        """When the last of these clients at work is given up, and which one that is."""
        unknown = SPREAD * min(self.longest.values(), default=inf)
        spans = {c: PATIENCE * self.longest[c] if c in self.longest else unknown for c in clients}
        return max(((self.orders[c].time + span, c) for c, span in spans.items()), default=(inf, None))

    def deadline(self) -> float:
        """When the last client at work is given up; looked for again only once that one has come."""
        if self.longest and self.last not in self.orders:
            self.due, self.last = self.overdue(self.orders)
        return self.due if self.longest else inf

    def forget(self, clients: Collection[int]) -> None:
        """These are not waited for any more."""
        for client in clients:
            del self.orders[client]

    async def round(self, share: float = 1.0) -> list[Update]:
        """Orders to a share of the clients (not to those that fell silent), and their updates by client number.

        A round is open to newcomers until its first update comes. Empty when nobody answered.
        """
        members = self._draw(share)
        for member in sorted(members & self.idle):
            self.hand(member)
        arrived: dict[int, Update] = {}
        while self.ctx.running and (self.orders or not arrived):
            until = self.deadline()
            client, update = await self.arrival(until) or (None, None)
            if update is not None:
                arrived[update.client] = update
            elif client is not None and client in members and not arrived:
                self.hand(client)
            elif client is None and (self.ctx.now >= until or not self.orders):
                self.forget(tuple(self.orders))
                break
        return [arrived[client] for client in sorted(arrived)]

    def _draw(self, share: float) -> set[int]:
        """The members of a round: everybody, or so many of those that are idle (of all, while none is known)."""
        if share >= 1.0:
            return set(range(self.ctx.devices))
        there = sorted(self.idle) or range(self.ctx.devices)
        drawn = self.ctx.random("clients").permutation(there)
        return {int(client) for client in drawn[: ceil(share * self.ctx.devices)]}

    async def step(self, updates: Sequence[Update], weights: Sequence[float]) -> None:
        """Goes along the clients' changes, each by its weight, and publishes the result."""
        (vector,) = await self.ctx.compute(
            Step(self.ctx.task.layout.parameters),
            self.model.vector,
            tuple(update.model.vector for update in updates),
            tuple(update.start.vector for update in updates),
            tuple(weights),
            flops=2 * merging(self.model, len(updates)),
            purpose="aggregation",
        )
        self.publish(replace(self.model, vector=vector), updates, weights=weights)

    def publish(
        self, model: Model, updates: Sequence[Update], saved: Mapping[str, Any] | None = None, **metrics: Any
    ) -> None:
        """Makes `model` the next version; `saved` survives a crash of the server beside it."""
        merged = [(update.client, self.version - update.version) for update in updates]
        self.model, self.version = model, self.version + 1
        self.ctx.publish(model, merged=merged, **metrics)
        self.ctx.save({"model": model, "version": self.version, **(saved or {})})


async def averaging_rounds(ctx: Context, share: float) -> None:
    """FedAvg's server: every round's model is the mean of its updates, weighted by samples."""
    desk = Desk.open(ctx)
    while ctx.running:
        updates = await desk.round(share)
        if updates:
            (vector,) = await ctx.compute(
                WeightedMean(),
                tuple(update.model.vector for update in updates),
                tuple(float(update.samples) for update in updates),
                flops=merging(desk.model, len(updates)),
                purpose="aggregation",
            )
            desk.publish(replace(desk.model, vector=vector), updates)


def merging(model: Model, count: int) -> float:
    """FLOPs of merging that many models."""
    return costs.merging(model.size.parameters, count)
