"""A device's membership in a run: joining, heartbeats, and what the coordinator says about the others.

The coordinator may be away at any time. What is needed to come back without it lies in the device's own folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict

from ..context import SERVER
from ..errors import UserError
from ..experiment.config import RunConfig, from_toml, to_toml
from ..layout import Layout
from .check import layout_digest
from .clock import Clock
from .credentials import Security
from .link import CoordinatorAway, Link, NotAMember, Refused
from .options import Options
from .protocol_pb2 import Beat, Join, Report, View
from .store import Store
from .wire import PROTOCOL

log = logging.getLogger(__name__)


class Body(Protocol):
    """What the membership is of: it reports, and is told of changes."""

    def report(self) -> Report: ...

    def heard(self, changed: bool) -> None:
        """The coordinator has answered; `changed` if members or neighbours are others than before."""

    def renewed(self) -> None:
        """The own certificate is a new one."""

    def fail(self, error: Exception) -> None:
        """It cannot go on as a member."""


class Membership:
    """One device's place in a run."""

    def __init__(self, options: Options, security: Security, store: Store, clock: Clock) -> None:
        self.options, self.security, self.store, self.clock = options, security, store, clock
        self.link = Link(options.coordinator, security)
        self.view = View()
        self.trouble = ""
        """Why the coordinator could not be told, as long as it could not."""
        self.address = options.advertise
        self.ended = asyncio.Event()
        """The run is over, or this device has left it."""
        self.changed = asyncio.Event()
        self._body: Body | None = None
        self._beats: asyncio.Task[None] | None = None

    # ---- joining

    async def settings(self) -> RunConfig:
        """The run's settings; from the own folder if the coordinator is away."""
        self._known = self._read()
        known = self._known
        try:
            settings = await self._patient(self.link.settings, 0.0 if known else self.options.patience)
            run, text = settings.run, settings.settings
            if known and known["run"] != run:
                raise UserError(
                    f"{self.store.folder} belongs to run {known['run']}, but the coordinator's is {run}; "
                    "give the device another --out folder"
                )
        except CoordinatorAway as error:
            if not known:
                raise
            log.warning(f"{error}; going on without it", extra={"event": "alone"})
            run, text = known["run"], known["settings"]
        self.run = run
        self.config = from_toml(text, "the run's settings")
        return self.config

    async def enter(self, layout: Layout) -> None:
        """Gets an index, or the old one again."""
        known = self._known
        self._layout = layout
        wish = known["index"] if known else self.options.wish
        try:
            joined = await self._patient(lambda: self.link.join(self._request(wish)), 0.0 if known else 10.0)
        except CoordinatorAway:
            if known is None:
                raise
            self.index, self._beat = int(known["index"]), float(known["beat"])
            self._take(ParseDict(known["view"], View()))
            return
        self.index, self._beat = joined.index, joined.beat
        self._take(joined.view)

    def _request(self, wish: int | None) -> Join:
        request = Join(
            protocol=PROTOCOL, name=self.security.name, token=self.options.token, instance=self.store.instance,
            address=self.options.advertise, server=self.options.server, layout=layout_digest(self._layout),
            parameters=self._layout.size,
        )  # fmt: skip
        if wish is not None and wish != SERVER:
            request.wish = wish
        return request

    async def _patient(self, call: Callable[[], Any], patience: float) -> Any:
        """Tries again while the coordinator does not answer, for a while."""
        end = asyncio.get_running_loop().time() + patience
        while True:
            try:
                return await call()
            except CoordinatorAway:
                if asyncio.get_running_loop().time() >= end:
                    raise
                await asyncio.sleep(0.3)

    def _read(self) -> dict[str, Any] | None:
        path = self.store.folder / "membership.json"
        try:
            return dict(json.loads(path.read_text())) if path.exists() else None
        except ValueError as error:
            raise UserError(f"{path} cannot be read ({error}); move it away to ask the coordinator anew") from None

    def remember(self) -> None:
        """What is needed to come back when nobody can be asked."""
        known = {"run": self.run, "index": self.index, "beat": self._beat, "settings": to_toml(self.config)}
        self.store.dump("membership.json", {**known, "view": MessageToDict(self.view)})

    # ---- heartbeats

    async def start(self, port: int, body: Body) -> None:
        """From now on the coordinator hears of this device, which listens on that port."""
        self._body = body
        self.address = self.options.advertise or f"{self.options.listen.rpartition(':')[0]}:{port}"
        await self.tell()
        self._beats = asyncio.get_running_loop().create_task(self._keep_in_touch())

    async def _keep_in_touch(self) -> None:
        """Goes on whatever happens: a device that falls silent would be given up by all others."""
        while True:
            await asyncio.sleep(self._beat)
            try:
                await self._renew()
                await self.tell()
            except Exception:
                log.exception("a heartbeat failed", extra={"event": "heartbeat"})

    async def _renew(self) -> None:
        if self.security.refresh():
            log.info("certificate renewed", extra={"event": "certificate"})
            await self.link.reconnect()
            if self._body is not None:
                self._body.renewed()

    async def tell(self) -> None:
        """One heartbeat; what goes wrong with it must not disturb the training."""
        assert self._body is not None
        number, _ = self.security.revocations
        request = Beat(
            name=self.security.name, instance=self.store.instance, address=self.address, epoch=self.view.epoch,
            revoked=number, report=self._body.report(),
        )  # fmt: skip
        try:
            self._take(await self.link.beat(request))
            self.trouble = ""
        except NotAMember:
            await self._rejoin(self._body)
        except (CoordinatorAway, UserError) as error:
            self._complain(str(error))

    async def _rejoin(self, body: Body) -> None:
        """The coordinator has forgotten this device, or another has taken its place."""
        try:
            joined = await self.link.join(self._request(self.index))
        except (CoordinatorAway, NotAMember) as error:
            self._complain(str(error))
        except Refused as error:
            self._complain(str(error))
            if error.code == grpc.StatusCode.ALREADY_EXISTS:
                body.fail(error)
        else:
            if joined.index != self.index:
                body.fail(UserError(f"the coordinator now takes this device for number {joined.index}; start it anew"))
            else:
                self._take(joined.view)

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning(trouble, extra={"event": "coordinator"})
        self.trouble = trouble

    def _take(self, view: View) -> None:
        """What the coordinator says now. Members and neighbours come only when they have changed."""
        if view.revoked:
            self.security.learn(view.revoked)
        changed = view.epoch != self.view.epoch
        if not changed:
            view.members.extend(self.view.members)
            view.neighbours.CopyFrom(self.view.neighbours)
        self.view = view
        self.clock.at_least(view.elapsed)
        if view.begun:
            self.clock.begin()
        if self._body is not None:
            self._body.heard(changed)
        if view.over or view.left:
            self.ended.set()
        self.changed.set()

    async def close(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        await self.link.close()
