"""What has arrived at a device and was not taken, and who waits for it; the same on either clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from .context import Message


class Waiter(ABC):
    """A coroutine that waits for a message (of that kind)."""

    kind: str | None

    def wants(self, message: Message) -> bool:
        return self.kind is None or self.kind == message.kind

    @abstractmethod
    def hand(self, message: Message) -> bool:
        """Wakes it with the message; false if it has stopped waiting."""


class Box:
    """Messages in order of arrival; waiting coroutines are served in the order they began to wait."""

    def __init__(self, taken: Callable[[Message], None] = lambda _: None) -> None:
        self.messages: deque[Message] = deque()
        self.waiters: list[Waiter] = []
        self.taken = taken
        """Told of every message that leaves the box."""

    def hand_over(self, message: Message) -> bool:
        """To the first that waits for such a message; false if nobody does."""
        for waiter in self.waiters:
            if waiter.wants(message) and waiter.hand(message):
                self.waiters.remove(waiter)
                return True
        return False

    def put_back(self, message: Message) -> None:
        """A message that somebody was handed but never saw: to whoever else waits for it, or to the front."""
        if not self.hand_over(message):
            self.messages.appendleft(message)

    def forget(self, waiter: Waiter) -> bool:
        """It waits no longer; false if it had been served already."""
        if waiter not in self.waiters:
            return False
        self.waiters.remove(waiter)
        return True

    def take(self, kind: str | None) -> Message | None:
        """The oldest (of that kind)."""
        for message in self.messages:
            if kind is None or message.kind == kind:
                self.messages.remove(message)
                self.taken(message)
                return message
        return None

    def drain(self) -> list[Message]:
        """All of them, oldest first."""
        found = list(self.messages)
        self.messages.clear()
        for message in found:
            self.taken(message)
        return found
