"""A method that does everything which is hard to resume.

It reads values and decides by them, has a second coroutine that answers others, and messages are on their way
whenever a checkpoint is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from aedfl.context import Context, Method
from aedfl.ops import WeightedMean


@dataclass(frozen=True)
class Hyper:
    patience: float = 1.5


async def answer(ctx: Context, state: dict[str, Any]) -> None:
    """Gives the newest model to whoever asks; refuses where its own loss is worse."""
    while True:
        message = await ctx.wait(kind="ask")
        assert message is not None
        mine, theirs = await ctx.read(state["loss"], message.fields["loss"])
        if mine <= theirs:
            ctx.send(message.source, state["model"], kind="give", loss=state["loss"])
        else:
            ctx.send(message.source, kind="give")


async def device(ctx: Context, hyper: Hyper) -> None:
    trained = await ctx.train(ctx.initial())
    state: dict[str, Any] = ctx.restore() or {"model": trained.model, "loss": trained.loss, "asked": 0, "got": 0}
    ctx.spawn(answer(ctx, state))
    while ctx.running:
        trained = await ctx.train(state["model"])
        state |= {"model": trained.model, "loss": trained.loss}
        loss, vector = await ctx.read(trained.loss, trained.model.vector)
        vector.sort()
        middle = vector[len(vector) // 2]
        if ctx.random("ask").random() < 0.9 and loss > 0.05:
            target = int(ctx.random("neighbour").choice(ctx.out_neighbours))
            ctx.send(target, kind="ask", loss=trained.loss)
            state["asked"] += 1
            reply = await ctx.wait(timeout=hyper.patience + loss, kind="give")
            if reply is not None and reply.model is not None:
                vectors = (trained.model.vector, reply.model.vector)
                (merged,) = await ctx.compute(WeightedMean(), vectors, (1.0, 1.0), flops=1e4, purpose="merging")
                state["model"] = replace(trained.model, vector=merged)
                state["got"] += 1
        ctx.publish(state["model"], loss=trained.loss, middle=middle, asked=state["asked"], got=state["got"])
        ctx.save(state)


METHOD = Method("nosy", "asks before it takes", Hyper(), device)
