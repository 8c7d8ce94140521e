"""What stays alive, and what follows from the seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aedfl.context import Context
from aedfl.ops import WeightedMean
from aedfl.sim.fleet import Fleet, uniform_seconds
from aedfl.training.plan import Plan, TrainJob, TrainResult
from sim.worlds import FAST, tiny_task, world


async def gossip(ctx: Context, _: Any) -> None:
    """Train, merge with whatever has come, send to one neighbour."""
    model = ctx.initial()
    while ctx.running:
        trained = await ctx.train(model)
        vectors = (trained.model.vector, *(message.model.vector for message in ctx.receive() if message.model))
        weights = (1.0,) * len(vectors)
        (vector,) = await ctx.compute(WeightedMean(), vectors, weights, flops=100.0, purpose="merging")
        model = replace(trained.model, vector=vector)
        ctx.send(int(ctx.random("neighbour").choice(ctx.out_neighbours)), model)
        ctx.publish(model, loss=trained.loss)
        ctx.save({"model": model})


def fleet(devices: int, seed: int = 0) -> Fleet:
    return Fleet(uniform_seconds(devices, 1.0, 15.0, seed), {})


class Lazy:
    """A trainer that learns nothing, quickly."""

    def train(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        zero = torch.zeros(())
        return [TrainResult(job.vector, zero, zero, zero) for job in jobs]


def test_values_alive_grow_with_devices_and_not_with_updates_or_pairs() -> None:
    """2,000 devices: what is held are own models, and those on their way or in a mailbox."""
    devices = 2000
    made = world(
        gossip,
        devices=devices,
        task=tiny_task(5),
        rows=[np.arange(2)] * devices,
        fleet=fleet(devices),
        topology="exponential",
        trainer=Lazy(),
    )
    alive = []
    for until in (15.0, 30.0, 45.0):
        made.run(until)
        alive.append(len(made.sim.work.alive))
    assert made.sim.updates > 4 * devices
    assert max(alive) < 12 * devices and alive[2] < 1.2 * alive[1]


def test_values_that_nobody_holds_are_gone_at_once() -> None:
    async def program(ctx: Context, _: Any) -> None:
        while ctx.running:
            ctx.publish((await ctx.train(ctx.initial())).model)

    made = world(program, devices=3, updates=50).run()
    assert len(made.sim.work.alive) <= 1 + 3


def test_what_is_saved_is_kept_only_where_a_crash_may_come() -> None:
    async def program(ctx: Context, _: Any) -> None:
        model = (ctx.restore() or {"model": ctx.initial()})["model"]
        while ctx.running:
            ctx.save({"model": model})
            model = (await ctx.train(model)).model
            ctx.publish(model)

    def held(made: Any) -> list[bool]:
        return [context.restore() is not None for context in made.sim.contexts]

    changes = {
        0: [(0, "join"), (2.5, "crash"), (3, "join"), (1e9, "crash")],
        1: [(0, "join"), (2.5, "crash"), (3, "join")],
    }
    made = world(program, devices=3, seconds=1.0, changes=changes, updates=9)
    assert held(made.run(2.6)) == [True, True, False]
    assert held(made.run(4.9)) == [True, False, False]
    assert [context.update for context in made.sim.contexts] == [3, 3, 4]


def test_devices_that_are_done_do_not_pile_up_what_slower_ones_send() -> None:
    """Device 0 is done after 20 of the 1,000 seconds; nobody will ever look at the 20 models that it is sent then."""
    made = world(gossip, devices=2, updates=20, fleet=Fleet((1.0, 50.0), {})).run()
    assert made.sim.updates == 40 and made.sim.network.lost == 0
    assert len(made.sim.contexts[0].mailbox.messages) == 0
    assert len(made.sim.work.alive) < 10


def test_a_message_that_came_is_not_kept_until_the_time_for_it_has_passed() -> None:
    """Device 1 would wait 1,000 seconds for each of the models that come every second."""
    came: list[bool] = []

    async def program(ctx: Context, _: Any) -> None:
        while ctx.running and ctx.index == 0:
            model = (await ctx.train(ctx.initial())).model
            ctx.publish(model)
            ctx.send(1, model)
        while ctx.running and ctx.index == 1:
            came.append(await ctx.wait(timeout=1000.0) is not None)

    made = world(program, devices=2, seconds=1.0, updates=50).run(until=60.0)
    assert came == [True] * 50
    assert len(made.sim.work.alive) < 10


def test_a_device_that_is_done_still_answers_while_a_second_coroutine_of_it_runs() -> None:
    answered: list[float] = []

    async def answer(ctx: Context) -> None:
        while (message := await ctx.wait()) is not None:
            answered.append(message.fields["number"])

    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 0:
            ctx.spawn(answer(ctx))
        while ctx.running:
            ctx.publish((await ctx.train(ctx.initial())).model)
            if ctx.index == 1:
                ctx.send(0, number=ctx.update)

    world(program, devices=2, updates=5, fleet=Fleet((1.0, 50.0), {})).run()
    assert answered == [1, 2, 3, 4]  # the fifth is on its way when the last program ends


def rows(seed: int = 0, lookahead: int = 256, loss: float = 0.2) -> list[Any]:
    """Everything that an observer can see of a small run with lost messages and crashes, values included."""
    seen: list[Any] = []
    lives = {"fleet": Fleet(uniform_seconds(5, 0.5, 4.0, seed), {}, mean_up=8.0, mean_down=2.0, seed=seed)}

    def observe(ctx: Any, since: float, metrics: Any) -> None:
        seen.append((ctx.now, since, ctx.index, ctx.update, metrics["loss"], ctx.model.vector))

    links = replace(FAST, loss=loss)
    made = world(gossip, devices=5, links=links, seed=seed, lookahead=lookahead, updates=8, observer=observe, **lives)
    made.run()
    return [(*row[:4], row[4].get().item(), tuple(row[5].get().tolist())) for row in seen]


def test_a_run_follows_from_its_seed() -> None:
    first = rows(seed=3)
    assert len(first) == 40 and first == rows(seed=3)
    other = rows(seed=4)
    assert [row[0] for row in first] != [row[0] for row in other]
    assert {row[5] for row in first}.isdisjoint({row[5] for row in other})


@pytest.mark.parametrize("lookahead", [1, 3, 7])
def test_a_run_does_not_depend_on_how_its_jobs_were_batched(lookahead: int) -> None:
    assert rows(lookahead=lookahead) == rows()


@pytest.mark.parametrize(("lookahead", "largest"), [(2, 2), (256, 5)])
def test_lookahead_bounds_what_waits_to_be_computed(lookahead: int, largest: int) -> None:
    made = world(gossip, devices=5, updates=3, lookahead=lookahead).run()
    assert max(made.queue.batches) == largest and sum(made.queue.batches) == 15
