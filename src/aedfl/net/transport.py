"""A device's connections: the post that receives, and a courier for everybody that it sends to."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc

from ..context import Model
from ..errors import UserError
from . import fields as typed
from . import wire
from .check import Checker
from .counters import Counters
from .courier import Courier
from .credentials import Security
from .post import Deliver, Limits, Post
from .protocol_pb2 import Member

CONNECTIONS: list[tuple[str, Any]] = [
    ("grpc.server_handshake_timeout_ms", 10000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_metadata_size", 8192),
]
"""What a connection to any port may cost before and after somebody has shown a certificate."""
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", wire.CHUNK + wire.HEADER),
    ("grpc.max_send_message_length", 1 << 16),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_time_ms", 20000),
    ("grpc.keepalive_timeout_ms", 10000),
    *CONNECTIONS,
]


class Transport:
    """Sends and receives for one device. Members are those that the coordinator last named."""

    def __init__(self, index: int, run: str, checker: Checker, security: Security, lifetime: float = 600.0) -> None:
        self.lifetime = lifetime
        self.index, self.run, self.checker, self.security = index, run, checker, security
        self.counters = Counters()
        self.boot = secrets.randbits(63)
        self._members: dict[int, Member] = {}
        self._names: dict[str, Member] = {}
        self._couriers: dict[int, Courier] = {}
        self._closing: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self._post: Post | None = None
        self.port = 0

    def know(self, members: Iterable[Member]) -> None:
        """From now on these are the others; what waits for anybody else is dropped."""
        there = [member for member in members if member.state != "left" and member.index != self.index]
        before, self._members = self._members, {member.index: member for member in there}
        self._names = {member.name: member for member in there}
        for gone in (before.keys() - self._members.keys()) & self._couriers.keys():
            self._closing = [task for task in self._closing if not task.done()]
            self._closing.append(self._couriers.pop(gone).stop())
        for index, courier in self._couriers.items():
            if before.get(index) != self._members.get(index):
                courier.moved()

    async def listen(self, address: str, deliver: Deliver, limits: Limits | None = None) -> int:
        """Opens the port (0: any free one), and says which."""
        limits = limits or Limits()
        options = [
            *OPTIONS, ("grpc.max_concurrent_streams", limits.streams),
            ("grpc.max_allowed_incoming_connections", limits.connections),
        ]  # fmt: skip
        calls = limits.connections + 4 * limits.streams
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls)
        self._post = post = Post(
            self.run,
            self.checker,
            self.security,
            lambda name: self._names.get(name),
            lambda index: self._members.get(index),
            deliver,
            self.counters,
            limits,
        )
        server.add_generic_rpc_handlers((post.handler(),))
        self.port = open_port(self.security, server, address)
        self._server = server
        await server.start()
        return self.port

    def send(self, to: int, kind: str, model: Model | None, fields: dict[str, Any]) -> None:
        """Queues a message; what a program must not send is said at once."""
        wire.check_kind(kind, typed.Unsendable)
        packed = typed.pack(fields)
        if to == self.index:
            raise UserError(f"device {to} sends to itself")
        if to not in self._couriers:
            self._couriers[to] = Courier(
                to, lambda index: self._members.get(index), self.security, self._stamp, self.checker.digest,
                self.counters, self.lifetime,
            )  # fmt: skip
        self._couriers[to].add(kind, model, packed)

    def waiting(self, to: int) -> bool:
        """Whether a message to that device has not been handed over yet."""
        return to in self._couriers and not self._couriers[to].empty.is_set()

    def _stamp(self, number: int) -> wire.Stamp:
        return wire.Stamp(self.run, self.index, self.boot, number)

    def reconnect(self) -> None:
        for courier in self._couriers.values():
            courier.reconnect()

    def transfers(self) -> list[tuple[int, float]]:
        """Bytes and seconds of the latest transfers, for whoever wants to know the links."""
        return [transfer for courier in self._couriers.values() for transfer in courier.transfers]

    async def settle(self, seconds: float) -> None:
        """Gives messages that still wait a last chance."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for courier in tuple(self._couriers.values()):
                    await courier.empty.wait()

    async def close(self) -> None:
        couriers, self._couriers = list(self._couriers.values()), {}
        await asyncio.gather(*(courier.stop() for courier in couriers), *self._closing)
        server, post, self._server, self._post = self._server, self._post, None, None
        if server is not None and post is not None:  # and forgets them: gRPC's finaliser needs a loop that still runs
            post.hang_up()
            await server.stop(0.2)


def open_port(security: Security, server: grpc.aio.Server, address: str) -> int:
    """Listens there; a port that is taken or not ours is one sentence."""
    try:
        port = security.listen(server, address)
    except RuntimeError:
        port = 0
    if not port:
        raise UserError(f"cannot listen on {address}: the port is in use, or the address is not this machine's")
    return port
