"""The networked context keeps the contract: real nodes with a coordinator, over gRPC on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aedfl.context import SERVER, Method, Program
from aedfl.experiment.config import RunConfig, load
from aedfl.net.coordinator import Coordinator
from aedfl.net.credentials import Plaintext
from aedfl.net.node import Node
from aedfl.net.options import Options
from contract.harness import Harness, Notes, Setting, noting
from contract.suite import CHECKS
from net.cluster import kit
from sim.worlds import PLAN


class NetHarness:
    """Every device is a node with its folder; a crash ends it, and another one takes up its folder."""

    def __init__(self, unit: float) -> None:
        self.unit = unit * float(os.environ.get("AEDFL_CONTRACT_PACE", "1"))

    def run(self, device: Program, **settings: Any) -> Notes:
        return asyncio.run(self._run(device, Setting(**settings)))

    async def _run(self, device: Program, setting: Setting) -> Notes:
        notes: Notes = {}
        changes = setting.changes or {}
        lives = {index: tuple(changes.get(index, [(0.0, "join")])) for index in range(setting.devices)}
        if setting.server is not None:
            lives[SERVER] = ((0.0, "join"),)
        server = setting.server and noting(setting.server, notes)
        method = Method("test", "", None, noting(device, notes), server)
        early = sum(life[0][0] == 0 for index, life in lives.items() if index != SERVER)
        with tempfile.TemporaryDirectory() as folder:
            lifetime = 0.4 * self.unit if changes else 60.0
            fleet = Fleet(Path(folder), _config(setting), method, early, lifetime)
            await fleet.run(lives, self.unit, setting.units)
        return {index: notes.get(index, []) for index in lives}


class Fleet:
    """A coordinator, and the nodes as they come and go."""

    def __init__(self, folder: Path, config: RunConfig, method: Method, early: int, lifetime: float) -> None:
        self.folder, self.config, self.method, self.lifetime = folder, config, method, lifetime
        self.coordinator = Coordinator(
            config, folder / "c", Plaintext("coordinator"), beat=0.1, wait_for=early,
            with_server=method.server is not None,
        )  # fmt: skip
        self.token = self.coordinator.ledger.new_token(1.0, 100)

    async def run(self, lives: Mapping[int, Sequence[tuple[float, str]]], unit: float, units: float) -> None:
        self.port = await self.coordinator.start("127.0.0.1:0")
        running = [asyncio.ensure_future(self._life(index, life, unit)) for index, life in lives.items()]
        try:
            with contextlib.suppress(TimeoutError):  # a world ends when its time is up, whoever still runs
                async with asyncio.timeout(units * unit + 5.0):
                    await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self.coordinator.close()

    async def _life(self, index: int, life: Sequence[tuple[float, str]], unit: float) -> None:
        current: asyncio.Future[Any] | None = None
        for time, event in life:
            while self.coordinator.clock.now < time * unit:
                if current is not None and current.done():
                    current.result()
                await asyncio.sleep(0.01)
            if event == "join" and current is None:
                current = asyncio.ensure_future(self._node(index).run())
            elif event != "join" and current is not None:
                current.cancel()
                with suppress(asyncio.CancelledError):
                    await current
                current = None
            if event == "leave":
                self.coordinator.remove(self.coordinator.roster.entries[_name(index)])
                return
        if current is not None:
            try:
                await current
            except asyncio.CancelledError:
                current.cancel()
                await asyncio.gather(current, return_exceptions=True)
                raise

    def _node(self, index: int) -> Node:
        options = Options(
            f"127.0.0.1:{self.port}", self.folder / str(index), token=self.token, server=index == SERVER,
            wish=None if index == SERVER else index, grace=0.02, hurry=0.02, lifetime=self.lifetime,
        )  # fmt: skip
        return Node(options, Plaintext(_name(index)), kit, self.method)


def _name(index: int) -> str:
    return "server" if index == SERVER else f"device-{index}"


def _config(setting: Setting) -> RunConfig:
    training = {"epochs": PLAN.epochs, "batch_size": PLAN.batch_size, "lr": PLAN.lr, "lr_decay": setting.lr_decay}
    return load(
        "digits", devices=setting.devices, seed=setting.seed, training=training,
        topology={"kind": setting.topology},
        stop={"updates": setting.updates or "none", "virtual_seconds": 1e6, "target_accuracy": "none"},
    )  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_networked_context_keeps_the_contract(check: Callable[[Harness], None]) -> None:
    """A device that comes back has to join anew, which takes a while on a busy machine.

    The checks speak of units of time. A machine too busy for one length of them is tried at a longer one; a context
    that breaks the contract breaks it at every length.
    """
    unit = 1.0 if check.__module__ == "contract.lives" else 0.5
    for slower in (1, 3):
        with suppress(AssertionError, LookupError, ValueError):
            return check(NetHarness(unit * slower))
    check(NetHarness(unit * 6))
