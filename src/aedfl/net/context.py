"""The networked `Context`: verbs take real time, results are computed at once in worker threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import costs
from ..context import SERVER, Context, Message, Model, Size, Spawned, State, Trained
from ..graph import Op, Value, resolve
from ..randomness import generator
from ..sim.work import plain
from ..task import Task
from ..training.op import Train
from ..training.plan import Indices, Plan, Trainer
from .clock import Clock
from .mailbox import Mailbox


class Outbox(Protocol):
    """Where messages go; never waits."""

    def send(self, to: int, kind: str, model: Model | None, fields: dict[str, Any]) -> None: ...

    def waiting(self, to: int) -> bool: ...


class Keeper(Protocol):
    """Where state goes; never waits."""

    def save(self, snapshot: Any) -> None: ...

    def keep(self, message: Message) -> None:
        """A message has arrived; it survives a crash until it is dropped."""

    def drop(self, message: Message) -> None: ...


@dataclass(frozen=True)
class Part:
    """What a device brings along, beside its index: the task, its samples, and the run's settings."""

    task: Task
    trainer: Trainer
    start: Tensor
    rows: Indices
    held: Indices
    plan: Plan
    lr_decay: float = 0.0
    seed: int = 0
    updates: int | None = None
    seconds: float | None = None


class NetSpawned(Spawned):
    """A second coroutine on the wall clock."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def cancel(self) -> None:
        self._task.cancel()


@dataclass(frozen=True)
class Effort:
    """What a local update took: operations as the cost model counts them, and seconds by purpose."""

    flops: float
    seconds: dict[str, float]


Observer = Callable[[float, dict[str, Any], Effort], None]
"""Told of every `publish`: when the local update began, its metrics as plain numbers, and what it took."""


class NetContext(Context):
    """One device (or the server) on a real machine. Everything here runs on one event loop; only work does not."""

    def __init__(self, index: int, part: Part, clock: Clock, outbox: Outbox, keeper: Keeper) -> None:
        self.index, self.part, self.clock = index, part, clock
        self.task = part.task
        self.samples, self.held_out = len(part.rows), len(part.held)
        self.devices = 1
        self.update = 0
        self.stopped = False
        self.devices_done = False
        """For a server: every device has ended its program, and what it sent has arrived."""
        self.model: Model | None = None
        self.mailbox = Mailbox(keeper.drop)
        self.observer: Observer = lambda *_: None
        self.failure: asyncio.Future[None] | None = None
        self._outbox, self._keeper = outbox, keeper
        self._start = Model(Value(part.start.to(self.task.device)), Size(self.task.layout.size, self.task.macs))
        self._trainings = 0
        self._saved: dict[str, Any] | None = None
        self._since = clock.now
        self._spent: dict[str, float] = {}
        self._flops = 0.0
        self._neighbours: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._next_neighbours: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._training = ThreadPoolExecutor(1, "training")
        self._light = ThreadPoolExecutor(1, "compute")

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def running(self) -> bool:
        part = self.part
        if self.stopped or (part.seconds is not None and self.now >= part.seconds):
            return False
        if self.index == SERVER:
            return not self.devices_done or bool(self.mailbox.messages)
        return part.updates is None or self.update < part.updates

    @property
    def in_neighbours(self) -> tuple[int, ...]:
        return self._neighbours[0]

    @property
    def out_neighbours(self) -> tuple[int, ...]:
        return self._neighbours[1]

    def meet(self, sources: tuple[int, ...], targets: tuple[int, ...], at_once: bool = False) -> None:
        """New neighbours; they count from the next local update on, so that none sees two sets of them."""
        self._next_neighbours = sources, targets
        if at_once:
            self._neighbours = self._next_neighbours

    def initial(self) -> Model:
        return self._start

    def plan(self, done: float | None = None) -> Plan:
        plan = self.part.plan
        return replace(plan, lr=plan.lr * (1.0 - self.part.lr_decay) ** (self.update if done is None else done))

    def random(self, purpose: str) -> np.random.Generator:
        return generator(self.part.seed, self.index, self.update, "program", purpose)

    async def train(self, model: Model, plan: Plan | None = None, anchor: Model | None = None) -> Trained:
        plan = plan or self.plan()
        self._trainings += 1
        key = (self.part.seed, self.index, self._trainings)
        pulled = anchor.vector if anchor and plan.proximal else None
        op = Train(self.part.trainer, plan.shape())
        args = (model.vector, model.mask, pulled, self.part.rows, key, plan.lr, plan.epochs)
        vector, loss, first_loss, gradient = await self._work(self._training, op, args, "training")
        self._flops += costs.training(model.size.macs, self.samples * plan.epochs)
        trained = Model(vector, model.size, model.mask)
        return Trained(trained, loss, first_loss, gradient, plan.steps(self.samples))

    async def compute(self, op: Op, *args: Any, flops: float, purpose: str) -> tuple[Value, ...]:
        self._flops += flops
        return await self._work(self._light, op, args, purpose)

    async def spend(self, flops: float, purpose: str) -> None:
        """The time has passed already: it was measured with the job that did the work."""
        self._flops += flops

    async def _work(self, pool: ThreadPoolExecutor, op: Op, args: tuple[Any, ...], purpose: str) -> tuple[Value, ...]:
        def run() -> tuple[tuple[Value, ...], float]:
            begin = time.monotonic()
            with torch.no_grad():
                (results,) = op.run([tuple(resolve(arg) for arg in args)])
            return tuple(Value(tensor) for tensor in results), time.monotonic() - begin

        values, seconds = await asyncio.get_running_loop().run_in_executor(pool, run)
        self._spent[purpose] = self._spent.get(purpose, 0.0) + seconds
        return values

    async def aside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function beside the program, in the thread of light work."""
        return await asyncio.get_running_loop().run_in_executor(self._light, function, *args)

    def known(self, data: Tensor) -> Value:
        return Value(data.to(self.task.device))

    def batch(self, count: int, purpose: str, held_out: bool = False) -> Indices:
        rows = self.part.held if held_out else self.part.rows
        return self.random(purpose).permutation(rows)[:count]

    async def read(self, *values: Value) -> list[Any]:
        return [plain(value) for value in values]

    def send(self, to: int, model: Model | None = None, kind: str = "model", **fields: Any) -> None:
        self._outbox.send(to, kind, model, _copied(fields))

    def waiting(self, to: int) -> bool:
        return self._outbox.waiting(to)

    def deliver(self, message: Message) -> None:
        """A whole message has arrived and fits."""
        self._keeper.keep(message)
        self.mailbox.deliver(message)

    def receive(self) -> list[Message]:
        return self.mailbox.drain()

    async def wait(self, timeout: float | None = None, kind: str | None = None) -> Message | None:
        return await self.mailbox.wait(timeout, kind)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def spawn(self, program: Coroutine[Any, Any, None]) -> NetSpawned:
        task = asyncio.get_running_loop().create_task(program)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return NetSpawned(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self.failure is not None and not self.failure.done():
            self.failure.set_exception(error)

    def publish(self, model: Model, **metrics: Any) -> None:
        self.update += 1
        self.model = model
        self._neighbours = self._next_neighbours
        effort, self._spent, self._flops = Effort(self._flops, self._spent), {}, 0.0
        self.observer(self._since, plain(metrics), effort)
        self._since = self.now
        self._keep()

    def save(self, state: State) -> None:
        self._saved = _copied(dict(state))
        self._keep()

    def _keep(self) -> None:
        self._keeper.save(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """All that must survive a crash; nothing in it changes later."""
        mine = {"index": self.index, "update": self.update, "trainings": self._trainings, "now": self.now}
        return {**mine, "model": self.model, "program": self._saved}

    def revive(self, snapshot: dict[str, Any] | None, messages: Sequence[Message]) -> None:
        """Takes up what an earlier process of this device left on the disk, and what it had not taken yet."""
        self.mailbox.messages.extend(messages)
        if snapshot is None:
            return
        self.clock.at_least(snapshot["now"])
        self.update, self._trainings = snapshot["update"], snapshot["trainings"]
        self.model, self._saved = snapshot["model"], snapshot["program"]

    def restore(self) -> dict[str, Any] | None:
        return None if self._saved is None else _copied(self._saved)

    def end(self) -> None:
        """Ends every coroutine of the device at its current `await`."""
        for task in tuple(self._tasks):
            task.cancel()

    def close(self) -> None:
        self.end()
        for pool in (self._training, self._light):
            pool.shutdown(wait=False, cancel_futures=True)


def _copied(thing: Any) -> Any:
    """A copy of the containers; what they hold is immutable and shared."""
    if isinstance(thing, dict):
        return {key: _copied(part) for key, part in thing.items()}
    return [_copied(part) for part in thing] if isinstance(thing, list) else thing
