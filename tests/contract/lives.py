"""Updates, stopping, saved state and crashes."""

from __future__ import annotations

from aedfl.context import Context
from contract.harness import Harness, Note, lapse, near


def check_publish_counts_updates_up_to_the_limit(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        while ctx.running:
            note(ctx.update)
            await ctx.sleep(harness.unit / 10 * (1 + ctx.index))
            ctx.publish(ctx.initial(), loss=1.0, words=["a"])
        note(ctx.update)

    assert harness.run(program, updates=3) == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}


def check_there_is_nothing_to_restore_at_first(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        note(ctx.restore())

    assert harness.run(program) == {0: [None], 1: [None]}


def check_saved_state_survives_a_crash(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        state = ctx.restore()
        if state is not None:
            note([state["number"], state["word"], state["list"], state["dict"]])
            note(await ctx.read(state["model"].vector, state["nested"][0]))
            return
        trained = await ctx.train(ctx.initial())
        note(await ctx.read(trained.model.vector, trained.loss))
        ctx.save({"number": 0, "word": "old"})
        state = {"number": 1, "word": "new", "list": [1, 2.5], "dict": {"a": [1]}}
        ctx.save({**state, "model": trained.model, "nested": [trained.loss]})
        await ctx.sleep(10 * harness.unit)

    notes = harness.run(program, devices=1, changes={0: [(0, "join"), (2, "crash"), (3, "join")]})[0]
    assert notes[1] == [1, "new", [1, 2.5], {"a": [1]}]
    assert notes[0] == notes[2]


def check_saved_state_is_a_copy(harness: Harness) -> None:
    """What is changed after it was saved, or after it was restored, was not saved."""

    async def program(ctx: Context, note: Note) -> None:
        state = ctx.restore()
        note(state)
        if state is None:
            state = {"list": [1], "dict": {"a": [1]}}
            ctx.save(state)
        state["list"].append(2)
        state["dict"]["a"].append(2)
        state["more"] = 3
        await ctx.sleep(4 * harness.unit)

    crashes = [(0, "join"), (1, "crash"), (2, "join"), (3, "crash"), (4, "join")]
    notes = harness.run(program, devices=1, changes={0: crashes})[0]
    assert notes == [None, {"list": [1], "dict": {"a": [1]}}, {"list": [1], "dict": {"a": [1]}}]


def check_a_crash_loses_the_unfinished_update_only(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        state = ctx.restore() or {"model": ctx.initial(), "count": 0}
        note([ctx.update, state["count"], *await ctx.read(state["model"].vector)])
        while ctx.running:
            trained = await ctx.train(state["model"])
            await ctx.sleep(2 * harness.unit)
            ctx.publish(trained.model)
            state = {"model": trained.model, "count": state["count"] + 1}
            ctx.save(state)
            note([ctx.update, state["count"], *await ctx.read(trained.model.vector)])

    notes = harness.run(program, updates=2, changes={0: [(0, "join"), (3, "crash"), (5, "join")]})[0]
    begun, first, restarted, second = notes
    assert [note[:2] for note in notes] == [[0, 0], [1, 1], [1, 1], [2, 2]]
    assert restarted == first and second[2] != first[2] != begun[2]


def check_messages_that_had_arrived_survive_a_crash(harness: Harness) -> None:
    """Those that come while the device is down are lost, and the sender neither waits nor fails."""

    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            for number in range(4):
                await ctx.sleep(harness.unit)
                ctx.send(1, ctx.initial(), number=number)
                note(lapse(harness, ctx.now))
            return
        if ctx.restore() is None:
            ctx.save({"begun": True})
        else:
            await ctx.sleep(harness.unit)
            note([message.fields["number"] for message in ctx.receive()])
        await ctx.sleep(10 * harness.unit)

    changes = {1: [(0, "join"), (2.5, "crash"), (3.5, "join")]}
    notes = harness.run(program, changes=changes, units=8)
    assert notes[0] == [near(1), near(2), near(3), near(4)]
    assert notes[1] == [[0, 1, 3]]


def check_a_message_that_was_taken_does_not_come_again(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            ctx.send(1)
            return
        await ctx.sleep(harness.unit)
        note(len(ctx.receive()))
        await ctx.sleep(3 * harness.unit)

    assert harness.run(program, changes={1: [(0, "join"), (2, "crash"), (3, "join")]})[1] == [1, 0]


def check_a_device_that_left_is_not_waited_for(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        for number in range(3):
            ctx.send(1 - ctx.index, ctx.initial())
            await ctx.sleep(harness.unit)
            note(number)

    notes = harness.run(program, changes={1: [(0, "join"), (1.5, "leave"), (2, "join")]})
    assert notes == {0: [0, 1, 2], 1: [0]}


def check_a_device_may_join_late(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        note([lapse(harness, ctx.now), ctx.restore()])

    assert harness.run(program, changes={1: [(2, "join")]}) == {0: [[near(0), None]], 1: [[near(2), None]]}
