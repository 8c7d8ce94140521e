"""What a method's program gets wrong is said where it happens, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aedfl.algorithms import get
from aedfl.context import SERVER, Context, Method, Program
from aedfl.errors import UserError
from sim.worlds import world


def once(verb: Callable[[Context], None]) -> Program:
    """A program in which device 1 does one thing."""

    async def program(ctx: Context, _: Any) -> None:
        if ctx.index == 1:
            verb(ctx)

    return program


async def idle(ctx: Context, _: Any) -> None:
    """Takes what comes."""
    while ctx.running:
        await ctx.wait(timeout=1.0)


def plain(ctx: Context, _: Any) -> None:
    """No coroutine."""


@pytest.mark.parametrize("to", [77, 2, -2, SERVER, "0", 1.0, None])
def test_a_message_is_for_a_device(to: Any) -> None:
    said = rf"^ctx.send: device 1 sends to {to!r}, which is no device; allowed is a whole number from 0 to 1$"
    with pytest.raises(UserError, match=said):
        world(once(lambda ctx: ctx.send(to))).run()


@pytest.mark.parametrize("to", [-2, 2])
def test_or_for_the_server_where_there_is_one(to: int) -> None:
    with pytest.raises(UserError, match=rf"sends to {to}, .* from 0 to 1, and -1 for the server$"):
        world(once(lambda ctx: ctx.send(to)), idle).run()


def test_numbers_drawn_with_numpy_name_devices() -> None:
    assert world(once(lambda ctx: ctx.send(np.int64(0)))).run().sim.network.sent == 1
    assert world(once(lambda ctx: ctx.send(SERVER)), idle).run().sim.network.sent == 1


@pytest.mark.parametrize("verb", ["publish", "send"])
@pytest.mark.parametrize("thing", [3, np.zeros((2, 2))])
def test_what_is_published_or_sent_is_a_model(verb: str, thing: Any) -> None:
    def wrong(ctx: Context) -> None:
        ctx.publish(thing) if verb == "publish" else ctx.send(0, thing)

    said = f"^ctx.{verb}: the model must be an aedfl.context.Model, not a {type(thing).__name__}$"
    with pytest.raises(UserError, match=said):
        world(once(wrong)).run()


@pytest.mark.parametrize(("who", "programs"), [("device", (plain, None)), ("server", (idle, plain)), ("device", (3,))])
def test_programs_are_coroutines(who: str, programs: Any) -> None:
    with pytest.raises(UserError, match=rf"^method 'mine': {who} must be an 'async def program\(ctx, hyper\)'$"):
        Method("mine", "", None, *programs)


def test_so_are_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    program = "def device(ctx, hyper):\n    pass\n"
    path.write_text(f"from aedfl import Method\n\n{program}\nMETHOD = Method('mine', '', None, device)\n")
    with pytest.raises(UserError, match="method 'mine': device must be an 'async def"):
        get(str(path))


class Counting:
    """A program with something to remember."""

    async def __call__(self, ctx: Context, hyper: Any) -> None:
        await idle(ctx, hyper)


@wraps(idle)
def decorated(ctx: Context, hyper: Any) -> Any:
    return idle(ctx, hyper)


@pytest.mark.parametrize("program", [idle, partial(idle), Counting(), decorated])
def test_whatever_gives_a_coroutine_is_a_program(program: Any) -> None:
    assert Method("mine", "", None, program).device is program
