"""Devices and what they send each other."""

from __future__ import annotations

from aedfl.context import SERVER, Context
from contract.harness import Harness, Note, Total, lapse, near
from sim.worlds import HELD, OWN, tiny_task


def check_a_device_knows_itself(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        note([ctx.index, ctx.devices, ctx.samples, ctx.held_out, ctx.update])

    assert harness.run(program, devices=3) == {i: [[i, 3, OWN, HELD, 0]] for i in range(3)}


def check_neighbours_are_fixed_and_agree(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        note([list(ctx.in_neighbours), list(ctx.out_neighbours)])
        await ctx.sleep(harness.unit)
        note([list(ctx.in_neighbours), list(ctx.out_neighbours)])

    notes = harness.run(program, devices=5, topology="exponential")
    assert all(first == second for first, second in notes.values())
    graph = {index: both[0] for index, both in notes.items()}
    assert graph[0][0] == [4, 3, 1]
    for i in graph:
        assert i not in graph[i][0] + graph[i][1]
        assert all((j in graph[i][1]) == (i in graph[j][0]) for j in graph)


def check_all_devices_start_from_one_model(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        note(await ctx.read(ctx.initial().vector))
        note(ctx.initial().mask)

    notes = harness.run(program)
    assert notes[0] == notes[1] == [[tiny_task().start.tolist()], None]


def check_a_device_knows_what_has_not_left_it(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            note([ctx.waiting(1), ctx.waiting(2)])
            ctx.send(1, ctx.initial())
            note([ctx.waiting(1), ctx.waiting(2)])
            await ctx.wait(kind="thanks")
            await ctx.sleep(harness.unit)
            note([ctx.waiting(1), ctx.waiting(2)])
        elif ctx.index == 1:
            await ctx.wait()
            ctx.send(0, kind="thanks")

    before, sending, after = harness.run(program, devices=3)[0]
    assert before == after == [False, False]
    assert not sending[1]  # and to whom it was sent: until it has left, which may be at once


def check_messages_of_one_sender_arrive_in_order(harness: Harness) -> None:
    """Also when large and small ones follow each other; a model may be left out if a newer one was sent after it."""

    async def program(ctx: Context, note: Note) -> None:
        for number in range(20 if ctx.index == 0 else 0):
            ctx.send(1, ctx.initial() if number % 3 == 0 else None, number=number)
            await ctx.sleep(harness.unit / 100 * (number % 2))
        number = 19 if ctx.index == 0 else -1
        while number < 19:
            number = (await ctx.wait()).fields["number"]
            note(number)

    arrived = harness.run(program)[1]
    assert arrived == sorted(set(arrived)) and arrived[-1] == 19
    assert all(number % 3 == 0 for number in set(range(20)) - set(arrived))


def check_a_message_is_whole(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            (value,) = await ctx.compute(Total(), ctx.initial().vector, (), flops=1.0, purpose="test")
            ctx.send(1, ctx.initial(), kind="greeting", number=3, word="yes", pair=(1, 2.5), value=value)
            return
        message = await ctx.wait()
        number, word, pair, value = (message.fields[name] for name in ("number", "word", "pair", "value"))
        note([message.source, message.kind, number, word, list(pair), *await ctx.read(value)])
        note(await ctx.read(message.model.vector))

    start = tiny_task().start
    notes = harness.run(program)[1]
    assert notes == [[0, "greeting", 3, "yes", [1, 2.5], start.sum().item()], [start.tolist()]]


def check_receive_drains_and_never_waits(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            for number in range(3):
                ctx.send(1, number=number)
            return
        note(len(ctx.receive()))
        await ctx.sleep(harness.unit)
        before = ctx.now
        note([message.fields["number"] for message in ctx.receive()])
        note(len(ctx.receive()))
        note(lapse(harness, ctx.now - before))

    assert harness.run(program)[1] == [0, [0, 1, 2], 0, near(0)]


def check_wait_gives_the_oldest_message(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            ctx.send(1, number=0)
            ctx.send(1, number=1)
            return
        await ctx.sleep(harness.unit)
        note((await ctx.wait()).fields["number"])
        note([message.fields["number"] for message in ctx.receive()])

    assert harness.run(program)[1] == [0, [1]]


def check_wait_ends_with_the_message(harness: Harness) -> None:
    """Not with the timeout."""

    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            await ctx.sleep(2 * harness.unit)
            ctx.send(1)
            return
        before = ctx.now
        message = await ctx.wait(timeout=8 * harness.unit)
        note([message is not None, lapse(harness, ctx.now - before)])

    assert harness.run(program)[1] == [[True, near(2)]]


def check_wait_times_out(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        before = ctx.now
        message = await ctx.wait(timeout=2 * harness.unit)
        note([message is None, lapse(harness, ctx.now - before)])

    assert harness.run(program, devices=1)[0] == [[True, near(2)]]


def check_wait_of_zero_only_looks(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            ctx.send(1, number=4)
            return
        before = ctx.now
        note((await ctx.wait(timeout=0)) is None)
        note(lapse(harness, ctx.now - before))
        await ctx.sleep(harness.unit)
        note((await ctx.wait(timeout=0)).fields["number"])

    assert harness.run(program)[1] == [True, near(0), 4]


def check_wait_passes_over_other_kinds(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            for kind in "aba":
                ctx.send(1, kind=kind)
            return
        note((await ctx.wait(kind="b")).kind)
        await ctx.sleep(harness.unit)
        note([message.kind for message in ctx.receive()])

    assert harness.run(program)[1] == ["b", ["a", "a"]]


def check_waiters_are_served_in_turn(harness: Harness) -> None:
    async def waiter(ctx: Context, note: Note, name: int) -> None:
        note([name, (await ctx.wait()).fields["number"]])

    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            await ctx.sleep(2 * harness.unit)
            for number in range(3):
                ctx.send(1, number=number)
            return
        for name in range(3):
            ctx.spawn(waiter(ctx, note, name))
            await ctx.sleep(harness.unit / 4)
        await ctx.sleep(3 * harness.unit)

    assert harness.run(program)[1] == [[0, 0], [1, 1], [2, 2]]


def check_a_waiter_for_one_kind_holds_nobody_up(harness: Harness) -> None:
    async def waiter(ctx: Context, note: Note, kind: str | None) -> None:
        note([kind, (await ctx.wait(kind=kind)).kind])

    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            await ctx.sleep(harness.unit)
            ctx.send(1, kind="b")
            ctx.send(1, kind="a")
            return
        ctx.spawn(waiter(ctx, note, "a"))
        await ctx.sleep(harness.unit / 4)
        ctx.spawn(waiter(ctx, note, None))
        await ctx.sleep(2 * harness.unit)

    assert harness.run(program)[1] == [[None, "b"], ["a", "a"]]


def check_a_waiter_that_gave_up_takes_nothing(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            await ctx.sleep(2 * harness.unit)
            ctx.send(1)
            return
        note((await ctx.wait(timeout=harness.unit)) is None)
        await ctx.sleep(2 * harness.unit)
        note(len(ctx.receive()))

    assert harness.run(program)[1] == [True, 1]


def check_a_cancelled_waiter_takes_nothing(harness: Harness) -> None:
    async def waiter(ctx: Context, note: Note) -> None:
        await ctx.wait()
        note("taken")

    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            await ctx.sleep(2 * harness.unit)
            ctx.send(1)
            return
        spawned = ctx.spawn(waiter(ctx, note))
        await ctx.sleep(harness.unit)
        spawned.cancel()
        await ctx.sleep(2 * harness.unit)
        note(len(ctx.receive()))

    assert harness.run(program)[1] == [1]


def check_send_takes_no_time(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        before = ctx.now
        for _ in range(20 if ctx.index == 0 else 0):
            ctx.send(1, ctx.initial())
        note(lapse(harness, ctx.now - before))

    assert harness.run(program)[0] == [near(0)]


def check_what_was_sent_never_changes(harness: Harness) -> None:
    """The sender trains on, the receiver trains the copy it got: neither changes the model that travelled."""

    async def program(ctx: Context, note: Note) -> None:
        if ctx.index == 0:
            model = (await ctx.train(ctx.initial())).model
            note(await ctx.read(model.vector))
            ctx.send(1, model)
            note(await ctx.read((await ctx.train(model)).model.vector))
            await ctx.sleep(2 * harness.unit)
            note(await ctx.read(model.vector))
            return
        model = (await ctx.wait()).model
        note(await ctx.read(model.vector))
        note(await ctx.read((await ctx.train(model)).model.vector))
        await ctx.sleep(harness.unit)
        note(await ctx.read(model.vector))

    (sent, own, sent_later), (got, trained, got_later) = harness.run(program).values()
    assert sent == sent_later == got == got_later
    assert own != sent and trained != sent


def check_a_server_talks_to_its_clients(harness: Harness) -> None:
    async def server(ctx: Context, note: Note) -> None:
        note([ctx.index, ctx.devices, len(ctx.in_neighbours)])
        for _ in range(ctx.devices):
            message = await ctx.wait(kind="hello")
            ctx.send(message.source, message.model, kind="welcome", number=message.fields["number"] + 10)
        await ctx.sleep(harness.unit)

    async def client(ctx: Context, note: Note) -> None:
        ctx.send(SERVER, ctx.initial(), kind="hello", number=ctx.index)
        reply = await ctx.wait(kind="welcome")
        note([reply.source, reply.fields["number"]])

    notes = harness.run(client, server=server, devices=3)
    assert notes[SERVER] == [[SERVER, 3, 0]]
    assert [notes[index] for index in range(3)] == [[[SERVER, 10 + index]] for index in range(3)]


def check_a_run_ends_with_its_server(harness: Harness) -> None:
    async def server(ctx: Context, note: Note) -> None:
        await ctx.sleep(harness.unit)
        note("done")

    async def client(ctx: Context, note: Note) -> None:
        await ctx.wait()

    assert harness.run(client, server=server) == {SERVER: ["done"], 0: [], 1: []}


def check_a_server_runs_until_it_has_taken_everything(harness: Harness) -> None:
    async def server(ctx: Context, note: Note) -> None:
        taken = 0
        while ctx.running:
            await ctx.sleep(harness.unit / 2)
            taken += len(ctx.receive())
        note(taken)

    async def client(ctx: Context, note: Note) -> None:
        while ctx.running:
            await ctx.sleep(harness.unit)
            ctx.publish(ctx.initial())
            ctx.send(SERVER, ctx.initial())

    assert harness.run(client, server=server, devices=3, updates=2)[SERVER] == [6]
