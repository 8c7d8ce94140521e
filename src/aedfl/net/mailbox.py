"""A device's mailbox on the wall clock: what has arrived and was not taken, and who waits for it. Bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..context import Message

MODELS = 16
"""Untaken messages with a model per sender; the oldest gives way."""
OTHERS = 1024


@dataclass(eq=False)
class Waiter:
    future: asyncio.Future[Message | None]
    kind: str | None

    def wants(self, message: Message) -> bool:
        return (self.kind is None or self.kind == message.kind) and not self.future.done()

    def served(self) -> Message | None:
        """The message that it was handed, perhaps in the very moment in which it stopped waiting."""
        return self.future.result() if self.future.done() and not self.future.cancelled() else None


class Mailbox:
    """Messages in order of arrival; waiting coroutines are served in the order they began to wait."""

    def __init__(self, taken: Callable[[Message], None] = lambda _: None) -> None:
        self.messages: deque[Message] = deque()
        self._taken = taken
        """Told of every message that leaves the box."""
        self.waiters: list[Waiter] = []
        self.dropped = 0

    def deliver(self, message: Message) -> None:
        """To the first that waits for such a message, or else into the box."""
        if not self._hand_over(message):
            self.messages.append(message)
            self._bound(message)

    def _hand_over(self, message: Message) -> bool:
        for waiter in self.waiters:
            if waiter.wants(message):
                self.waiters.remove(waiter)
                waiter.future.set_result(message)
                return True
        return False

    def _bound(self, message: Message) -> None:
        with_model = message.model is not None
        alike = [m for m in self.messages if m.source == message.source and (m.model is not None) == with_model]
        if len(alike) > (MODELS if with_model else OTHERS):
            self.messages.remove(alike[0])
            self._taken(alike[0])
            self.dropped += 1

    def take(self, kind: str | None) -> Message | None:
        for message in self.messages:
            if kind is None or message.kind == kind:
                self.messages.remove(message)
                self._taken(message)
                return message
        return None

    def drain(self) -> list[Message]:
        taken = list(self.messages)
        self.messages.clear()
        for message in taken:
            self._taken(message)
        return taken

    def _seen(self, message: Message | None) -> Message | None:
        if message is not None:
            self._taken(message)
        return message

    async def wait(self, timeout: float | None, kind: str | None) -> Message | None:
        message = self.take(kind)
        if message is not None or timeout == 0:
            return message
        waiter = Waiter(asyncio.get_running_loop().create_future(), kind)
        self.waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                return self._seen(await waiter.future)
        except TimeoutError:
            return self._seen(waiter.served())
        except asyncio.CancelledError:
            if (unseen := waiter.served()) is not None and not self._hand_over(unseen):
                self.messages.appendleft(unseen)
            raise
        finally:
            if waiter in self.waiters:
                self.waiters.remove(waiter)
