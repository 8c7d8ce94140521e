"""Virtual times and bytes, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from aedfl.context import SERVER, Context, Model, Size
from aedfl.sim.network import Links
from contract.harness import Scaled
from sim.worlds import PLAN, tiny_rows, world

MODEL_BYTES = 256 + 4 * 15
SLOW = Links(latency=0.5, bandwidth=8.0 * MODEL_BYTES, server_bandwidth=16.0 * MODEL_BYTES)
"""A model takes a second on a device's link and half of one on the server's; then half a second of latency."""


def times(program: Any, server: Any = None, **settings: Any) -> dict[int, list[float]]:
    """When each device noted something."""
    noted: dict[int, list[float]] = {}

    def noting(inner: Any) -> Any:
        async def run(ctx: Context, _: Any) -> None:
            await inner(ctx, lambda: noted.setdefault(ctx.index, []).append(ctx.now))

        return run

    world(noting(program), server and noting(server), **settings).run()
    return noted


async def train_once(ctx: Context, note: Any) -> None:
    await ctx.train(ctx.initial())
    note()


def test_training_takes_the_devices_seconds() -> None:
    assert times(train_once, seconds=[2.0, 5.0]) == {0: [2.0], 1: [5.0]}


def test_work_that_came_with_an_earlier_job_takes_its_time_too() -> None:
    """A local update of 15 parameters is 12 MACs x 6 samples x 6 operations in 2 s; half of that is spent twice."""

    async def program(ctx: Context, note: Any) -> None:
        await ctx.compute(Scaled(2.0), ctx.known(torch.ones(1)), flops=216.0, purpose="first")
        note()
        await ctx.spend(216.0, "second")
        note()

    assert times(program, devices=1, seconds=2.0) == {0: [pytest.approx(1.0), pytest.approx(2.0)]}


def test_training_takes_longer_with_more_samples() -> None:
    """`seconds` are those of the mean number of samples, 6 here."""
    few, many = tiny_rows(0)[0][:3], torch.arange(10, 19).numpy()
    noted = times(train_once, seconds=2.0, rows=[few, many])
    assert noted == {0: [pytest.approx(1.0)], 1: [pytest.approx(3.0)]}


def test_training_takes_longer_with_more_epochs() -> None:
    async def program(ctx: Context, note: Any) -> None:
        await ctx.train(ctx.initial(), replace(PLAN, epochs=3))
        note()

    assert times(program, devices=1, seconds=2.0) == {0: [pytest.approx(6.0)]}


def test_training_a_smaller_model_takes_less() -> None:
    async def program(ctx: Context, note: Any) -> None:
        mask = ctx.known(torch.arange(15) < 5)
        await ctx.train(Model(ctx.initial().vector, Size(5, 3.0), mask))
        note()

    assert times(program, devices=1, seconds=2.0) == {0: [pytest.approx(2.0 * 3 / 12)]}


def test_computing_takes_its_flops() -> None:
    """One training is 6 FLOPs per MAC and sample: 432 here, in 2 seconds."""

    async def program(ctx: Context, note: Any) -> None:
        await ctx.compute(Scaled(1.0), ctx.initial().vector, flops=108.0, purpose="test")
        note()

    assert times(program, devices=1, seconds=2.0) == {0: [pytest.approx(0.5)]}


def test_a_server_is_ten_times_as_fast_as_the_fastest_device() -> None:
    async def server(ctx: Context, note: Any) -> None:
        await ctx.compute(Scaled(1.0), ctx.initial().vector, flops=432.0, purpose="test")
        note()

    async def client(ctx: Context, note: Any) -> None: ...

    assert times(client, server, seconds=[2.0, 5.0]) == {SERVER: [pytest.approx(0.2)]}


def test_costs_are_booked_under_their_purpose() -> None:
    async def program(ctx: Context, _: Any) -> None:
        await ctx.train(ctx.initial())
        await ctx.compute(Scaled(1.0), ctx.initial().vector, flops=216.0, purpose="merging")

    sim = world(program, seconds=[2.0, 4.0]).run().sim
    assert sim.costs == {"training": pytest.approx(6.0), "merging": pytest.approx(3.0)}
    assert sim.samples == 12


def test_samples_are_counted_once_per_epoch() -> None:
    async def program(ctx: Context, _: Any) -> None:
        await ctx.train(ctx.initial(), replace(PLAN, epochs=3))

    assert world(program, devices=1).run().sim.samples == 18


def sends(*targets: int) -> Any:
    """Device 0 sends models to these targets at once; everybody notes what comes."""

    async def program(ctx: Context, note: Any) -> None:
        if ctx.index == 0:
            for target in targets:
                ctx.send(target, ctx.initial())
        while await ctx.wait(timeout=20.0):
            note()

    return program


def test_a_transfer_takes_bytes_over_bandwidth_and_latency() -> None:
    assert times(sends(1), links=SLOW) == {1: [pytest.approx(1.5)]}


def test_a_link_carries_one_message_after_the_other() -> None:
    noted = times(sends(1, 2, 1), devices=3, links=SLOW)
    assert noted == {1: [pytest.approx(1.5), pytest.approx(3.5)], 2: [pytest.approx(2.5)]}


def test_a_receivers_link_is_shared_by_its_senders() -> None:
    async def program(ctx: Context, note: Any) -> None:
        if ctx.index:
            ctx.send(0, ctx.initial())
        while await ctx.wait(timeout=20.0):
            note()

    assert times(program, devices=4, links=SLOW) == {0: [pytest.approx(t) for t in (1.5, 2.5, 3.5)]}


def test_a_link_that_was_idle_is_free_at_once() -> None:
    async def program(ctx: Context, note: Any) -> None:
        if ctx.index == 0:
            ctx.send(1, ctx.initial())
            await ctx.sleep(7.0)
            ctx.send(1, ctx.initial())
        while await ctx.wait(timeout=20.0):
            note()

    assert times(program, links=SLOW) == {1: [pytest.approx(1.5), pytest.approx(8.5)]}


def test_a_servers_link_is_shared_by_its_clients() -> None:
    """Four uploads at once: each client's link takes 1 s, the server's 0.5 s per model, one after the other."""

    async def server(ctx: Context, note: Any) -> None:
        for _ in range(4):
            await ctx.wait()
            note()
        for client in range(4):
            ctx.send(client, ctx.initial())
        await ctx.sleep(10.0)

    async def client(ctx: Context, note: Any) -> None:
        ctx.send(SERVER, ctx.initial())
        await ctx.wait()
        note()

    noted = times(client, server, devices=4, links=SLOW)
    assert noted[SERVER] == [pytest.approx(t) for t in (1.5, 1.5, 2.0, 2.5)]
    assert [noted[i][0] - noted[SERVER][-1] for i in range(4)] == [pytest.approx(t) for t in (1.5, 1.5, 2.0, 2.5)]


def test_a_message_counts_its_kept_values_its_mask_and_its_fields() -> None:
    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 0:
            ctx.send(1)
            ctx.send(1, ctx.initial())
            ctx.send(1, ctx.initial(), loss=1.0, samples=3)
            mask = ctx.known(torch.arange(15) < 5)
            ctx.send(1, Model(ctx.initial().vector, Size(5, 3.0), mask))

    network = world(program).run().sim.network
    assert network.edges == {(0, 1): [4, 256 + 316 + (316 + 32) + (256 + 20 + 2)]}
    assert network.bytes_sent == network.edges[0, 1][1] and network.sent == 4


def test_reading_takes_no_time() -> None:
    async def program(ctx: Context, note: Any) -> None:
        trained = await ctx.train(ctx.initial())
        await ctx.read(trained.loss)
        note()

    assert times(program, devices=1, seconds=2.0) == {0: [2.0]}


def test_the_run_ends_when_the_last_program_does() -> None:
    """Not when a timer that nobody waits for any more goes off."""

    async def program(ctx: Context, _: Any) -> None:
        ctx.send(1 - ctx.index)
        await ctx.wait(timeout=50.0)

    assert world(program).run(until=60.0).sim.time == pytest.approx(0.05)


def test_time_stands_at_the_limit_while_programs_go_on() -> None:
    async def program(ctx: Context, _: Any) -> None:
        await ctx.sleep(100.0)

    sim = world(program).run(until=7.0).sim
    assert sim.time == 7.0 and not sim.done


def test_a_message_waits_until_its_link_has_taken_it_whole() -> None:
    """Two models on a link that takes a second for each; on their way they no longer wait."""
    seen: list[list[bool]] = []

    async def program(ctx: Context, note: Any) -> None:
        if ctx.index == 0:
            ctx.send(1, ctx.initial())
            ctx.send(2, ctx.initial())
            for _ in range(3):
                seen.append([ctx.waiting(1), ctx.waiting(2)])
                await ctx.sleep(1.001)

    times(program, devices=3, links=SLOW)
    assert seen == [[True, True], [False, True], [False, False]]
