"""Results that may not be computed yet, and the queue that computes many of them at once.

A program asks for work (train, merge, …) and gets `Value`s back at once. Work is run when somebody needs a
result: all queued work then runs in waves along its dependencies, jobs of one kind as one batch. What nobody
can see any more (a crashed device's update) is never run.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

Job = tuple[Any, ...]
"""One call's arguments; a `Value` in them (or in a tuple among them) stands for its tensor."""


class Op(ABC):
    """A pure function over many jobs at once. Ops that compare equal may share a batch.

    `run` returns one tuple of tensors per job, in the order of the jobs; a job's results must not depend on
    what else is in the batch. Returned tensors are never written to again.
    """

    outputs: ClassVar[int]
    heavy: ClassVar[bool] = False
    """True: runs when everything light has run, so that its batch is as large as it can be."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> Sequence[tuple[Tensor, ...]]: ...

    def at_once(self, left: int, rounds: int) -> int:
        """How many jobs a heavy op likes to run now, of `left` that take `rounds` batches since some need others.

        The rest waits, and fills up later batches; only what begins the longest chain never waits.
        """
        return left

    def length(self, job: Job) -> float:
        """How long a heavy job takes, in any unit: of jobs that could wait alike, the longest run first and together.
        Values may not be known yet.
        """
        return 0.0


class Node:
    """One queued job, the jobs it depends on (each as often as it is needed), and the weakly held values of it."""

    __slots__ = ("__weakref__", "args", "done", "needs", "op", "values")

    def __init__(self, op: Op, args: Job) -> None:
        self.op = op
        self.args = args
        self.done = False
        needed: list[Value] = []
        _collect(args, needed)
        self.needs = [node for value in needed if (node := value.node) is not None]
        self.values: list[weakref.ref[Value]] = []


class Value:
    """Handle of an immutable tensor that may not be computed yet."""

    __slots__ = ("__weakref__", "data", "home", "node", "serial")

    def __init__(self, data: Tensor | None = None, node: Node | None = None, serial: int = -1) -> None:
        self.data = data
        self.node = node
        self.serial = serial
        self.home: torch.device | None = None  # where it is used, if it does not lie there

    @property
    def known(self) -> bool:
        """Whether it is there, and would be in any other run of the same seed at this point."""
        return self.data is not None and self.node is None

    def get(self) -> Tensor:
        """The tensor. Only engines and ops may look; a program uses `Context.read`."""
        if self.data is None:
            raise RuntimeError(f"value {self.serial} was read before it was computed")
        return self.data if self.home is None else self.data.to(self.home, non_blocking=True)

    def __repr__(self) -> str:
        return f"Value({self.serial}, {'queued' if self.data is None else tuple(self.data.shape)})"


PLAIN = frozenset({type(None), int, float, bool, str, np.ndarray})
"""Types of arguments that hold no values."""


class Chosen:
    """Items of which those count whose flag is set, once the flags are known; for the record."""

    __slots__ = ("flags", "items")

    def __init__(self, items: tuple[Any, ...], flags: Value) -> None:
        self.items = items
        self.flags = flags

    def settled(self, flags: list[bool]) -> list[Any]:
        return [list(item) for item, flag in zip(self.items, flags, strict=True) if flag]


def values_in(thing: Any) -> list[Value]:
    """Every `Value` in nested tuples, lists, dicts and choices."""
    found: list[Value] = []
    _collect((thing,), found)
    return found


def _collect(parts: Iterable[Any], found: list[Value]) -> None:
    """By exact types first: this runs for every argument of every job."""
    for part in parts:
        kind = type(part)
        if kind in PLAIN:
            continue
        if kind is Value:
            found.append(part)
        elif isinstance(part, (tuple, list)):
            _collect(part, found)
        elif isinstance(part, dict):
            _collect(part.values(), found)
        elif kind is Chosen:
            found.append(part.flags)


def resolve(thing: Any) -> Any:
    """The same nested structure with tensors in place of values."""
    return _resolved((thing,))[0]


def _resolved(parts: Iterable[Any]) -> tuple[Any, ...]:
    """By exact types first, as `_collect`."""
    return tuple([
        part if (kind := type(part)) in PLAIN
        else part.get() if kind is Value
        else _resolved(part) if isinstance(part, (tuple, list))
        else part
        for part in parts
    ])  # fmt: skip


class Queue:
    """Jobs not run yet, in the order they were asked for. Several simulations may share one queue."""

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[Node]] = []
        self.settled: Callable[[Value], None] | None = None
        """Told every value that has been computed; may find another place for its tensor."""
        self.route: Callable[[Op], Op] | None = None
        """May put another op in the place of one: an op that runs it elsewhere, with the same results."""
        self.flushes = 0
        self.batches: list[int] = []
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        self._nodes: list[Node] = []
        """Those of the flush that is under way."""
        self._leaving = False

    def go_ahead(self) -> None:
        """From now on, jobs are run in a thread of their own, and `flush` returns at once.

        One flush is run at a time, in the same order as without. Who needs results waits for `finished`.
        """
        if self._worker is None:
            threads = torch.get_num_threads()
            self._worker = ThreadPoolExecutor(1, "aedfl-queue", torch.set_num_threads, (threads,))

    @property
    def ahead(self) -> bool:
        return self._worker is not None

    @property
    def finished(self) -> int:
        """How many flushes are known to be done."""
        return self.flushes - (self._under_way is not None)

    def wait(self) -> None:
        """Until the last flush is done; what went wrong in it is raised here."""
        if self._under_way is not None:
            flush, self._under_way = self._under_way, None
            try:
                flush.result()
            finally:
                _tell(self._nodes)
                self._nodes = []

    def close(self) -> None:
        """Ends the thread after the batch that it is at; nobody waits for what is left of its flush."""
        if self._worker is not None:
            self._leaving = True
            self._worker.shutdown()
            self._worker = self._under_way = None
            self._nodes, self._leaving = [], False

    def submit(self, op: Op, args: Job, serials: Sequence[int]) -> tuple[Value, ...]:
        node = Node(op if self.route is None else self.route(op), args)
        values = tuple([Value(None, node, serial) for serial in serials])
        node.values = [weakref.ref(value) for value in values]
        self._waiting.append(weakref.ref(node))
        return values

    def flush(self) -> None:
        """Runs everything that somebody still waits for, once the flush before is done."""
        self.wait()
        nodes = [node for ref in self._waiting if (node := ref()) is not None]
        self._waiting.clear()
        self.flushes += 1
        if self._worker is None:
            self._compute(nodes)
            _tell(nodes)
        elif nodes:
            self._nodes, self._under_way = nodes, self._worker.submit(self._compute, nodes)

    def _compute(self, nodes: list[Node]) -> None:
        for node in nodes:
            node.needs = [need for need in node.needs if not need.done]
        ready = _Ready(nodes)
        missing, dependents = _dependencies(nodes)
        ready.add(node for node in nodes if not missing[node])
        while ready and not self._leaving:
            op, group = ready.take()
            _run(op, group, self.settled)
            if op.heavy:
                self.batches.append(len(group))
            ready.add(_freed(group, missing, dependents))


_Rank = tuple[int, float, int, Node]
"""Chain and length, both negative, and number of a heavy job: the smallest rank comes first."""


class _Ready:
    """Jobs that could run now, by their op: light ones as they came, heavy ones with the longest chain first."""

    def __init__(self, nodes: list[Node]) -> None:
        self._chains = _chains(nodes)
        self._left = Counter(node.op for node in nodes if node.op.heavy)
        self._light: dict[Op, list[Node]] = {}
        self._heavy: dict[Op, list[_Rank]] = {}
        self._number = count()

    def __bool__(self) -> bool:
        return bool(self._light or self._heavy)

    def add(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            op = node.op
            if op.heavy:
                rank = (-self._chains[node], -op.length(node.args), next(self._number), node)
                heappush(self._heavy.setdefault(op, []), rank)
            else:
                self._light.setdefault(op, []).append(node)

    def take(self) -> tuple[Op, list[Node]]:
        """The largest batch of light jobs, else of heavy ones, in the order they became ready; meanwhile the other
        batches grow. Of several, the one that was begun first.
        """
        if self._light:
            op = max(self._light, key=lambda op: len(self._light[op]))
            return op, self._light.pop(op)
        op = max(self._heavy, key=lambda op: len(self._heavy[op]))
        ready = self._heavy[op]
        first, taken = ready[0][0], list[_Rank]()
        wanted = op.at_once(self._left[op], -first)
        while ready and (len(taken) < wanted or ready[0][0] == first):
            taken.append(heappop(ready))
        self._left[op] -= len(taken)
        if not ready:
            del self._heavy[op]
        return op, [node for *_, node in sorted(taken, key=itemgetter(2))]


def _chains(nodes: list[Node]) -> dict[Node, int]:
    """How many heavy jobs have to run one after the other from each job on; a job comes after all that it needs."""
    chains = dict.fromkeys(nodes, 0)
    for node in reversed(nodes):
        chain = chains[node]
        if node.op.heavy:
            chains[node] = chain = chain + 1
        for need in node.needs:
            if chains[need] < chain:
                chains[need] = chain
    return chains


def _dependencies(nodes: list[Node]) -> tuple[dict[Node, int], dict[Node, list[Node]]]:
    """How many queued jobs each job needs, and who needs it."""
    missing: dict[Node, int] = {}
    dependents: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        missing[node] = len(node.needs)
        for need in node.needs:
            dependents[need].append(node)
        node.needs = []
    return missing, dependents


def _freed(done: list[Node], missing: dict[Node, int], dependents: dict[Node, list[Node]]) -> Iterator[Node]:
    """The jobs that needed nothing but these any more."""
    for node in done:
        for dependent in dependents.get(node, ()):
            missing[dependent] -= 1
            if not missing[dependent]:
                yield dependent


@torch.no_grad()
def _run(op: Op, nodes: list[Node], settled: Callable[[Value], None] | None) -> None:
    results = op.run([_resolved(node.args) for node in nodes])
    for node, outputs in zip(nodes, results, strict=True):
        for ref, tensor in zip(node.values, outputs, strict=True):
            value = ref()
            if value is not None:
                value.data = tensor
                if settled is not None:
                    settled(value)
        node.args, node.done = (), True


def _tell(nodes: list[Node]) -> None:
    """Lets values go from their jobs. Who goes on by a result (`Value.known`) waits until then: in the middle of a
    flush it would depend on the pace of a thread what is asked for before the next one, and so what shares a batch."""
    for node in nodes:
        if node.done:
            for ref in node.values:
                if (value := ref()) is not None:
                    value.node = None
