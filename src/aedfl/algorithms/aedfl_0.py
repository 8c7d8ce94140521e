"""AEDFL-0: AEDFL (Liu et al., 2024) without its three modules.

Each device trains, merges its model with those received since it last merged, weighted by their samples, and
sends the result to one random out-neighbour. Nobody waits for anybody.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .. import costs
from ..context import Context, Message, Method
from ..ops import WeightedMean


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of AEDFL-0."""

    reuse_merged: bool = field(
        default=False, metadata={"help": "merge every cached model at every update, also those merged before"}
    )


async def device(ctx: Context, hyper: Hyper) -> None:
    state = ctx.restore() or {"model": ctx.initial(), "cache": {}}
    model, cache = state["model"], dict(state["cache"])
    while ctx.running:
        trained = await ctx.train(model)
        for message in ctx.receive():
            cache[message.source] = (message, ctx.update)
        entries: list[tuple[Message, int]] = list(cache.values())
        sources = [(trained.model, ctx.samples)] + [(m.model, m.fields["samples"]) for m, _ in entries]
        (vector,) = await ctx.compute(
            WeightedMean(),
            tuple(m.vector for m, _ in sources),
            tuple(float(s) for _, s in sources),
            flops=costs.merging(model.size.parameters, len(sources)),
            purpose="merging",
        )
        model = replace(trained.model, vector=vector)
        merged = [(m.source, ctx.update + 1 - arrived) for m, arrived in entries]
        if not hyper.reuse_merged:
            cache.clear()
        if ctx.out_neighbours:
            target = int(ctx.random("neighbour").choice(ctx.out_neighbours))
            ctx.send(target, model, samples=ctx.samples)
        ctx.publish(model, loss=trained.loss, merged=merged)
        ctx.save({"model": model, "cache": dict(cache)})


METHOD = Method("aedfl-0", "sample-weighted merging of newly received models, asynchronous", Hyper(), device)
