"""AD-PSGD: Lian, Zhang, Zhang, Liu, *Asynchronous decentralized parallel stochastic gradient descent*, ICML 2018.

A device computes a gradient on a snapshot of its model, picks one neighbour at random, both models become
their average, atomically, and then it applies the gradient to its own. Meanwhile it answers neighbours that picked it.

Adapted: the gradient is the change of a whole local update, so that a device averages once per local update as in
every method here. The paper avoids deadlock by a bipartite graph; here any graph will do. A device whose
question is open refuses all others (its model must not change until the answer), and the asker tries its next
neighbour; so nobody waits for somebody who waits. Two that ask each other at the same time both answer, and
since both know both models, both get the same average. A neighbour that does not answer is not asked again
until it has been heard of. Neighbours are in- and out-neighbours together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from .. import costs, forms
from ..context import Context, Message, Method, Model, option
from ..graph import Job, Op
from ..ops import Step
from ..rules.merge import pairwise_average


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of AD-PSGD."""

    answer_seconds: float = option(30.0, "how long to wait for a neighbour's answer")


@dataclass(frozen=True)
class Average(Op):
    """Jobs are (left, right); the result is their average, the same bits in either order."""

    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [(pairwise_average(left, right),) for left, right in jobs]


@dataclass
class Node:
    """What a device's two coroutines share. It changes only between two of their `await`s."""

    model: Model
    asked: int | None = None
    """The neighbour whose answer is open; until it comes, the model does not change."""
    question: int = 0
    silent: set[int] = field(default_factory=set)


async def device(ctx: Context, hyper: Hyper) -> None:
    state = ctx.restore() or {"model": ctx.initial(), "question": 0}
    node = Node(state["model"], question=state["question"])
    ctx.spawn(answer(ctx, node))
    while ctx.running:
        snapshot = node.model
        trained = await ctx.train(snapshot)
        partner = await ask_around(ctx, node, hyper.answer_seconds)
        await apply(ctx, node, trained.model, snapshot)
        merged = [] if partner is None else [(partner, 1)]
        ctx.publish(node.model, loss=trained.loss, merged=merged)
        ctx.save({"model": node.model, "question": node.question})


async def ask_around(ctx: Context, node: Node, patience: float) -> int | None:
    """Averages with the first neighbour, in random order, that is free; the neighbour, or None if nobody is."""
    neighbours = sorted({*ctx.in_neighbours, *ctx.out_neighbours} - {ctx.index})
    for number in ctx.random("neighbour").permutation(neighbours).tolist():
        if number in node.silent:
            continue
        node.asked, node.question = number, node.question + 1
        ctx.send(number, node.model, kind="average", question=node.question)
        reply = await reply_to(ctx, node, patience)
        node.asked = None
        if reply is None:
            node.silent.add(number)
        elif reply.model is not None:
            node.model = replace(node.model, vector=reply.model.vector)
            return int(number)
    return None


async def reply_to(ctx: Context, node: Node, patience: float) -> Message | None:
    """The answer to the open question; answers to older ones came too late and are dropped."""
    end = ctx.now + patience
    while True:
        reply = await ctx.wait(max(0.0, end - ctx.now), kind="answer")
        if reply is None or reply.fields["question"] == node.question:
            return reply


async def answer(ctx: Context, node: Node) -> None:
    """Averages with whoever asks, unless the own question is open to somebody else."""
    while True:
        question = await ctx.wait(kind="average")
        assert question is not None and question.model is not None
        node.silent.discard(question.source)
        average = None
        while average is None and node.asked in (None, question.source):
            crossing, before = node.asked == question.source, node.model
            (vector,) = await ctx.compute(
                Average(),
                before.vector,
                question.model.vector,
                flops=costs.merging(before.size.parameters, 2),
                purpose="merging",
            )
            if crossing:
                average = replace(before, vector=vector)
            elif node.asked is None and node.model is before:
                average = node.model = replace(before, vector=vector)
        ctx.send(question.source, average, kind="answer", question=question.fields["question"])


async def apply(ctx: Context, node: Node, end: Model, start: Model) -> None:
    """Adds the change of the local update to the present model; again, if a neighbour changed that meanwhile."""
    while True:
        before = node.model
        (vector,) = await ctx.compute(
            Step(ctx.task.layout.parameters),
            before.vector,
            (end.vector,),
            (start.vector,),
            (1.0,),
            flops=costs.merging(before.size.parameters, 2),
            purpose="merging",
        )
        if node.model is before:
            node.model = replace(before, vector=vector)
            return


METHOD = Method(
    "ad-psgd", "asynchronous pairwise averaging", Hyper(), device, paper="Lian et al., ICML 2018",
    messages={
        "average": forms.Form({"question": forms.count}),
        "answer": forms.Form({"question": forms.count}, model=None),
    },
)  # fmt: skip
