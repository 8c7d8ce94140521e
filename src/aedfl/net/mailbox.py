"""A device's mailbox on the wall clock. Bounded: a program that does not look costs its oldest messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .. import mailbox
from ..context import Message

MODELS = 16
"""Untaken messages with a model per sender; the oldest gives way."""
OTHERS = 1024


@dataclass(eq=False)
class Waiter(mailbox.Waiter):
    future: asyncio.Future[Message | None]
    kind: str | None

    def hand(self, message: Message) -> bool:
        if self.future.done():
            return False
        self.future.set_result(message)
        return True

    def served(self) -> Message | None:
        """The message that it was handed, perhaps in the very moment in which it stopped waiting."""
        return self.future.result() if self.future.done() and not self.future.cancelled() else None


class Mailbox(mailbox.Box):
    """Waiting is a future; a message counts as taken when the program has it."""

    def __init__(self, taken: Callable[[Message], None] = lambda _: None) -> None:
        super().__init__(taken)
        self.dropped = 0

    def deliver(self, message: Message) -> None:
        """To the first that waits for such a message, or else into the box."""
        if not self.hand_over(message):
            self.messages.append(message)
            self._bound(message)

    def _bound(self, message: Message) -> None:
        with_model = message.model is not None
        alike = [m for m in self.messages if m.source == message.source and (m.model is not None) == with_model]
        if len(alike) > (MODELS if with_model else OTHERS):
            self.messages.remove(alike[0])
            self.taken(alike[0])
            self.dropped += 1

    def _seen(self, message: Message | None) -> Message | None:
        if message is not None:
            self.taken(message)
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
            if (unseen := waiter.served()) is not None:
                self.put_back(unseen)
            raise
        finally:
            self.forget(waiter)
