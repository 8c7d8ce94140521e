"""Time, and second coroutines of a device."""

from __future__ import annotations

import pytest

from aedfl.context import Context
from contract.harness import Harness, Note, lapse, near


def check_sleep_lets_time_pass(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        before = ctx.now
        await ctx.sleep(2 * harness.unit)
        note(lapse(harness, ctx.now - before))
        await ctx.sleep(0)
        note(lapse(harness, ctx.now - before))

    assert harness.run(program, devices=1)[0] == [near(2), near(2)]


def check_the_clock_never_goes_back(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        note(ctx.now)
        model = ctx.initial()
        for _ in range(3):
            model = (await ctx.train(model)).model
            note(ctx.now)
            await ctx.read(model.vector)
            note(ctx.now)

    for times in harness.run(program).values():
        assert times == sorted(times) and times[0] >= 0


def check_nothing_of_a_device_runs_between_awaits(harness: Harness) -> None:
    async def add(ctx: Context, shared: list[int]) -> None:
        for _ in range(20):
            value = shared[0]
            _ = [ctx.receive() for _ in range(20)]
            shared[0] = value + 1
            await ctx.sleep(0)

    async def program(ctx: Context, note: Note) -> None:
        shared = [0]
        ctx.spawn(add(ctx, shared))
        note(shared[0])
        await add(ctx, shared)
        await ctx.sleep(harness.unit)
        note(shared[0])

    assert harness.run(program, devices=1)[0] == [0, 40]


def check_cancel_ends_a_coroutine_where_it_waits(harness: Harness) -> None:
    async def second(ctx: Context, note: Note) -> None:
        note("begun")
        await ctx.sleep(2 * harness.unit)
        note("never")

    async def program(ctx: Context, note: Note) -> None:
        spawned = ctx.spawn(second(ctx, note))
        await ctx.sleep(harness.unit)
        spawned.cancel()
        spawned.cancel()
        await ctx.sleep(3 * harness.unit)
        spawned.cancel()

    assert harness.run(program, devices=1)[0] == ["begun"]


def check_a_second_coroutine_trains_and_waits_too(harness: Harness) -> None:
    async def answer(ctx: Context) -> None:
        while True:
            message = await ctx.wait(kind="question")
            trained = await ctx.train(ctx.initial())
            ctx.send(message.source, trained.model, kind="answer")

    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 1:
            ctx.spawn(answer(ctx))
            await ctx.sleep(4 * harness.unit)
            return
        for _ in range(2):
            ctx.send(1, kind="question")
            note((await ctx.wait(kind="answer")).model is not None)

    assert harness.run(program)[0] == [True, True]


def check_an_endless_second_coroutine_does_not_keep_a_run_going(harness: Harness) -> None:
    async def answer(ctx: Context) -> None:
        while True:
            await ctx.wait()

    async def program(ctx: Context, note: Note) -> None:
        ctx.spawn(answer(ctx))
        await ctx.sleep(harness.unit)
        note("done")

    assert harness.run(program) == {0: ["done"], 1: ["done"]}


def check_a_second_coroutine_ends_with_its_device(harness: Harness) -> None:
    async def tick(ctx: Context, note: Note) -> None:
        while True:
            await ctx.sleep(harness.unit)
            note("tick")

    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0 and ctx.restore() is None:
            ctx.save({"begun": True})
            ctx.spawn(tick(ctx, note))
        await ctx.sleep(6 * harness.unit)

    notes = harness.run(program, changes={0: [(0, "join"), (2.5, "crash"), (3, "join")]})
    assert notes[0] == ["tick", "tick"]


def check_an_error_in_a_program_is_not_swallowed(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        await ctx.sleep(harness.unit)
        raise ValueError("on purpose")

    with pytest.raises(Exception, match="on purpose"):
        harness.run(program, devices=1)
