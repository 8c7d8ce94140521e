"""The receiving side: who may send, how much, how fast. Only whole messages that fit get any further."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from ..context import Message
from ..errors import PeerError
from .check import Checker
from .counters import Counters
from .credentials import Security
from .protocol_pb2 import Header, Member, Receipt
from .wire import Decoder

log = logging.getLogger(__name__)
DRAIN = 1.0
"""Seconds for which the rest of a refused message is still read."""
THREADED = 1 << 18
"""Bytes from which on checking a frame or a message is worth a thread; a header never is."""


@dataclass(frozen=True)
class Limits:
    """How much one sender may ask of this device. Seconds, bytes, messages."""

    messages_per_second: float = 1000.0
    bytes_per_second: float = 4e9
    streams: int = 64
    """Transfers at the same time, over all senders."""
    stall: float = 30.0
    """A transfer without a frame for so long is ended."""


async def _drain(frames: AsyncIterator[bytes]) -> None:
    """Lets a sender finish what it has begun, for a moment: one that is cut off never reads why it was refused."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN):
            async for _ in frames:
                pass


class Later(Exception):
    """Not now: the sender should try again in a while."""


class Bucket:
    """A rate with one second's worth of burst."""

    def __init__(self, rate: float) -> None:
        self.rate = self.level = rate
        self._time = time.monotonic()

    def take(self, amount: float) -> bool:
        """True if there was room; what is larger than a burst passes when the bucket is full."""
        now = time.monotonic()
        self.level = min(self.rate, self.level + (now - self._time) * self.rate)
        self._time = now
        if self.level < min(amount, self.rate):
            return False
        self.level -= amount
        return True


class Sender:
    """What this device remembers of one that sends to it."""

    def __init__(self, limits: Limits) -> None:
        self.messages, self.bytes = Bucket(limits.messages_per_second), Bucket(limits.bytes_per_second)
        self.stream: asyncio.Task[Any] | None = None
        self._numbers: OrderedDict[int, int] = OrderedDict()

    def is_new(self, boot: int, number: int) -> bool:
        """False for a message that has come before: its receipt was lost and it was sent again."""
        return number > self._numbers.get(boot, 0)

    def note(self, boot: int, number: int) -> None:
        self._numbers[boot] = number
        self._numbers.move_to_end(boot)
        if len(self._numbers) > 8:
            self._numbers.popitem(last=False)


Deliver = Callable[[Message], Awaitable[None]]


class Post:
    """Serves `Peer.Send`. A message is taken whole or not at all, in the order its sender sent it."""

    def __init__(
        self,
        run: str,
        checker: Checker,
        security: Security,
        member: Callable[[str], Member | None],
        index: Callable[[int], Member | None],
        deliver: Deliver,
        counters: Counters,
        limits: Limits | None = None,
    ) -> None:
        self._run, self._checker, self._security = run, checker, security
        self._member, self._index, self._deliver, self._counters = member, index, deliver, counters
        self.limits = limits or Limits()
        self._senders: dict[int, Sender] = {}
        self._open = 0

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_unary_rpc_method_handler(self.send, None, Receipt.SerializeToString)
        return grpc.method_handlers_generic_handler("aedfl.v1.Peer", {"Send": method})

    async def send(self, frames: AsyncIterator[bytes], context: Any) -> Receipt:
        if self._open >= self.limits.streams:
            return Receipt(later=True, reason="too many transfers at the same time")
        self._open += 1
        iterator = aiter(frames)
        try:
            return await self._receive(iterator, context)
        except TimeoutError:
            return Receipt(later=True, reason="the transfer stood still")
        except Later as error:
            await _drain(iterator)
            return Receipt(later=True, reason=str(error))
        except PeerError as error:
            self._counters.refused += 1
            log.warning(f"refused a message: {error}", extra={"event": "refusal", "peer": context.peer()})
            await _drain(iterator)
            return Receipt(reason=str(error)[:500])
        finally:
            self._open -= 1

    async def _receive(self, frames: AsyncIterator[bytes], context: Any) -> Receipt:
        entry: list[tuple[int, Sender]] = []

        def look(header: Header) -> int:
            entry.append(self._admit(header, context))
            return self._checker.bytes_allowed(header)

        decoder = Decoder(look)
        try:
            await self._feed(decoder, frames)
            incoming = decoder.finish()
            source, sender = entry[0]
            header = incoming.header
            if sender.is_new(header.boot, header.number):
                if not sender.bytes.take(incoming.length):
                    raise Later("more bytes per second than this device takes from one sender")
                if incoming.length > THREADED:
                    loop = asyncio.get_running_loop()
                    message = await loop.run_in_executor(None, self._checker.message, incoming, source)
                else:
                    message = self._checker.message(incoming, source)
                sender.note(header.boot, header.number)
                self._counters.messages_received += 1
                self._counters.bytes_received += incoming.length
                what = {"event": "received", "from": source, "boot": header.boot, "number": header.number}
                log.debug("received", extra={**what, "checksum": incoming.checksum})
                await self._deliver(message)
            return Receipt(taken=True)
        finally:
            if entry and entry[0][1].stream is asyncio.current_task():
                entry[0][1].stream = None

    async def _feed(self, decoder: Decoder, frames: AsyncIterator[bytes]) -> None:
        """Takes all frames; those of a large message are checked in a thread while the next one comes in."""
        loop = asyncio.get_running_loop()
        checking: asyncio.Future[None] | None = None
        while True:
            async with asyncio.timeout(self.limits.stall):
                frame = await anext(frames, None)
            if checking is not None:
                await checking
            if frame is None:
                return
            if len(frame) > THREADED:
                checking = loop.run_in_executor(None, decoder.feed, frame)
            else:
                decoder.feed(frame)
                checking = None

    def _admit(self, header: Header, context: Any) -> tuple[int, Sender]:
        """The sender, if it is who it says it is, takes part in this run, and does not send too often."""
        claimed = self._index(header.source)
        peer = self._security.caller(context, "" if claimed is None else claimed.name)
        member = self._member(peer.name)
        if header.run != self._run:
            raise PeerError(f"the message belongs to run {header.run[:40]!r}, this device takes part in {self._run!r}")
        if member is None:
            raise Later(f"{peer.name or header.source} is not known here (yet)")
        if member.index != header.source:
            raise PeerError(f"{peer.name} says it is device {header.source}, but it is device {member.index}")
        sender = self._senders.setdefault(member.index, Sender(self.limits))
        if not sender.messages.take(1):
            raise Later("more messages per second than this device takes from one sender")
        if sender.stream is not None:  # a broken connection of the same sender, not noticed yet
            sender.stream.cancel()
        sender.stream = asyncio.current_task()
        return member.index, sender
