"""One courier per receiver: a short queue of messages, sent one after the other, again and again until they arrive.

A receiver that is slow or dead costs nothing but its messages: a newer model takes the place of the one of the same
kind that still waits, so at most a few are held per receiver, and those are shared snapshots, not copies.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from ..context import Model
from ..randomness import generator
from . import fields as typed
from . import wire
from .counters import Counters
from .credentials import Security
from .line import STALL, Line
from .post import AT_ONCE, SEND, TOGETHER
from .protocol_pb2 import Member, Receipt

log = logging.getLogger(__name__)

WAITING = 1024
"""Messages without a model that may wait for one receiver."""
MODELS, MODEL_BYTES = 16, 64 << 20
"""Models of a kind that may wait for a receiver that takes them; of one that does not, only the newest waits."""
SMALL = 1 << 18
"""Bytes of a model below which packing it is not worth a thread."""
BACKOFF = (0.2, 10.0)
"""Seconds to the first retry, and the most between two; doubled each time."""
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 1 << 16),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_time_ms", 20000),
    ("grpc.keepalive_timeout_ms", 10000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message on its way: its fields are packed, its model only when its turn comes."""

    kind: str
    model: Model | None
    fields: typed.Fields
    number: int
    since: float

    @property
    def small(self) -> bool:
        """Packing it is not worth a thread."""
        return self.model is None or self.model.vector.get().nbytes < SMALL


class Courier:
    """Sends one device's messages to one receiver."""

    def __init__(
        self,
        target: int,
        find: Callable[[int], Member | None],
        security: Security,
        stamp: Callable[[int], wire.Stamp],
        layout: bytes,
        counters: Counters,
        lifetime: float = 600.0,
    ) -> None:
        self.target, self._find, self._security = target, find, security
        self._stamp, self._layout, self._counters = stamp, layout, counters
        self._queue: deque[Parcel] = deque()
        self._number = 0
        self._failures = 0
        self._current: list[Parcel] = []
        self.lifetime = lifetime
        """Seconds that a message may wait for a receiver that cannot be reached."""
        self._wake = asyncio.Event()
        self.empty = asyncio.Event()
        """Set while nothing waits to be sent."""
        self._moved = asyncio.Event()
        self._place: tuple[str, str] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._line: Line | None = None
        """The open call for small messages, between two of them."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self.transfers: deque[tuple[int, float]] = deque(maxlen=256)
        """Bytes and seconds of the latest transfers."""

    def add(self, kind: str, model: Model | None, fields: typed.Fields) -> None:
        """Queues a message behind the others, in place of an older model of the same kind."""
        self._number += 1
        if model is not None:
            room = 1 if self._failures else max(1, min(MODELS, MODEL_BYTES // max(1, model.vector.get().nbytes)))
            self._drop(self._models(kind)[: -room + 1 or None])
        elif len(others := [parcel for parcel in self._waiting() if parcel.model is None]) >= WAITING:
            self._drop(others[:1])
        now = asyncio.get_running_loop().time()
        self._queue.append(Parcel(kind, model, fields, self._number, now))
        self.empty.clear()
        self._wake.set()

    def _waiting(self) -> Iterator[Parcel]:
        """What is on its way is not among them."""
        return (parcel for parcel in self._queue if parcel not in self._current)

    def _models(self, kind: str) -> list[Parcel]:
        return [parcel for parcel in self._waiting() if parcel.model is not None and parcel.kind == kind]

    def _drop(self, parcels: list[Parcel]) -> None:
        for parcel in parcels:
            self._queue.remove(parcel)
            self._counters.messages_lost += 1

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                self.empty.set()
                await self._wake.wait()
            try:
                settled = await self._deliver()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # whatever it was, it must cost this receiver only
                settled = False
                if not self._failures:
                    log.info(f"cannot reach device {self.target}: {_reason(error)}", extra={"event": "unreachable"})
            self._current = []
            if settled:
                self._failures = 0
            else:
                self._failures += 1
                self._thin_out()
                await self._pause(self._failures)
                self._thin_out()

    def _thin_out(self) -> None:
        """The receiver is slow or dead: only the newest model of each kind waits for it, and nothing for ever."""
        for kind in {parcel.kind for parcel in self._queue if parcel.model is not None}:
            self._drop(self._models(kind)[:-1])
        limit = asyncio.get_running_loop().time() - self.lifetime
        self._drop([parcel for parcel in self._queue if parcel.since <= limit])

    async def _pause(self, failures: int) -> None:
        """Doubles from try to try; a little by chance, so that not all come back at the same moment."""
        first, most = BACKOFF
        jitter = generator("backoff", self.target, failures, id(self)).uniform(0.5, 1.0)
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(most, first * 2.0 ** min(failures - 1, 10)) * float(jitter)):
                await self._moved.wait()

    async def _deliver(self) -> bool:
        """Sends the next message, or the next few; false if the receiver cannot be reached or wants it later."""
        member = self._find(self.target)
        if member is None:
            return False
        if self._security.revoked(member.serial):
            await self._disconnect()
            log.info(f"device {self.target} is sent nothing: its certificate was revoked", extra={"event": "revoked"})
            return False
        channel = await self._connected(member)
        ready = await self._ready()
        began = asyncio.get_running_loop().time()
        parcel, packed = ready[0]
        if packed.length > AT_ONCE:
            receipts: Sequence[Receipt] = [await self._stream(channel, packed, self._stamp(parcel.number))]
        else:
            receipts = await self._hand(channel, ready)
        for (parcel, packed), receipt in zip(ready, receipts, strict=False):
            if receipt.later:
                return False
            self._settle(parcel, packed, receipt, began)
        return True

    async def _ready(self) -> list[tuple[Parcel, wire.Packed]]:
        """The first message, packed; where it is small, those behind it as well, as long as they are small."""
        ready: list[tuple[Parcel, wire.Packed]] = []
        room = AT_ONCE
        while len(ready) < min(TOGETHER, len(self._queue)):
            parcel = self._queue[len(ready)]
            if ready and not parcel.small:
                break
            self._current.append(parcel)
            packed = await self._packed(parcel)
            room -= packed.length + packed.header.ByteSize()
            if ready and room < 0:
                self._current.pop()
                break
            ready.append((parcel, packed))
        return ready

    async def _packed(self, parcel: Parcel) -> wire.Packed:
        message = parcel.kind, parcel.model, self._layout, parcel.fields
        if parcel.small:
            return wire.assemble(*message)
        return await asyncio.get_running_loop().run_in_executor(None, wire.assemble, *message)

    def _settle(self, parcel: Parcel, packed: wire.Packed, receipt: Receipt, began: float) -> None:
        """Nothing more can be done for this message."""
        if parcel in self._queue:
            self._queue.remove(parcel)
        if receipt.taken:
            self._counters.messages_sent += 1
            self._counters.bytes_sent += packed.length
            self.transfers.append((packed.length, asyncio.get_running_loop().time() - began))
        else:
            self._counters.messages_lost += 1
            log.warning(f"device {self.target} refused a message: {receipt.reason}", extra={"event": "refused"})

    async def _hand(self, channel: grpc.aio.Channel, ready: list[tuple[Parcel, wire.Packed]]) -> Sequence[Receipt]:
        """Small messages over a line that stays open: a call for each would cost twice as much."""
        bundles = []
        for parcel, packed in ready:
            frames = list(wire.frames(packed, stamp := self._stamp(parcel.number)))
            self._offered(stamp, frames[-1])
            bundles.append(wire.bundle(frames))
        piece = wire.bundle(bundles)
        used, self._line = self._line, None
        line = used or Line(channel)
        receipts = await line.hand(piece)
        if not receipts and used is not None:  # it had ended since the last message
            line = Line(channel)
            receipts = await line.hand(piece)
        if not receipts:
            raise ConnectionError(await line.end())
        if not receipts[-1].later:  # the receiver ends it then
            self._line = line
        return receipts

    def _offered(self, stamp: wire.Stamp, last: bytes) -> None:
        if log.isEnabledFor(logging.DEBUG):
            offer = {"event": "offered", "to": self.target, "boot": stamp.boot, "number": stamp.number}
            log.debug("offered", extra={**offer, "checksum": int.from_bytes(last[:4], "little")})

    async def _stream(self, channel: grpc.aio.Channel, packed: wire.Packed, stamp: wire.Stamp) -> Receipt:
        call = channel.stream_unary(SEND, None, Receipt.FromString)()
        frame = b""
        try:
            for frame in wire.frames(packed, stamp):
                async with asyncio.timeout(STALL):
                    await call.write(frame)
            async with asyncio.timeout(STALL):
                await call.done_writing()
            self._offered(stamp, frame)
        except asyncio.InvalidStateError:
            log.debug("the receiver answered before the end: it does not want the rest", extra={"event": "early"})
        except TimeoutError:
            call.cancel()
            raise
        async with asyncio.timeout(STALL):
            receipt: Receipt = await call
            return receipt

    async def _connected(self, member: Member) -> grpc.aio.Channel:
        """The channel to where the receiver is now; a new one when it has moved or has a new certificate."""
        place = member.address, member.serial
        if self._channel is None or self._place != place:
            await self._disconnect()
            self._place = place
            self._channel = self._security.connect(member.address, member.name, member.serial, OPTIONS)
        return self._channel

    async def _disconnect(self) -> None:
        channel, self._channel, self._line = self._channel, None, None
        if channel is not None:
            await channel.close()

    def moved(self) -> None:
        """The receiver may be somewhere else now: worth another try at once."""
        if self._find(self.target) is not None:
            self._moved.set()

    def reconnect(self) -> None:
        """Own certificate renewed: the next message goes over a new connection."""
        self._place = None

    def stop(self) -> asyncio.Task[None]:
        """Ends it; what still waits is lost."""
        return asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._disconnect()


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error.details())[:300]
    return str(error) or type(error).__name__
