"""A device's mailbox on the virtual clock. It outlives a crash: what had arrived whole is not lost with the update."""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from .. import mailbox
from ..context import Message


@dataclass(eq=False)
class Waiter(mailbox.Waiter):
    event: simpy.Event
    kind: str | None

    def hand(self, message: Message) -> bool:
        self.event.succeed(message)
        return True


class Mailbox(mailbox.Box):
    """Waiting is an event; time ends it from outside."""

    def deliver(self, message: Message) -> None:
        """To the first that waits for such a message, or else into the box."""
        if not self.hand_over(message):
            self.messages.append(message)

    def wait(self, event: simpy.Event, kind: str | None) -> Waiter:
        waiter = Waiter(event, kind)
        self.waiters.append(waiter)
        return waiter

    def give_up(self, waiter: Waiter | None) -> None:
        """The waiter's time has passed: None is its result, unless it was served (and may be gone by now)."""
        if waiter is not None and self.forget(waiter):
            waiter.event.succeed(None)

    def end(self, waiter: Waiter) -> None:
        """The waiter was cancelled or has crashed; a message that it was handed but never saw comes back."""
        if not self.forget(waiter) and waiter.event.triggered and waiter.event.value is not None:
            self.put_back(waiter.event.value)
