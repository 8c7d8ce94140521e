"""One courier per receiver: a short queue of messages, sent one after the other, again and again until they arrive.

A receiver that is slow or dead costs nothing but its messages: a newer model takes the place of the one of the same
kind that still waits, so at most a few are held per receiver, and those are shared snapshots, not copies.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from ..context import Model
from ..randomness import generator
from . import wire
from .counters import Counters
from .credentials import Security
from .post import AT_ONCE, HAND, SEND
from .protocol_pb2 import Member, Receipt

log = logging.getLogger(__name__)

WAITING = 1024
"""Messages without a model that may wait for one receiver."""
MODELS, MODEL_BYTES = 16, 64 << 20
"""Models of a kind that may wait for a receiver that takes them; of one that does not, only the newest waits."""
SMALL = 1 << 18
"""Bytes of a model below which packing it is not worth a thread."""
STALL = 30.0
"""Seconds without progress after which a transfer is given up and begun anew."""
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
    """A message on its way: references only, packed when its turn comes."""

    kind: str
    model: Model | None
    fields: dict[str, Any]
    number: int
    since: float


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
        self._current: Parcel | None = None
        self.lifetime = lifetime
        """Seconds that a message may wait for a receiver that cannot be reached."""
        self._wake = asyncio.Event()
        self.empty = asyncio.Event()
        """Set while nothing waits to be sent."""
        self._moved = asyncio.Event()
        self._place: tuple[str, str] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())
        self.transfers: deque[tuple[int, float]] = deque(maxlen=256)
        """Bytes and seconds of the latest transfers."""

    def add(self, kind: str, model: Model | None, fields: dict[str, Any]) -> None:
        """Queues a message behind the others, in place of an older model of the same kind."""
        self._number += 1
        if model is not None:
            room = 1 if self._failures else max(1, min(MODELS, MODEL_BYTES // max(1, model.vector.get().nbytes)))
            self._drop(self._models(kind)[: -room + 1 or None])
        elif len(others := [parcel for parcel in self._queue if parcel.model is None]) >= WAITING:
            self._drop(others[:1])
        now = asyncio.get_running_loop().time()
        self._queue.append(Parcel(kind, model, fields, self._number, now))
        self.empty.clear()
        self._wake.set()

    def _models(self, kind: str) -> list[Parcel]:
        """Those that wait; the one that is on its way is not among them."""
        waiting = (parcel for parcel in self._queue if parcel is not self._current)
        return [parcel for parcel in waiting if parcel.model is not None and parcel.kind == kind]

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
            parcel = self._current = self._queue[0]
            try:
                settled = await self._deliver(parcel)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # whatever it was, it must cost this receiver only
                settled = False
                if not self._failures:
                    log.info(f"cannot reach device {self.target}: {_reason(error)}", extra={"event": "unreachable"})
            self._current = None
            if settled:
                self._failures = 0
                if parcel in self._queue:
                    self._queue.remove(parcel)
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

    async def _deliver(self, parcel: Parcel) -> bool:
        """True when nothing more can be done for this message; false to try again."""
        member = self._find(self.target)
        if member is None:
            return False
        if self._security.revoked(member.serial):
            await self._disconnect()
            log.info(f"device {self.target} is sent nothing: its certificate was revoked", extra={"event": "revoked"})
            return False
        channel = await self._connected(member)
        loop = asyncio.get_running_loop()
        message = parcel.kind, parcel.model, self._layout, parcel.fields
        small = parcel.model is None or parcel.model.vector.get().nbytes < SMALL
        packed = wire.pack(*message) if small else await loop.run_in_executor(None, wire.pack, *message)
        began = loop.time()
        receipt = await self._transfer(channel, packed, self._stamp(parcel.number))
        if receipt.later:
            return False
        if receipt.taken:
            self._counters.messages_sent += 1
            self._counters.bytes_sent += packed.length
            self.transfers.append((packed.length, loop.time() - began))
        else:
            self._counters.messages_lost += 1
            log.warning(f"device {self.target} refused a message: {receipt.reason}", extra={"event": "refused"})
        return True

    async def _transfer(self, channel: grpc.aio.Channel, packed: wire.Packed, stamp: wire.Stamp) -> Receipt:
        """A small message is one call, which costs a third of a stream."""
        if packed.length > AT_ONCE:
            return await self._stream(channel, packed, stamp)
        frames = list(wire.frames(packed, stamp))
        self._offered(stamp, frames[-1])
        receipt: Receipt = await channel.unary_unary(HAND, None, Receipt.FromString)(wire.bundle(frames), timeout=STALL)
        return receipt

    def _offered(self, stamp: wire.Stamp, last: bytes) -> None:
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
        channel, self._channel = self._channel, None
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
