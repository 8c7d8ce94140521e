"""Messages that the network loses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aedfl.context import Context
from sim.worlds import FAST, World, world

COUNT = 4000


def flood(loss: float, seed: int = 0) -> tuple[World, list[int]]:
    """Device 0 sends numbers; which of them arrived."""
    arrived: list[int] = []

    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 0:
            for number in range(COUNT):
                ctx.send(1, number=number)
        else:
            await ctx.sleep(1.0)
            arrived.extend(message.fields["number"] for message in ctx.receive())

    return world(program, links=replace(FAST, loss=loss), seed=seed).run(), arrived


def test_that_share_of_messages_is_lost() -> None:
    made, arrived = flood(0.3)
    network = made.sim.network
    assert network.lost == COUNT - len(arrived)
    assert network.lost == pytest.approx(0.3 * COUNT, abs=5 * (COUNT * 0.3 * 0.7) ** 0.5)
    assert network.sent == COUNT and network.bytes_sent == COUNT * (256 + 16)


def test_those_that_arrive_keep_their_order() -> None:
    _, arrived = flood(0.5)
    assert arrived == sorted(arrived)


def test_what_is_lost_follows_from_the_seed() -> None:
    assert flood(0.3, seed=1)[1] == flood(0.3, seed=1)[1]
    assert flood(0.3, seed=1)[1] != flood(0.3, seed=2)[1]


def test_without_loss_nothing_is_lost() -> None:
    made, arrived = flood(0.0)
    assert arrived == list(range(COUNT)) and made.sim.network.lost == 0
