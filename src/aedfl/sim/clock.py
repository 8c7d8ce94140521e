"""Coroutines on SimPy: an `await` becomes the wait for an event of the virtual clock."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any

import simpy


class On:
    """Awaitable of a SimPy event; its result is the event's value."""

    __slots__ = ("event",)

    def __init__(self, event: simpy.Event) -> None:
        self.event = event

    def __await__(self) -> Generator[simpy.Event, Any, Any]:
        return (yield self.event)


def drive(program: Coroutine[Any, Any, None]) -> Generator[simpy.Event, Any, None]:
    """Runs a coroutine as a SimPy process; an interrupt ends it at its current `await`."""
    value: Any = None
    try:
        while True:
            try:
                event = program.send(value)
            except StopIteration:
                return
            value = yield event
    except simpy.Interrupt:
        return
    finally:
        program.close()
