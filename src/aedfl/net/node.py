"""A device (or the server) as a process: it joins, runs the method's program, and leaves a model and a record."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import Any

import torch

from ..algorithms import get
from ..context import SERVER, Message, Method
from ..errors import AedflError, UserError
from ..experiment.checkpoint import save as save_tensors
from ..experiment.config import make_hyper, to_toml
from .check import Checker
from .clock import Clock
from .context import Effort, NetContext
from .credentials import Security
from .gate import Gate
from .kit import Kit
from .member import Membership
from .options import Options, Prepare
from .places import advertised, check_address
from .protocol_pb2 import Report
from .state import finder
from .store import Store
from .transport import Transport

log = logging.getLogger(__name__)
_TRACING = threading.Lock()
DIVERGED = "the loss of the own training is not finite, and neighbours refuse such models; see training.lr and --robust"


class Node:
    """One member of a run, from joining to its last file."""

    def __init__(
        self, options: Options, security: Security, prepare: Prepare, method: Method | None = None
    ) -> None:
        self.options, self.security, self._prepare, self._given = options, security, prepare, method
        check_address(options.coordinator)
        advertised(options.listen, options.advertise)
        self.store = Store(options.folder)
        self.clock = Clock()
        self.member = Membership(options, security, self.store, self.clock)
        self.finished = False
        self.accuracy: float | None = None
        self.loss = math.nan
        self.staleness = math.nan
        self._diverged = ""
        self._update_seconds = math.nan
        self._evaluated = -math.inf
        self._evaluation: asyncio.Task[None] | None = None

    # ---- coming

    async def run(self) -> dict[str, Any]:
        """From joining to the end; the summary that is also on the disk."""
        try:
            await self._join()
            await self._open()
            await self._live()
            return await self._finish()
        finally:
            await self._close()

    async def _join(self) -> None:
        """Settings, then the model and data, then an index."""
        self.config = await self.member.settings()
        self.method = self._method()
        self.kit = await asyncio.get_running_loop().run_in_executor(None, self._prepared)
        await self.member.enter(self.kit.task.layout)
        self.index = self.member.index

    def _prepared(self) -> Kit:
        """Whatever traces the module does so here and now, and for one node of a process at a time.

        The first functional gradient imports PyTorch's compiler, seconds on a small machine: before the run, not in it.
        """
        with _TRACING:
            kit = self._prepare(self.config)
            torch.func.grad(torch.sum)(torch.zeros(1))
            _ = kit.task.macs, kit.task.filters, kit.task.draws_randomness, kit.task.least_batch
            return kit

    def _method(self) -> Method:
        """The run's method, from this machine's own files."""
        if self._given is not None:
            return self._given
        name = self.options.method or self.config.method
        if name.endswith(".py") and self.options.method is None:
            raise UserError(f"the run's method is the file {name}; give this machine's copy of it with --method")
        method = get(name)
        if self.options.server and method.server is None:
            raise UserError(f"method {method.name} has no server; start devices only")
        return method

    async def _open(self) -> None:
        """The port, the context with what an earlier process left, and the heartbeats."""
        task, part = self.kit.task, self.kit.part(self.index)
        checker = Checker(task.layout, task.macs, self.method.messages, lambda: task.filters.count)
        self.transport = Transport(self.index, self.member.run, checker, self.security, self.options.lifetime)
        self.context = NetContext(self.index, part, self.clock, self.transport, self.store)
        self.context.observer = self._observe
        self.gate = Gate(self.options.robust, part.start, self.index == SERVER) if self.options.robust.active else None
        find = finder(self.method.device.__globals__)
        self.context.revive(self.store.load(find), self.store.messages(find))
        self.store.open_record(self.context.update)
        self.store.attempt(lambda: (self.store.folder / "config.toml").write_text(to_toml(self.config)))
        port = await self.transport.listen(self.options.listen, self._deliver, self.options.limits)
        self._meet(at_once=True)
        await self.member.start(port, self)

    # ---- what the membership asks and tells

    def heard(self, changed: bool) -> None:
        view = self.member.view
        self.context.devices, self.context.devices_done = max(view.devices, 1), view.devices_done
        if changed:
            self._meet()

    def renewed(self) -> None:
        self.transport.reconnect()

    def fail(self, error: Exception) -> None:
        failure = self.context.failure
        if failure is not None and not failure.done():
            failure.set_exception(error)

    def _meet(self, at_once: bool = False) -> None:
        """The others, as the coordinator last named them."""
        view, context = self.member.view, self.context
        context.devices = max(view.devices, 1)
        self.transport.know(view.members)
        neighbours = tuple(view.neighbours.sources), tuple(view.neighbours.targets)
        context.meet(*neighbours, at_once=at_once)
        if self.gate is not None:
            self.gate.forget({*neighbours[0], *neighbours[1], SERVER})
        self.member.remember()

    def report(self) -> Report:
        counters, context = self.transport.counters, self.context
        return Report(
            update=context.update, loss=self.loss, now=self.clock.now, bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received, messages_sent=counters.messages_sent,
            messages_received=counters.messages_received,
            messages_lost=counters.messages_lost + context.mailbox.dropped, refused=counters.refused,
            filtered=counters.filtered, staleness=self.staleness,
            accuracy=math.nan if self.accuracy is None else self.accuracy, finished=self.finished,
            trouble=self.store.trouble or self._diverged, update_seconds=self._update_seconds, samples=context.samples,
        )  # fmt: skip

    # ---- living

    async def _live(self) -> None:
        """Waits for the run to begin, runs the program, and stays until nobody needs answers any more."""
        context, ended_by = self.context, self.member.ended
        context.failure = asyncio.get_running_loop().create_future()
        while not self.clock.begun and not ended_by.is_set():
            self.member.changed.clear()
            await self._first(self.member.changed.wait(), context.failure)
        self._meet(at_once=True)
        program = self.method.server if self.index == SERVER else self.method.device
        assert program is not None
        hyper = make_hyper(self.method.hyper, self.config.hyper)
        ended = asyncio.Event()

        async def main() -> None:
            await program(context, hyper)
            ended.set()

        context.spawn(main())
        await self._first(ended.wait(), ended_by.wait(), self._time_up(), context.failure)
        if not ended.is_set():
            await self._first(ended.wait(), ended_by.wait(), asyncio.sleep(self.options.grace), context.failure)
        context.stopped = True
        if not ended.is_set():
            await self._first(ended.wait(), asyncio.sleep(self.options.hurry), context.failure)
        await self.transport.settle(self.options.settle)
        self.finished = True
        await self.member.tell()
        await self._answer_others()
        context.end()

    async def _time_up(self) -> None:
        """Ends when a stop condition holds for the program; it then has `grace` to notice."""
        while self.context.running:  # noqa: ASYNC110 (the condition is the clock itself)
            await asyncio.sleep(0.2)

    async def _answer_others(self) -> None:
        """A second coroutine may still have to answer; with nobody to ask, for so long and no longer."""
        member = self.member
        while not member.ended.is_set():
            before = member.trouble
            waited = await self._first(member.ended.wait(), asyncio.sleep(self.options.linger), self.context.failure)
            if waited and before and member.trouble:
                break

    async def _first(self, *things: Any) -> bool:
        """Waits for the first of these; raises if that one failed. True if it was none of the events."""
        tasks = [asyncio.ensure_future(thing) for thing in things]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                if task is not self.context.failure:
                    task.cancel()
        for task in done:
            task.result()
        return tasks[0] not in done

    def stop(self) -> None:
        """Asks it to end soon: a signal."""
        self.member.ended.set()

    async def _deliver(self, message: Message) -> None:
        context = self.context
        if self.gate is not None:
            own = context.model or context.initial()
            kept = await context.aside(self.gate, message, own)
            if kept is None:
                self.transport.counters.filtered += 1
                log.info(f"kept out a model of device {message.source}", extra={"event": "filtered"})
                return
            message = kept
        context.deliver(message)

    def _observe(self, since: float, metrics: dict[str, Any], effort: Effort) -> None:
        """One row of the record per local update, and the figures for the next heartbeat."""
        context = self.context
        self.loss = float(metrics.get("loss", math.nan))
        if "loss" in metrics:
            self._look_at_loss()
        ages = [age for _, age in metrics.get("merged", ())]
        if ages:
            self.staleness = sum(ages) / len(ages)
        self._update_seconds = context.now - since
        row = {"time": context.now, "start": since, "device": self.index, "update": context.update}
        seconds = {purpose: round(taken, 6) for purpose, taken in effort.seconds.items()}
        self.store.add({**row, "samples": context.samples, **metrics, "seconds": seconds, "flops": effort.flops})
        if context.now - self._evaluated >= self.config.evaluation.every and self._evaluation is None:
            self._evaluated = context.now
            self._evaluation = asyncio.get_running_loop().create_task(self._evaluate())

    def _look_at_loss(self) -> None:
        """Neighbours refuse a model that is not finite, so whoever runs this device should hear of it."""
        said, self._diverged = self._diverged, "" if math.isfinite(self.loss) else DIVERGED
        if self._diverged and not said:
            log.error(DIVERGED, extra={"event": "diverged"})

    async def _evaluate(self) -> None:
        context = self.context
        try:
            if context.model is not None:
                now, update = context.now, context.update
                self.accuracy = await context.aside(self.kit.score, context.model)
                if self.accuracy is not None:
                    self.store.append("metrics.jsonl", {"time": now, "update": update, "accuracy": self.accuracy})
        finally:
            self._evaluation = None

    # ---- going

    async def _finish(self) -> dict[str, Any]:
        context, counters = self.context, self.transport.counters
        self.store.save(context.snapshot())
        await self.store.settle()
        model = context.model or context.initial()
        if self._evaluation is not None:
            await self._evaluation
        self.accuracy = await context.aside(self.kit.score, model)
        vector = model.vector.get() if model.mask is None else model.vector.get() * model.mask.get()
        weights = self.kit.task.module_with(vector).state_dict()
        partial = self.store.folder / "model.partial"
        try:
            save_tensors({name: part.clone().contiguous() for name, part in weights.items()}, partial)
            partial.replace(self.store.folder / "model.safetensors")
        except OSError as error:
            raise AedflError(
                f"cannot write the model to {self.store.folder}: {error.strerror or error}; start it again with "
                "the same --out once there is room"
            ) from None
        summary = {
            "name": self.security.name, "run": self.member.run, "index": self.index, "method": self.method.name,
            "updates": context.update, "samples": context.samples, "seconds": context.now,
            "accuracy": self.accuracy, "metric": self.kit.task.metric_name,
            "loss": None if math.isnan(self.loss) else self.loss, **vars(counters),
            "transfers": [[count, round(seconds, 6)] for count, seconds in self.transport.transfers()],
        }  # fmt: skip
        self.store.dump("summary.json", summary)
        return summary

    async def _close(self) -> None:
        await self.member.close()
        if hasattr(self, "context"):
            self.context.end()
            await self.transport.close()
            self.context.close()
            await self.store.settle()
        self.store.close()
