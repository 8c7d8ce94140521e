"""The coordinator: hands out indices, watches heartbeats, tells who is whose neighbour. It sees no model and no data.

Devices do not need it to go on training. When it comes back, it knows what its ledger knows, and learns the rest
from the next heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from ..context import SERVER
from ..errors import PeerError, UserError
from ..experiment.config import RunConfig, from_toml, to_toml
from .clock import Clock
from .credentials import Peer, Security
from .identity import check_name
from .ledger import Entry, Ledger
from .places import check_address
from .protocol_pb2 import Ask, Beat, Empty, Join, Joined, Leave, Settings, Status, View
from .rates import Rates
from .roster import Roster
from .transport import CONNECTIONS, open_port
from .wire import PROTOCOL

log = logging.getLogger(__name__)

SERVICE = "aedfl.v1.Coordinator"
MESSAGE = 1 << 18
"""Bytes that a request may have: a report is far smaller, a model far larger."""
CALLERS = 4096
"""Connections at the same time."""
RATE = 50.0
"""Requests per second of one certificate."""
SPARE = 64
"""Indices beyond those of the config that may be wished for, by late comers of a run whose ledger was lost."""


class Refusal(Exception):
    """Ends a call with this status; the sentence is for whoever can put it right."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class Coordinator:
    """One run's coordinator on a folder. Times are seconds."""

    def __init__(
        self,
        config: RunConfig | None,
        folder: Path,
        security: Security,
        beat: float = 2.0,
        forget: float = 3600.0,
        wait_for: int | None = None,
        with_server: bool = False,
    ) -> None:
        self.folder, self.security, self.beat, self.forget = folder, security, beat, forget
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.config = self._settle(config)
        self.run = self.ledger.get("run")
        self.with_server = with_server
        self.wait_for = self.config.devices if wait_for is None else wait_for
        self.roster = Roster(self.config, self.ledger, beat)
        self._rates = Rates(RATE)
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def clock(self) -> Clock:
        return self.roster.clock

    @property
    def over(self) -> bool:
        return self.roster.over

    def _settle(self, config: RunConfig | None) -> RunConfig:
        """The ledger's settings once there are any: a run does not change its rules on the way."""
        known = self.ledger.get("settings")
        if not known:
            if config is None:
                raise UserError(f"{self.folder} holds no run yet; name a preset or a config file")
            self.ledger.set("settings", to_toml(config))
            self.ledger.set("run", secrets.token_hex(8))
            return config
        settled = from_toml(known, str(self.folder / "ledger.sqlite"))
        if config is not None and config != settled:
            raise UserError(f"{self.folder} holds a run with other settings; use another --state folder")
        return settled

    # ---- serving

    async def start(self, address: str) -> int:
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", MESSAGE), ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", CALLERS), *CONNECTIONS,
        ]  # fmt: skip
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=1024)
        calls: dict[str, tuple[Callable[[Any, Any], Awaitable[Any]], Any]] = {
            "Settings": (self._settings, Ask),
            "Join": (self._join, Join),
            "Beat": (self._beat, Beat),
            "Leave": (self._leave, Leave),
            "Status": (self._status, Ask),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                partial(self._call, function), kind.FromString, lambda reply: reply.SerializeToString()
            )
            for name, (function, kind) in calls.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = open_port(self.security, server, address)
        await server.start()
        self._server = server
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        log.info(f"run {self.run} on port {port}", extra={"event": "coordinator", "run": self.run, "port": port})
        return port

    async def _call(self, function: Callable[[Any, Any], Awaitable[Any]], request: Any, context: Any) -> Any:
        try:
            self._in_time(context)
            return await function(request, context)
        except Refusal as refusal:
            log.warning(str(refusal), extra={"event": "refusal", "peer": context.peer()})
            await context.abort(refusal.code, str(refusal))
        except PeerError as error:
            log.warning(str(error), extra={"event": "refusal", "peer": context.peer()})
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except sqlite3.Error as error:
            log.error(f"cannot write the ledger: {error}", extra={"event": "disk"})
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the coordinator cannot write its ledger: {error}")

    def _in_time(self, context: Any) -> None:
        name = self.security.caller(context, "").name or context.peer()
        if not self._rates.take(name):
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{name} asks more than {RATE:.0f} times a second")

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0.2)
        try:
            self.roster.keep_time()
        except sqlite3.Error as error:
            log.error(f"cannot write the ledger: {error}", extra={"event": "disk"})
        self.ledger.close()

    # ---- calls

    async def _settings(self, request: Ask, context: Any) -> Settings:
        self.security.caller(context, "")
        _same_protocol(request.protocol)
        return Settings(protocol=PROTOCOL, run=self.run, settings=to_toml(self.config))

    async def _join(self, request: Join, context: Any) -> Joined:
        peer = self.security.caller(context, request.name)
        _same_protocol(request.protocol)
        _valid(check_name, peer.name)
        entry = self.roster.entries.get(peer.name)
        if entry is None:
            self._allowed(request, peer)
        self._same_layout(request)
        entry = self._newcomer(request, peer) if entry is None else self._returned(entry, request, peer)
        self.roster.register(entry)
        self._begin_when_all_are_there()
        log.info(f"{entry.name} joined as {entry.index}", extra={"event": "join", "device": entry.index})
        return Joined(index=entry.index, run=self.run, beat=self.beat, view=self._view(entry, 0, 0))

    def _allowed(self, request: Join, peer: Peer) -> None:
        """Before anything that a newcomer says has any effect."""
        problem = self.ledger.problem(request.token)
        if problem:
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"{peer.name} may not join: {problem}; ask for a new one")

    def _same_layout(self, request: Join) -> None:
        """The first device's model is the run's."""
        known, given = self.ledger.get("layout"), f"{request.layout.hex()} {request.parameters}"
        if not known:
            self.ledger.set("layout", given)
        elif known != given:
            count = known.partition(" ")[2]
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the model of {request.name} has {request.parameters} values in another layout than the run's with "
                f"{count}; start it with the run's model and the same number of classes",
            )

    def _newcomer(self, request: Join, peer: Peer) -> Entry:
        index = self._free_index(request)
        self.ledger.spend(request.token)
        return Entry(peer.name, index, request.instance, "", "")

    def _free_index(self, request: Join) -> int:
        """The server's, the one that was wished for, or the next that nobody ever had."""
        taken = {entry.index for entry in self.roster.entries.values()}
        if request.server:
            if SERVER in taken:
                raise Refusal(grpc.StatusCode.ALREADY_EXISTS, "the run has a server already")
            return SERVER
        most = max(self.config.devices, len(taken)) + SPARE
        if request.HasField("wish") and 0 <= request.wish < most and request.wish not in taken:
            return request.wish
        return max(taken, default=SERVER) + 1

    def _returned(self, entry: Entry, request: Join, peer: Peer) -> Entry:
        """A known name: the same device again, or, once that is silent, another one in its place."""
        if request.server != (entry.index == SERVER):
            role = "the server" if entry.index == SERVER else "a device"
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"{peer.name} takes part as {role} already")
        if entry.instance != request.instance and self.roster.here(entry.name):
            raise Refusal(
                grpc.StatusCode.ALREADY_EXISTS,
                f"{peer.name} takes part already, at {entry.address}, heard of {self.roster.silence(entry.name):.0f} s "
                "ago; stop that device first, or give this one a certificate of its own",
            )
        entry.instance, entry.left = request.instance, False
        return entry

    def _begin_when_all_are_there(self) -> None:
        ready = self.roster.ready()
        served = not self.with_server or SERVER in ready
        if not self.clock.begun and served and len(ready - {SERVER}) >= self.wait_for:
            self.roster.begin()

    async def _beat(self, request: Beat, context: Any) -> View:
        peer = self.security.caller(context, request.name)
        entry = self.roster.entries.get(peer.name)
        if entry is None or entry.instance != request.instance:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"{peer.name} is not a member of this run; it must join")
        _valid(check_address, request.address)
        self.roster.hear(entry, request.report)
        if (entry.address, entry.serial) != (request.address, peer.serial):
            entry.address, entry.serial = request.address, peer.serial
            self.roster.changed(entry)
            self._begin_when_all_are_there()
        return self._view(entry, request.epoch, request.revoked)

    async def _leave(self, request: Leave, context: Any) -> Empty:
        """For good; only with the device's own certificate, or the coordinator's."""
        peer = self.security.caller(context, "")
        name = request.name or peer.name
        if peer.serial and peer.name not in (name, self.security.name):
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"the certificate of {peer.name} cannot take {name} out")
        entry = self.roster.entries.get(name)
        if entry is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"{name} is not a member of this run")
        self.remove(entry)
        return Empty()

    def remove(self, entry: Entry) -> None:
        if not entry.left:
            entry.left = True
            self.roster.changed(entry)
            log.info(f"{entry.name} left for good", extra={"event": "leave", "device": entry.index})

    async def _status(self, request: Ask, context: Any) -> Status:
        self.security.caller(context, "")
        _same_protocol(request.protocol)
        return self.status()

    def status(self) -> Status:
        found = self.roster.status()
        found.run, found.protocol = self.run, PROTOCOL
        return found

    def _view(self, entry: Entry, epoch: int, revoked: int) -> View:
        view = self.roster.view(entry, epoch)
        number, data = self.security.revocations
        if number > revoked:
            view.revoked = data
        return view

    # ---- as time goes by

    async def _sweep(self) -> None:
        """Goes on whatever happens: a run whose coordinator no longer looks would never end."""
        while True:
            await asyncio.sleep(min(1.0, self.beat))
            try:
                self._look_around()
            except (sqlite3.Error, OSError) as error:
                log.error(f"the coordinator could not look after the run: {error}", extra={"event": "disk"})

    def _look_around(self) -> None:
        self.security.refresh()
        self.roster.keep_time()
        for entry in tuple(self.roster.devices()):
            if self.roster.silence(entry.name) > self.forget:
                self.remove(entry)
        if self.clock.begun and not self.over and self.roster.finished():
            self.roster.end()
            log.info("the run is over", extra={"event": "over"})


def _valid(check: Callable[[str], Any], given: str) -> None:
    """The same check as on the command line, held against what a device says."""
    try:
        check(given)
    except UserError as error:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None


def _same_protocol(number: int) -> None:
    if number != PROTOCOL:
        raise Refusal(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the device speaks protocol {number}, the coordinator {PROTOCOL}; install the same aedfl on both",
        )
