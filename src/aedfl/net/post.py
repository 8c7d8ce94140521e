"""The receiving side: who may send, how much, how fast. Only whole messages that fit get any further."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from ..context import Message
from ..errors import PeerError
from . import wire
from .check import Checker
from .counters import Counters
from .credentials import Peer, Security
from .protocol_pb2 import Header, Member, Receipt, Receipts
from .rates import Bucket

log = logging.getLogger(__name__)
SERVICE = "aedfl.v1.Peer"
SEND, HAND = f"/{SERVICE}/Send", f"/{SERVICE}/Hand"
AT_ONCE = 1 << 18
"""Bytes of tensors up to which a message travels in one piece, over a line that stays open."""
TOGETHER, FRAMES = 16, 2
"""Messages that may share a piece, and frames of each: a header, and perhaps tensors."""
DRAIN = 1.0
"""Seconds for which the rest of a refused message is still read."""
THREADED = 1 << 18
"""Bytes from which on checking a message is worth a thread."""


@dataclass(frozen=True)
class Limits:
    """How much one sender may ask of this device. Seconds, bytes, messages."""

    messages_per_second: float = 1000.0
    bytes_per_second: float = 4e9
    streams: int = 64
    """Transfers at the same time, over all senders."""
    streams_each: int = 4
    """Of one certificate: one that is on its way, and those that have broken off without anybody noticing yet."""
    connections: int = 512
    """At the same time, from anywhere, certificates or none."""
    stall: float = 30.0
    """A transfer without a frame for so long is ended."""


async def _drain(frames: AsyncIterator[bytes]) -> None:
    """Lets a sender finish what it has begun, for a moment: one that is cut off never reads why it was refused."""
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN):
            async for _ in frames:
                pass


async def _feed_all(decoder: wire.Decoder, data: bytes) -> None:
    for frame in wire.unbundle(data, FRAMES):
        decoder.feed(frame)


class Later(Exception):
    """Not now: the sender should try again in a while."""


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
    """Serves `Peer.Send` and `Peer.Hand`. A message is taken whole or not at all, in the order its sender sent it."""

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
        self._open: Counter[str] = Counter()
        self._lines: dict[str, asyncio.Task[Any] | None] = {}

    def handler(self) -> grpc.GenericRpcHandler:
        methods = {
            "Send": grpc.stream_unary_rpc_method_handler(self.send, None, Receipt.SerializeToString),
            "Hand": grpc.stream_stream_rpc_method_handler(self.line, None, Receipts.SerializeToString),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def send(self, frames: AsyncIterable[bytes], context: Any) -> Receipt:
        """A message as a stream of frames."""
        return await self._answer(self._transfer(frames, context), context)

    async def line(self, _: Any, context: Any) -> None:
        """Small messages, one or a few in a piece, and the receipts for each piece.

        A message that is put off ends the line: those behind it must not come before it.
        """
        try:
            peer = self._known(self._security.shown(context))
        except (Later, PeerError) as error:
            await context.write(Receipts(receipts=[self._declined(error, context)]))
            return
        owner = peer.name or str(context.peer())
        with self._only_line(owner), suppress(asyncio.CancelledError):  # by a newer line: its sender sees that it ends
            while (piece := await context.read()) is not grpc.aio.EOF:
                receipts = await self._hand_all(piece, peer, context)
                await context.write(Receipts(receipts=receipts))
                if receipts[-1].later:
                    return

    async def _hand_all(self, piece: bytes, peer: Peer, context: Any) -> list[Receipt]:
        """At least one receipt; none for those behind a message that is put off."""
        receipts: list[Receipt] = []
        try:
            for data in wire.unbundle(piece, TOGETHER):
                receipts.append(await self.hand(data, peer, context))
                if receipts[-1].later:
                    break
        except PeerError as error:
            receipts.append(self._declined(error, context))
        return receipts

    async def hand(self, data: bytes, peer: Peer, context: Any) -> Receipt:
        """A small message in one piece."""
        return await self._answer(self._bundle(data, peer), context)

    @contextmanager
    def _only_line(self, owner: str) -> Iterator[None]:
        """One line per certificate (without any, per connection): a new one ends one that has broken unnoticed."""
        if (old := self._lines.get(owner)) is not None:
            old.cancel()
        mine = self._lines[owner] = asyncio.current_task()
        try:
            yield
        finally:
            if self._lines.get(owner) is mine:
                del self._lines[owner]

    def hang_up(self) -> None:
        """Ends all lines."""
        for line in self._lines.values():
            if line is not None:
                line.cancel()

    async def _answer(self, work: Awaitable[None], context: Any) -> Receipt:
        try:
            await work
            return Receipt(taken=True)
        except TimeoutError:
            return Receipt(later=True, reason="the transfer stood still")
        except (Later, PeerError) as error:
            return self._declined(error, context)

    def _declined(self, error: Later | PeerError, context: Any) -> Receipt:
        if isinstance(error, Later):
            return Receipt(later=True, reason=str(error))
        self._counters.refused += 1
        log.warning(f"refused a message: {error}", extra={"event": "refusal", "peer": context.peer()})
        return Receipt(reason=str(error)[:500])

    async def _transfer(self, stream: AsyncIterable[bytes], context: Any) -> None:
        peer = self._security.shown(context)
        with self._slot(peer):
            frames = aiter(stream)
            try:
                await self._receive(peer, lambda decoder: self._feed(decoder, frames))
            except (Later, PeerError):
                await _drain(frames)
                raise

    async def _bundle(self, data: bytes, peer: Peer) -> None:
        with self._slot(peer):
            await self._receive(peer, lambda decoder: _feed_all(decoder, data))

    @contextmanager
    def _slot(self, peer: Peer) -> Iterator[None]:
        """Room for one more transfer. Whoever does not take part, or has several open, gets none and is not read."""
        name = self._known(peer).name
        if self._open.total() >= self.limits.streams or self._open[name] >= self.limits.streams_each:
            raise Later("too many transfers at the same time")
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    def _known(self, peer: Peer) -> Peer:
        """Whoever calls, if its certificate still holds and is that of a member."""
        self._security.check(peer)
        if peer.name and self._member(peer.name) is None:
            raise Later(f"{peer.name} is not known here (yet)")
        return peer

    async def _receive(self, peer: Peer, feed: Callable[[wire.Decoder], Awaitable[None]]) -> None:
        entry: list[tuple[int, Sender]] = []

        def look(header: Header) -> int:
            entry.append(self._admit(header, peer))
            return self._checker.bytes_allowed(header)

        decoder = wire.Decoder(look)
        try:
            await feed(decoder)
            incoming = decoder.finish()
            await self._take(incoming, *entry[0])
        finally:
            if entry and entry[0][1].stream is asyncio.current_task():
                entry[0][1].stream = None

    async def _take(self, incoming: wire.Incoming, source: int, sender: Sender) -> None:
        """Checks and delivers it. It counts as come only then: a transfer that is ended before must come again."""
        header = incoming.header
        if not sender.is_new(header.boot, header.number):
            return
        if not sender.bytes.take(incoming.length):
            raise Later("more bytes per second than this device takes from one sender")
        if incoming.length > THREADED:
            loop = asyncio.get_running_loop()
            message = await loop.run_in_executor(None, self._checker.message, incoming, source)
        else:
            message = self._checker.message(incoming, source)
        await self._deliver(message)
        sender.note(header.boot, header.number)
        self._counters.messages_received += 1
        self._counters.bytes_received += incoming.length
        if log.isEnabledFor(logging.DEBUG):
            what = {"event": "received", "from": source, "boot": header.boot, "number": header.number}
            log.debug("received", extra={**what, "checksum": incoming.checksum})

    async def _feed(self, decoder: wire.Decoder, frames: AsyncIterator[bytes]) -> None:
        while True:
            async with asyncio.timeout(self.limits.stall):
                frame = await anext(frames, None)
            if frame is None:
                return
            decoder.feed(frame)

    def _admit(self, header: Header, peer: Peer) -> tuple[int, Sender]:
        """The sender, if it is who it says it is, takes part in this run, and does not send too often.

        Without certificates it is whoever it says it is.
        """
        member = self._member(peer.name) if peer.name else self._index(header.source)
        if header.run != self._run:
            raise PeerError(f"the message belongs to run {header.run[:40]!r}, this device takes part in {self._run!r}")
        if member is None:
            raise Later(f"{peer.name or header.source} is not known here (yet)")
        if member.index != header.source:
            raise PeerError(f"{peer.name} says it is device {header.source}, but it is device {member.index}")
        sender = self._senders.get(member.index) or self._senders.setdefault(member.index, Sender(self.limits))
        if not sender.messages.take(1):
            raise Later("more messages per second than this device takes from one sender")
        if sender.stream is not None:  # a broken connection of the same sender, not noticed yet
            sender.stream.cancel()
        sender.stream = asyncio.current_task()
        return member.index, sender
