"""Devices that come and go, programs that end or wait for ever."""

from __future__ import annotations

from typing import Any

import pytest

from aedfl.context import SERVER, Context
from aedfl.errors import Deadlock
from aedfl.sim.fleet import Fleet
from aedfl.sim.network import Links
from sim.worlds import World, world


async def learn(ctx: Context, _: Any) -> None:
    state = ctx.restore() or {"model": ctx.initial()}
    while ctx.running:
        state = {"model": (await ctx.train(state["model"])).model}
        ctx.publish(state["model"])
        ctx.save(state)


class Updates:
    """What an observer sees: (time, device, update) of everything that was published."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, int]] = []

    def __call__(self, ctx: Any, since: float, metrics: Any) -> None:
        self.rows.append((round(ctx.now, 9), ctx.index, ctx.update))


def learned(changes: Any = None, until: float = 1e6, **settings: Any) -> tuple[World, list[Any]]:
    seen = Updates()
    settings = {"seconds": 1.0, "updates": 3, "devices": 1} | settings
    return world(learn, changes=changes, observer=seen, **settings).run(until), seen.rows


def test_a_crash_in_the_middle_of_training_loses_that_training_only() -> None:
    made, rows = learned({0: [(0, "join"), (1.5, "crash"), (4, "join")]})
    assert rows == [(1.0, 0, 1), (5.0, 0, 2), (6.0, 0, 3)]
    assert made.sim.samples == 18 and made.sim.costs == {"training": pytest.approx(3.0)}


def test_what_a_crash_interrupted_is_never_computed() -> None:
    made, _ = learned({0: [(0, "join"), (1.5, "crash"), (4, "join")]})
    assert sum(made.queue.batches) == 3


def test_a_crash_changes_nothing_for_others() -> None:
    _, alone = learned(devices=2)
    _, beside = learned({0: [(0, "join"), (1.5, "crash"), (4, "join")]}, devices=2)
    assert [row for row in alone if row[1] == 1] == [row for row in beside if row[1] == 1]


def test_a_device_joins_late() -> None:
    assert learned({0: [(2.5, "join")]}, updates=2)[1] == [(3.5, 0, 1), (4.5, 0, 2)]


def test_a_device_that_left_never_comes_back() -> None:
    made, rows = learned({0: [(0, "join"), (1.5, "leave"), (2, "join")]})
    assert rows == [(1.0, 0, 1)] and made.sim.done


def test_changes_that_change_nothing_are_passed_over() -> None:
    """A second crash, a join of a device that is there."""
    changes = [(0, "join"), (0.5, "join"), (1.5, "crash"), (1.7, "crash"), (2, "join")]
    assert learned({0: changes})[1] == [(1.0, 0, 1), (3.0, 0, 2), (4.0, 0, 3)]


def test_a_device_that_crashed_for_good_does_not_keep_the_run_going() -> None:
    made, rows = learned({0: [(0, "join"), (1.5, "crash")]}, devices=2)
    assert made.sim.done and made.sim.time == 3.0 and len(rows) == 4


def test_a_run_ends_though_devices_come_and_go_for_ever() -> None:
    """All of ten are there at once next to never; it is enough that each of them has been done."""
    fleet = Fleet((0.1,) * 10, {}, mean_up=1.0, mean_down=1.0, seed=1)
    made, rows = learned(devices=10, fleet=fleet, until=500.0)
    assert made.sim.done and made.sim.time == pytest.approx(rows[-1][0]) and made.sim.time < 100.0
    assert sorted(row[1:] for row in rows) == [(device, update) for device in range(10) for update in (1, 2, 3)]


def test_a_run_ends_though_one_left_and_others_come_and_go() -> None:
    fleet = Fleet((0.1,) * 3, {0: ((0.0, "join"), (0.05, "leave"))}, mean_up=1.0, mean_down=1.0)
    made, rows = learned(devices=3, fleet=fleet, until=500.0)
    assert made.sim.done and {row[1] for row in rows} == {1, 2}


def test_a_device_down_at_the_limit_was_not_done() -> None:
    made, _ = learned({0: [(0, "join"), (1.5, "crash"), (40, "join")]}, until=20.0)
    assert not made.sim.done


def test_a_deadlock_names_who_waits_for_what() -> None:
    async def program(ctx: Context, _: Any) -> None:
        await ctx.sleep(1.5)
        await ctx.wait(kind="model" if ctx.index else None)

    with pytest.raises(Deadlock) as error:
        world(program).run()
    assert str(error.value) == (
        "nothing can happen any more at virtual time 1.5 s: "
        "waiting are device 0 for any message, device 1 for a message of kind 'model'"
    )


def test_a_deadlock_names_the_server() -> None:
    async def wait(ctx: Context, _: Any) -> None:
        await ctx.wait(kind="reply" if ctx.index == SERVER else "order")

    with pytest.raises(Deadlock, match="device 1 for .* 'order', the server for a message of kind 'reply'"):
        world(wait, wait).run()


def test_a_deadlock_of_many_names_a_few() -> None:
    async def program(ctx: Context, _: Any) -> None:
        await ctx.wait()

    with pytest.raises(Deadlock, match="device 7 for any message and 3 more$"):
        world(program, devices=11).run()


def test_one_that_waits_for_ever_is_a_deadlock_though_others_are_done() -> None:
    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 1:
            await ctx.wait()

    with pytest.raises(Deadlock, match="waiting are device 1 for any message$"):
        world(program).run()


def test_a_deadlock_does_not_name_those_who_are_done() -> None:
    """Their second coroutines may wait for ever to answer others."""

    async def answer(ctx: Context) -> None:
        await ctx.wait(kind="question")

    async def program(ctx: Context, _: Any) -> None:
        ctx.spawn(answer(ctx))
        await ctx.sleep(1.0)
        if ctx.index == 1:
            await ctx.wait(kind="never")

    with pytest.raises(Deadlock) as error:
        world(program).run()
    assert "device 0" not in str(error.value) and "device 1 for a message of kind 'never'" in str(error.value)


def test_waiting_with_a_timeout_is_no_deadlock() -> None:
    async def program(ctx: Context, _: Any) -> None:
        assert await ctx.wait(timeout=3.0) is None

    assert world(program).run().sim.time == 3.0


def test_a_device_that_will_join_is_no_deadlock() -> None:
    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 0:
            await ctx.wait()
        else:
            ctx.send(0)

    assert world(program, changes={1: [(9.0, "join")]}).run().sim.time == pytest.approx(9.05)


def test_a_message_that_a_cancelled_waiter_was_just_handed_is_not_lost() -> None:
    """It arrives, and in the same instant, before the waiter has seen it, the waiter is cancelled."""
    taken: list[int] = []

    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 0:
            ctx.send(1, number=1)
            return
        waiter = ctx.spawn(_take(ctx, taken))
        await ctx.sleep(1.0)
        waiter.cancel()
        await ctx.sleep(1.0)
        taken.extend(10 * message.fields["number"] for message in ctx.receive())

    world(program, links=Links(1.0, float("inf"))).run()
    assert taken == [10]


def test_a_message_that_a_crashing_waiter_was_just_handed_is_not_lost() -> None:
    taken: list[int] = []

    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 0:
            ctx.send(1, number=1)
        elif ctx.restore() is None:
            ctx.save({"begun": True})
            await _take(ctx, taken)
        else:
            taken.extend(10 * message.fields["number"] for message in ctx.receive())

    changes = {1: [(0, "join"), (0.5, "join"), (1.0, "crash"), (2.0, "join")]}
    world(program, links=Links(1.0, float("inf")), changes=changes).run()
    assert taken == [10]


async def _take(ctx: Context, taken: list[int]) -> None:
    message = await ctx.wait()
    assert message is not None
    taken.append(message.fields["number"])


def test_what_was_published_or_sent_is_a_copy() -> None:
    rows: list[Any] = []
    got: list[Any] = []

    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 0:
            mine = [1]
            ctx.publish(ctx.initial(), merged=mine)
            ctx.send(1, merged=mine)
            mine.append(2)
        else:
            message = await ctx.wait()
            assert message is not None
            got.append(message.fields["merged"])

    world(program, observer=lambda ctx, since, metrics: rows.append(metrics)).run()
    assert rows == [{"merged": [1]}] and got == [[1]]
