"""The simulated `Context`: verbs take virtual time, results come from the queue."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import simpy
from torch import Tensor

from .. import costs
from ..context import SERVER, Context, Message, Model, Program, Size, Spawned, State, Trained
from ..errors import UserError
from ..graph import PLAIN, Op, Value
from ..randomness import generator
from ..training.plan import Indices, Plan
from .clock import On, drive
from .mailbox import Mailbox

if TYPE_CHECKING:
    from .simulation import Simulation


class SimSpawned(Spawned):
    """A second coroutine on the virtual clock."""

    def __init__(self, process: simpy.Process) -> None:
        self._process = process

    def cancel(self) -> None:
        if self._process.is_alive:
            self._process.interrupt()


class SimContext(Context):
    """One device (or the server) of a simulation."""

    def __init__(self, sim: Simulation, index: int, rows: Indices, held: Indices, speed: float) -> None:
        self.sim = sim
        self.task = sim.task
        self.index = index
        self.devices = sim.devices
        self.samples = len(rows)
        self.held_out = len(held)
        self.update = 0
        self.up = False
        self.finished = False
        """True once the program has ended by itself; a second coroutine may still answer others."""
        self.lasting = False
        """True when it will not be stopped any more: nobody will ask for what it saves."""
        self.model: Model | None = None
        self.mailbox = Mailbox()
        self.processes: list[simpy.Process] = []
        self.waits_for: dict[int, str] = {}
        self._rows, self._held = rows, held
        self._speed = speed
        self._trainings = 0
        self._saved: dict[str, Any] | None = None
        self._since = 0.0

    @property
    def now(self) -> float:
        return float(self.sim.env.now)

    @property
    def running(self) -> bool:
        if self.index == SERVER:
            return not self.sim.stopped and self.sim.needs_server
        limit = self.sim.stop.updates
        return not self.sim.stopped and (limit is None or self.update < limit)

    @property
    def over(self) -> bool:
        """True when nothing of it runs, nor ever will: what still comes is not kept, since nobody will look."""
        return self.finished and not self.running and not any(process.is_alive for process in self.processes)

    @cached_property
    def in_neighbours(self) -> tuple[int, ...]:
        return () if self.index == SERVER else tuple(self.sim.topology.in_neighbours(self.index))

    @cached_property
    def out_neighbours(self) -> tuple[int, ...]:
        return () if self.index == SERVER else tuple(self.sim.topology.out_neighbours(self.index))

    def initial(self) -> Model:
        return self.sim.start

    def plan(self, done: float | None = None) -> Plan:
        return self.sim.plan_at(self.update if done is None else done)

    def random(self, purpose: str) -> np.random.Generator:
        return generator(self.sim.seed, self.index, self.update, "program", purpose)

    async def train(self, model: Model, plan: Plan | None = None, anchor: Model | None = None) -> Trained:
        plan = plan or self.plan()
        self._trainings += 1
        args = (
            model.vector,
            model.mask,
            anchor.vector if anchor and plan.proximal else None,
            self._rows,
            (self.sim.seed, self.index, self._trainings),
            plan.lr,
            plan.epochs,
        )
        vector, loss, first_loss, gradient = self.sim.work.submit(self.sim.training(plan), args)
        samples = self.samples * plan.epochs
        await self.spend(costs.training(model.size.macs, samples), "training")
        self.sim.samples += samples
        trained = Model(vector, model.size, model.mask)
        return Trained(trained, loss, first_loss, gradient, plan.steps(self.samples))

    async def compute(self, op: Op, *args: Any, flops: float, purpose: str) -> tuple[Value, ...]:
        values = self.sim.work.submit(op, args)
        await self.spend(flops, purpose)
        return values

    async def spend(self, flops: float, purpose: str) -> None:
        sim, seconds = self.sim, flops / self._speed
        await On(sim.env.timeout(seconds))
        sim.costs[purpose] = sim.costs.get(purpose, 0.0) + seconds

    def known(self, data: Tensor) -> Value:
        return self.sim.work.known(data.to(self.task.device))

    def batch(self, count: int, purpose: str, held_out: bool = False) -> Indices:
        rows = self._held if held_out else self._rows
        return self.random(purpose).permutation(rows)[:count]

    async def read(self, *values: Value) -> list[Any]:
        event = self.sim.env.event()
        self.sim.reads.append((event, values))
        return list(await On(event))

    def send(self, to: int, model: Model | None = None, kind: str = "model", **fields: Any) -> None:
        self.sim.check_target(self.index, to)
        size = Size(0, 0.0) if model is None else _checked("send", model).size
        masked = model is not None and model.mask is not None
        form = self.sim.method.messages.get(kind)
        vectors = form.vectors(fields) if form else 0
        entries = vectors * self.task.filters.count if vectors else 0
        count = costs.message(size.parameters, self.task.layout.size, masked, fields, entries)
        self.sim.post(Message(self.index, kind, model, _copied(fields)), to, count)

    def waiting(self, to: int) -> bool:
        return self.sim.network.waiting(self.index, to, self.sim.env.now)

    def receive(self) -> list[Message]:
        return self.mailbox.drain()

    async def wait(self, timeout: float | None = None, kind: str | None = None) -> Message | None:
        message = self.mailbox.take(kind)
        if message is not None or timeout == 0:
            return message
        waiter = self.mailbox.wait(self.sim.env.event(), kind)
        if timeout is not None:
            late = ref(waiter)  # the timer outlasts a waiter that is served, and would keep its message
            timer = self.sim.env.timeout(timeout)
            timer.callbacks.append(lambda _: self.mailbox.give_up(late()))
        self.waits_for[id(waiter)] = f"a message of kind {kind!r}" if kind else "any message"
        try:
            arrived: Message | None = await On(waiter.event)
        except GeneratorExit:
            self.mailbox.end(waiter)
            raise
        finally:
            del self.waits_for[id(waiter)]
        return arrived

    async def sleep(self, seconds: float) -> None:
        await On(self.sim.env.timeout(seconds))

    def spawn(self, program: Coroutine[Any, Any, None]) -> SimSpawned:
        return SimSpawned(self._process(drive(program)))

    def _process(self, steps: Generator[simpy.Event, Any, None]) -> simpy.Process:
        process = self.sim.env.process(steps)
        self.processes = [p for p in self.processes if p.is_alive] + [process]
        return process

    def publish(self, model: Model, **metrics: Any) -> None:
        self.model = _checked("publish", model)
        self.update += 1
        self.sim.published(self, self._since, _copied(metrics))
        self._since = self.now

    def save(self, state: State) -> None:
        self._saved = None if self.lasting else _copied(state if isinstance(state, dict) else dict(state))

    def restore(self) -> dict[str, Any] | None:
        return None if self._saved is None else _copied(self._saved)

    def start(self) -> None:
        """Starts the program from its top; after a crash it finds its saved state."""
        self.up, self._since = True, self.now
        program = self.sim.method.server if self.index == SERVER else self.sim.method.device
        assert program is not None
        self._process(self._main(program))

    def _main(self, program: Program) -> Generator[simpy.Event, Any, None]:
        """Makes the coroutine only when it runs: nobody need end one of a simulation that was never advanced."""
        yield from drive(self._run(program))

    async def _run(self, program: Program) -> None:
        await program(self, self.sim.hyper)
        self.finished = True
        self.sim.unfinished.discard(self.index)

    def kill(self) -> None:
        """Stops everything at once; unfinished work is lost, the mailbox and the saved state are not."""
        self.up = False
        for process in self.processes:
            if process.is_alive:
                process.interrupt()
        self.processes = []


_SHARED = PLAIN | {Value, Model, tuple}
"""The usual types of what is no container; most parts of a state need no longer look."""


def _checked(verb: str, model: Any) -> Model:
    if not isinstance(model, Model):
        raise UserError(f"ctx.{verb}: the model must be an aedfl.context.Model, not a {type(model).__name__}")
    return model


def _copied(thing: Any) -> Any:
    """A copy of the containers; what they hold is immutable and shared."""
    if isinstance(thing, dict):
        copy = dict(thing)
        for key, part in thing.items():
            if type(part) not in _SHARED and isinstance(part, (dict, list)):
                copy[key] = _copied(part)
        return copy
    return [_copied(part) for part in thing] if isinstance(thing, list) else thing
