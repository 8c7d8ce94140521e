"""A run in one process for tests: a coordinator and nodes that talk over gRPC on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from aedfl.context import SERVER, Context, Method, Program
from aedfl.experiment.config import RunConfig, load
from aedfl.net.coordinator import Coordinator
from aedfl.net.credentials import Plaintext, Security, Tls
from aedfl.net.identity import Authority
from aedfl.net.kit import Kit
from aedfl.net.link import Link
from aedfl.net.node import Node
from aedfl.net.options import Options
from aedfl.net.protocol_pb2 import Join
from aedfl.net.wire import PROTOCOL
from aedfl.task import Task
from aedfl.training.evaluate import Evaluator
from aedfl.training.sequential import SequentialTrainer
from sim.worlds import tiny_rows, tiny_task

BEAT = 0.1
PATIENCE = 90.0
"""Seconds after which something that must happen will not happen any more, however busy the machine is."""


async def chat(ctx: Context, _: Any) -> None:
    """Trains, sends to everybody it may, takes what came; keeps its count and what it has got."""
    state = ctx.restore() or {"model": ctx.initial(), "got": {}}
    while ctx.running:
        trained = await ctx.train(state["model"])
        state["model"] = trained.model
        for message in ctx.receive():
            state["got"][message.source] = state["got"].get(message.source, 0) + 1
        for other in ctx.out_neighbours:
            ctx.send(other, trained.model, loss=trained.loss, samples=ctx.samples)
        ctx.publish(trained.model, loss=trained.loss, merged=[])
        ctx.save(state)
        await ctx.sleep(0.05)


def config(devices: int, **more: Any) -> RunConfig:
    stop = {"virtual_seconds": 1e6, "updates": "none", "target_accuracy": "none"}
    return load("digits", devices=devices, topology={"kind": "full"}, **{"stop": stop, **more})


@cache
def evaluator(task: Task) -> Evaluator:
    """Made once, before anything trains: it traces the module, which other threads of the process must not see."""
    return Evaluator(task)


def kit(settings: RunConfig, task: Task | None = None) -> Kit:
    task = task or tiny_task(max(5, settings.devices))
    pairs = [tiny_rows(index) for index in range(max(5, settings.devices))]
    rows: Any = SimpleNamespace(train=[own for own, _ in pairs], held_out=[held for _, held in pairs])
    rows.public = np.empty(0, dtype=np.int64)
    return Kit(settings, task, task.start, SequentialTrainer(task), evaluator(task), rows)


class Cluster:
    """Makes nodes, starts and ends them, and looks at what they do."""

    def __init__(self, folder: Path, devices: int, tls: bool, program: Program, **settings: Any) -> None:
        self.folder, self.tls = folder, tls
        self.config = config(devices, **settings)
        self.method = Method("chat", "", None, program)
        self.authority = Authority.create(folder / "tls") if tls else None
        if self.authority is not None:
            for name in ("coordinator", *(f"device-{index}" for index in range(devices + 1))):
                self.authority.issue(name)
        evaluator(tiny_task(max(5, devices)))
        self.nodes: dict[int, Node] = {}
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.token = ""

    def security(self, name: str) -> Security:
        return Tls(self.folder / "tls" / name) if self.tls else Plaintext(name)

    async def coordinate(self, address: str = "127.0.0.1:0", **options: Any) -> None:
        """Starts the coordinator (again)."""
        options = {"beat": BEAT, **options}
        self.coordinator = Coordinator(self.config, self.folder / "c", self.security("coordinator"), **options)
        self.token = self.token or self.coordinator.ledger.new_token(1.0, 100)
        self.port = await self.coordinator.start(address)

    def node(self, index: int, **options: Any) -> Node:
        name = options.pop("name", f"device-{index}")
        given = {
            "token": self.token, "wish": index, "grace": 0.1, "hurry": 0.1, "patience": 0.5, "settle": 0.3, **options,
        }  # fmt: skip
        folder = given.pop("folder", self.folder / f"d{index}")
        security = given.pop("security", None) or self.security(name)
        prepare = given.pop("prepare", kit)
        return Node(Options(f"127.0.0.1:{self.port}", folder, **given), security, prepare, self.method)

    def start(self, index: int, **options: Any) -> Node:
        self.nodes[index] = self.node(index, **options)
        self.tasks[index] = asyncio.ensure_future(self.nodes[index].run())
        return self.nodes[index]

    async def kill(self, index: int) -> None:
        self.tasks[index].cancel()
        await asyncio.gather(self.tasks.pop(index), return_exceptions=True)
        del self.nodes[index]

    async def until(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                for task in self.tasks.values():
                    if task.done() and task.exception() is not None:
                        task.result()
                await asyncio.sleep(0.02)

    def updates(self, index: int) -> int:
        node = self.nodes.get(index)
        return node.context.update if node is not None and hasattr(node, "context") else 0

    def listening(self, index: int) -> int:
        """Its port; 0 before it has one."""
        node = self.nodes[index]
        return node.transport.port if hasattr(node, "transport") else 0

    def received(self, index: int) -> int:
        return self.nodes[index].transport.counters.messages_received

    def join_request(self, name: str, **changes: Any) -> Join:
        request = Join(protocol=PROTOCOL, name=name, token=self.token, instance=1, layout=b"x", parameters=15)
        for key, value in changes.items():
            setattr(request, key, value)
        return request

    @asynccontextmanager
    async def link(self, name: str) -> AsyncIterator[Link]:
        link = Link(f"127.0.0.1:{self.port}", self.security(name))
        try:
            yield link
        finally:
            await link.close()

    async def close(self) -> None:
        for index in tuple(self.tasks):
            await self.kill(index)
        await self.coordinator.close()


@asynccontextmanager
async def cluster(
    folder: Path, devices: int = 2, tls: bool = True, program: Program = chat, start: bool = True, **settings: Any
) -> AsyncIterator[Cluster]:
    made = Cluster(folder, devices, tls, program, **settings)
    await made.coordinate()
    try:
        for index in range(devices if start else 0):
            made.start(index)
        if start:
            await made.until(lambda: all(made.updates(index) for index in range(devices)))
        yield made
    finally:
        await made.close()


__all__ = ["BEAT", "PATIENCE", "SERVER", "Cluster", "chat", "cluster", "config", "kit"]
