"""A simulation: contexts, network and fleet on one virtual clock, advanced from outside.

`advance` runs events until a time, or until a program reads a result that is not computed yet. Whoever drives
the simulation then flushes the queue, perhaps after advancing other simulations that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

import numpy as np
import simpy
from torch import Tensor

from .. import costs
from ..context import SERVER, Message, Method, Model, Size
from ..errors import Deadlock, UserError
from ..graph import Queue, Value
from ..task import Task
from ..training.op import Train
from ..training.plan import Indices, Plan, Trainer
from .context import SimContext
from .fleet import Change, Fleet
from .network import Links, Network
from .work import Work, fetch

SERVER_SPEED = 10.0
"""A server computes this many times as fast as the fastest device."""


class Neighbours(Protocol):
    """What a simulation asks of a topology."""

    def in_neighbours(self, device: int, /) -> Sequence[int]: ...

    def out_neighbours(self, device: int, /) -> Sequence[int]: ...


@dataclass(frozen=True)
class Stop:
    """When programs are told to stop: local updates per device; other conditions are the driver's."""

    updates: int | None = None


@dataclass
class Journal:
    """What programs read, in order; while replaying, the answers."""

    record: Callable[[list[Any]], None] = lambda _: None
    answers: Iterator[list[Any]] = field(default_factory=lambda: iter(()))


Observer = Callable[[SimContext, float, dict[str, Any]], None]


class Simulation:
    """A fleet running one method. Everything about it follows from its arguments."""

    def __init__(
        self,
        *,
        method: Method,
        hyper: Any,
        task: Task,
        trainer: Trainer,
        start: Tensor,
        rows: Sequence[Indices],
        held_out: Sequence[Indices],
        topology: Neighbours,
        fleet: Fleet,
        links: Links,
        plan: Plan,
        lr_decay: float,
        seed: int,
        stop: Stop,
        queue: Queue,
        lookahead: int = 256,
        observer: Observer = lambda *_: None,
        public: Indices | None = None,
    ) -> None:
        self.env = simpy.Environment()
        self.method, self.hyper, self.task, self.trainer = method, hyper, task, trainer
        self.topology, self.seed, self.stop = topology, seed, stop
        self.plan, self.lr_decay = plan, lr_decay
        self._plans: dict[float, Plan] = {}
        self._trainings: dict[Plan, Train] = {}
        self.network = Network(links, seed)
        self.work = Work(queue, lookahead)
        self.journal = Journal()
        self.observer = observer
        self.devices = len(rows)
        self.stopped = False
        self.time = 0.0
        self.updates = 0
        self.samples = 0
        self.costs: dict[str, float] = {}
        self.reads: list[tuple[simpy.Event, tuple[Value, ...]]] = []
        vector = self.work.known(start.to(task.device))
        self.start = Model(vector, Size(task.layout.size, task.macs))
        self._populate(rows, held_out, fleet, rows[0][:0] if public is None else public)

    def _populate(
        self, rows: Sequence[Indices], held_out: Sequence[Indices], fleet: Fleet, public: Indices
    ) -> None:
        mean = sum(len(own) for own in rows) / len(rows)
        update = max(1.0, costs.training(self.task.macs, mean * self.plan.epochs))
        speeds = [update / seconds for seconds in fleet.seconds]
        self.contexts = [
            SimContext(self, index, own, held, speed)
            for index, (own, held, speed) in enumerate(zip(rows, held_out, speeds, strict=True))
        ]
        self.server: SimContext | None = None
        if self.method.server is not None:
            self.server = SimContext(self, SERVER, public, public[:0], max(speeds) * SERVER_SPEED)
            self.server.lasting = True
            self.server.start()
        self.unfinished = set(range(self.devices))
        self._to_server = 0
        for context in self.contexts:
            self._schedule(context, fleet.life(context.index))

    def _schedule(self, context: SimContext, life: Iterator[Change]) -> None:
        """Puts the device's next change on the clock; the change then schedules the one after it."""
        change = next(life, None)
        if change is None:
            self._ends(context)
            return
        time, event = change

        def happen(_: simpy.Event | None = None) -> None:
            if event == "join" and not context.up:
                context.start()
            elif event != "join" and context.up:
                context.kill()
            if event == "leave":
                self._ends(context)
            else:
                self._schedule(context, life)

        if time <= 0:
            happen()
        else:
            self.env.timeout(time - self.env.now).callbacks.append(happen)

    def _ends(self, context: SimContext) -> None:
        """No change will follow; a device that is not there now never comes back."""
        context.lasting = True
        if not context.up:
            self.unfinished.discard(context.index)

    def plan_at(self, update: float) -> Plan:
        """The run's training plan with the learning rate decayed by the number of local updates."""
        if update not in self._plans:
            self._plans[update] = replace(self.plan, lr=self.plan.lr * (1.0 - self.lr_decay) ** update)
        return self._plans[update]

    def training(self, plan: Plan) -> Train:
        """The job's op; made once for each shape, of which a method seldom has more than one."""
        shape = plan.shape()
        if shape not in self._trainings:
            self._trainings[shape] = Train(self.trainer, shape)
        return self._trainings[shape]

    def node(self, index: int) -> SimContext | None:
        return self.server if index == SERVER else self.contexts[index]

    def check_target(self, source: int, to: Any) -> None:
        """A message must be for somebody; whether they are there is seen when it arrives."""
        served = self.server is not None
        if not isinstance(to, int | np.integer) or not (0 <= to < self.devices or (served and to == SERVER)):
            server = f", and {SERVER} for the server" if served else ""
            raise UserError(
                f"ctx.send: {_name(source)} sends to {to!r}, which is no device; "
                f"allowed is a whole number from 0 to {self.devices - 1}{server}"
            )

    def post(self, message: Message, to: int, count: int) -> None:
        """Sends a message on its way; it is lost if the receiver is not there when it arrives."""
        arrival = self.network.transfer(message.source, to, count, self.env.now)
        if arrival is not None:
            self._to_server += to == SERVER
            timer = self.env.timeout(arrival - self.env.now)
            timer.callbacks.append(lambda _: self._arrive(message, to))

    def _arrive(self, message: Message, to: int) -> None:
        self._to_server -= to == SERVER
        receiver = self.node(to)
        if receiver is None or not receiver.up:
            self.network.lost += 1
        elif not receiver.over:
            receiver.mailbox.deliver(message)
        else:
            receiver.mailbox.drain()

    def published(self, context: SimContext, since: float, metrics: dict[str, Any]) -> None:
        self.updates += context.index != SERVER
        self.observer(context, since, metrics)

    @property
    def needs_server(self) -> bool:
        """False once every device is done and the server has taken all that they sent."""
        assert self.server is not None
        return bool(self.unfinished or self._to_server or self.server.mailbox.messages)

    @property
    def done(self) -> bool:
        """True when the server's program has ended, or that of every device that may still come back."""
        return self.server.finished if self.server is not None else not self.unfinished

    def advance(self, until: float) -> bool:
        """Runs all events up to and including `until`, or to the end of the last program.

        False if a read needs the queue to be flushed first.
        """
        env = self.env
        while not self.done:
            if (self.reads and not self._answer()) or self.work.full:
                return False
            time = env.peek()
            if time > until or time == inf:
                if time == inf:
                    self._check_deadlock()
                break
            env.step()
        self.time = float(env.now) if self.done else until
        return True

    def end(self) -> None:
        """Stops all programs where they are: what only they wait for, such as training under way, is never computed."""
        for node in [*self.contexts, *([self.server] if self.server else [])]:
            node.kill()
        while self.env.peek() <= self.env.now:
            self.env.step()

    def _answer(self) -> bool:
        for event, values in self.reads:
            if self.work.replaying:
                event.succeed(next(self.journal.answers))
                continue
            if not all(value.known for value in values):
                return False
        if not self.work.replaying:
            answers = fetch([values for _, values in self.reads]).get()
            for (event, _), answer in zip(self.reads, answers, strict=True):
                self.journal.record(answer)
                event.succeed(deepcopy(answer))  # the program may change its own
        self.reads.clear()
        return True

    def _check_deadlock(self) -> None:
        nodes = [*self.contexts, *([self.server] if self.server else [])]
        stuck = [(node.index, what) for node in nodes if not node.finished for what in node.waits_for.values()]
        if not stuck:
            return
        named = ", ".join(f"{_name(index)} for {what}" for index, what in stuck[:8])
        more = f" and {len(stuck) - 8} more" if len(stuck) > 8 else ""
        raise Deadlock(f"nothing can happen any more at virtual time {self.env.now:g} s: waiting are {named}{more}")


def _name(index: int) -> str:
    return "the server" if index == SERVER else f"device {index}"
