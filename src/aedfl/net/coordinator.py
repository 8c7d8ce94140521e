"""The coordinator: hands out indices, watches heartbeats, tells who is whose neighbour. It sees no model and no data.

Devices do not need it to go on training. When it comes back, it knows what its ledger knows, and learns the rest
from the next heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from ..context import SERVER
from ..errors import PeerError, UserError
from ..experiment.config import RunConfig, from_toml, to_toml
from .clock import Clock
from .credentials import Peer, Security
from .ledger import Entry, Ledger
from .members import Graph, graph
from .protocol_pb2 import (
    Ask,
    Beat,
    Edge,
    Empty,
    Join,
    Joined,
    Leave,
    Member,
    Neighbours,
    Report,
    Settings,
    Status,
    View,
)
from .transport import open_port
from .wire import PROTOCOL

log = logging.getLogger(__name__)

SERVICE = "aedfl.v1.Coordinator"
PATIENCE = 60.0
"""Seconds that devices which have ended wait for one that is away."""
MESSAGE = 1 << 18
"""Bytes that a request may have: a report is far smaller, a model far larger."""


@dataclass
class Seen:
    """What is known of a member since the coordinator started."""

    last: float = field(default_factory=time.monotonic)
    report: Report = field(default_factory=Report)
    heard: bool = False


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
        self.clock = Clock()
        self.clock.at_least(float(self.ledger.get("elapsed", "0")))
        self.over = self.ledger.get("over") == "yes"
        self.epoch = int(self.ledger.get("epoch", "1"))
        self._entries = {entry.name: entry for entry in self.ledger.members()}
        self._seen = {name: Seen() for name in self._entries}
        self._graph: Graph = self._draw()
        self._beats: deque[float] = deque(maxlen=4096)
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        if self.ledger.get("begun") == "yes":
            self.clock.begin()

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
        options: list[tuple[str, Any]] = [("grpc.max_receive_message_length", MESSAGE), ("grpc.so_reuseport", 0)]
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
            return await function(request, context)
        except Refusal as refusal:
            log.warning(str(refusal), extra={"event": "refusal", "peer": context.peer()})
            await context.abort(refusal.code, str(refusal))
        except PeerError as error:
            log.warning(str(error), extra={"event": "refusal", "peer": context.peer()})
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            await self._server.stop(0.2)
        self.ledger.set("elapsed", str(self.clock.now))
        self.ledger.close()

    # ---- calls

    async def _settings(self, request: Ask, context: Any) -> Settings:
        self.security.caller(context, "")
        _same_protocol(request.protocol)
        return Settings(protocol=PROTOCOL, run=self.run, settings=to_toml(self.config))

    async def _join(self, request: Join, context: Any) -> Joined:
        peer = self.security.caller(context, request.name)
        _same_protocol(request.protocol)
        self._same_layout(request)
        entry = self._entries.get(peer.name)
        entry = self._newcomer(request, peer) if entry is None else self._returned(entry, request, peer)
        self._register(entry)
        log.info(f"{entry.name} joined as {entry.index}", extra={"event": "join", "device": entry.index})
        return Joined(index=entry.index, run=self.run, beat=self.beat, view=self._view(entry, 0, 0))

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
        problem = self.ledger.problem(request.token)
        if problem:
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"{peer.name} may not join: {problem}; ask for a new one")
        index = self._free_index(request)
        self.ledger.spend(request.token)
        return Entry(peer.name, index, request.instance, "", "")

    def _free_index(self, request: Join) -> int:
        """The server's, the one that was wished for, or the next that nobody ever had."""
        taken = {entry.index for entry in self._entries.values()}
        if request.server:
            if SERVER in taken:
                raise Refusal(grpc.StatusCode.ALREADY_EXISTS, "the run has a server already")
            return SERVER
        if request.HasField("wish") and 0 <= request.wish < 1 << 20 and request.wish not in taken:
            return request.wish
        return max(taken, default=SERVER) + 1

    def _returned(self, entry: Entry, request: Join, peer: Peer) -> Entry:
        """A known name: the same device again, or, once that is silent, another one in its place."""
        if request.server != (entry.index == SERVER):
            role = "the server" if entry.index == SERVER else "a device"
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"{peer.name} takes part as {role} already")
        if entry.instance != request.instance and self._here(entry.name):
            silent = time.monotonic() - self._seen[entry.name].last
            raise Refusal(
                grpc.StatusCode.ALREADY_EXISTS,
                f"{peer.name} takes part already, at {entry.address}, heard of {silent:.0f} s ago; stop that "
                "device first, or give this one a certificate of its own",
            )
        entry.instance, entry.left = request.instance, False
        return entry

    def _register(self, entry: Entry) -> None:
        self._entries[entry.name] = entry
        seen = self._seen.setdefault(entry.name, Seen())
        seen.last, seen.heard = time.monotonic(), True
        self._changed(entry)

    def _changed(self, entry: Entry) -> None:
        self.ledger.put(entry)
        self.epoch += 1
        self.ledger.set("epoch", str(self.epoch))
        self._graph = self._draw()
        ready = {each.index for each in self._entries.values() if each.address and not each.left}
        served = not self.with_server or SERVER in ready
        if not self.clock.begun and served and len(ready - {SERVER}) >= self.wait_for:
            self.clock.begin()
            self.ledger.set("begun", "yes")

    async def _beat(self, request: Beat, context: Any) -> View:
        peer = self.security.caller(context, request.name)
        entry = self._entries.get(peer.name)
        if entry is None or entry.instance != request.instance:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"{peer.name} is not a member of this run; it must join")
        seen = self._seen[entry.name]
        seen.last, seen.report, seen.heard = time.monotonic(), request.report, True
        self._beats.append(seen.last)
        self.clock.at_least(request.report.now if self.clock.begun else 0.0)
        if (entry.address, entry.serial) != (request.address, peer.serial):
            entry.address, entry.serial = request.address, peer.serial
            self._changed(entry)
        if entry.finished != request.report.finished:
            entry.finished = request.report.finished
            self.ledger.put(entry)
        return self._view(entry, request.epoch, request.revoked)

    async def _leave(self, request: Leave, context: Any) -> Empty:
        """For good; only with the device's own certificate, or the coordinator's."""
        peer = self.security.caller(context, "")
        name = request.name or peer.name
        if peer.serial and peer.name not in (name, self.security.name):
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"the certificate of {peer.name} cannot take {name} out")
        entry = self._entries.get(name)
        if entry is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"{name} is not a member of this run")
        self.remove(entry)
        return Empty()

    def remove(self, entry: Entry) -> None:
        if not entry.left:
            entry.left = True
            self._changed(entry)
            log.info(f"{entry.name} left for good", extra={"event": "leave", "device": entry.index})

    async def _status(self, request: Ask, context: Any) -> Status:
        self.security.caller(context, "")
        _same_protocol(request.protocol)
        return self.status()

    # ---- what is known

    def status(self) -> Status:
        members = [self._member(entry, whole=True) for entry in self._entries.values()]
        view = View(epoch=self.epoch, members=members, elapsed=self.clock.now, begun=self.clock.begun, over=self.over)
        view.devices = self.devices
        edges = [Edge(source=source, target=target) for source, target in self._graph.edges()]
        return Status(
            run=self.run, method=self.config.method, protocol=PROTOCOL, view=view, edges=edges,
            beats_per_second=self.beats_per_second,
        )  # fmt: skip

    @property
    def devices(self) -> int:
        """As many as the run was planned for, or as have ever joined."""
        return max(self.config.devices, 1 + max((e.index for e in self._entries.values()), default=SERVER))

    @property
    def beats_per_second(self) -> float:
        now = time.monotonic()
        return sum(now - beat <= 5.0 for beat in self._beats) / 5.0

    def _view(self, entry: Entry, epoch: int, revoked: int) -> View:
        view = View(
            epoch=self.epoch, elapsed=self.clock.now, begun=self.clock.begun, over=self.over, left=entry.left,
            devices=self.devices, devices_done=self._devices_done(),
        )  # fmt: skip
        if epoch != self.epoch:
            sources, targets = self._graph.neighbours(entry.index)
            view.neighbours.CopyFrom(Neighbours(sources=sources, targets=targets))
            concern = {*sources, *targets, SERVER}
            others = [each for each in self._entries.values() if not each.left and each.address]
            view.members.extend(
                self._member(each) for each in others if entry.index == SERVER or each.index in concern
            )
        number, data = self.security.revocations
        if number > revoked:
            view.revoked = data
        return view

    def _member(self, entry: Entry, whole: bool = False) -> Member:
        seen = self._seen[entry.name]
        state = "left" if entry.left else "here" if self._here(entry.name) else "away"
        member = Member(index=entry.index, name=entry.name, address=entry.address, serial=entry.serial, state=state)
        if whole:
            member.report.CopyFrom(seen.report)
            member.silent = time.monotonic() - seen.last
        return member

    def _here(self, name: str) -> bool:
        seen = self._seen[name]
        return seen.heard and time.monotonic() - seen.last <= 3.0 * self.beat + 1.0

    def _draw(self) -> Graph:
        there = [entry.index for entry in self._entries.values() if not entry.left and entry.index != SERVER]
        return graph(there, self.config.topology, self.config.seed)

    # ---- as time goes by

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.beat))
            self.security.refresh()
            self.ledger.set("elapsed", str(self.clock.now))
            for entry in self._entries.values():
                if not entry.left and self._silence(entry) > self.forget and entry.index != SERVER:
                    self.remove(entry)
            if self.clock.begun and not self.over and self._finished():
                self.over = True
                self.ledger.set("over", "yes")
                log.info("the run is over", extra={"event": "over"})

    def _finished(self) -> bool:
        """The server has ended, or every device that is there and has not left."""
        server = next((entry for entry in self._entries.values() if entry.index == SERVER), None)
        if server is not None:
            return server.finished
        return self._devices_done()

    def _devices_done(self) -> bool:
        """One that has been silent for `PATIENCE` is not waited for; it finds a run that is over when it comes back."""
        there = [entry for entry in self._entries.values() if not entry.left and entry.index != SERVER]
        ended = [entry.finished or self._silence(entry) > PATIENCE for entry in there]
        return self.clock.begun and all(ended) and any(entry.finished for entry in there)

    def _silence(self, entry: Entry) -> float:
        return time.monotonic() - self._seen[entry.name].last


def _same_protocol(number: int) -> None:
    if number != PROTOCOL:
        raise Refusal(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the device speaks protocol {number}, the coordinator {PROTOCOL}; install the same aedfl on both",
        )
