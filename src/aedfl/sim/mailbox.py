"""A device's mailbox: what has arrived and was not taken, and who waits for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import simpy

from ..context import Message


@dataclass(eq=False)
class Waiter:
    event: simpy.Event
    kind: str | None

    def wants(self, message: Message) -> bool:
        return self.kind is None or self.kind == message.kind


class Mailbox:
    """Messages in order of arrival. It outlives a crash: what had arrived whole is not lost with the update."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.waiters: list[Waiter] = []

    def deliver(self, message: Message) -> None:
        """To the first that waits for such a message, or else into the box."""
        if not self._hand_over(message):
            self.messages.append(message)

    def _hand_over(self, message: Message) -> bool:
        for waiter in self.waiters:
            if waiter.wants(message):
                self.waiters.remove(waiter)
                waiter.event.succeed(message)
                return True
        return False

    def take(self, kind: str | None) -> Message | None:
        for message in self.messages:
            if kind is None or message.kind == kind:
                self.messages.remove(message)
                return message
        return None

    def drain(self) -> list[Message]:
        taken = list(self.messages)
        self.messages.clear()
        return taken

    def wait(self, event: simpy.Event, kind: str | None) -> Waiter:
        waiter = Waiter(event, kind)
        self.waiters.append(waiter)
        return waiter

    def give_up(self, waiter: Waiter) -> None:
        """The waiter's time has passed: None is its result, unless it was served."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)
            waiter.event.succeed(None)

    def end(self, waiter: Waiter) -> None:
        """The waiter was cancelled or has crashed; a message that it was handed but never saw comes back."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)
        elif waiter.event.triggered and waiter.event.value is not None and not self._hand_over(waiter.event.value):
            self.messages.appendleft(waiter.event.value)
