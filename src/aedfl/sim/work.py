"""One simulation's share of the queue: numbered values, and replay of what an earlier process computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import numpy as np
from torch import Tensor

from ..graph import PLAIN, Chosen, Job, Op, Queue, Value, values_in
from ..transfer import Later, arriving


class Work:
    """Numbers every value in the order in which the programs ask, which is the same in every run of a seed.

    While replaying, nothing is queued: values stay empty, reads are answered from the journal, and `restore`
    fills in the values that were alive when the checkpoint was made.
    """

    def __init__(self, queue: Queue, lookahead: int = 256) -> None:
        self.queue = queue
        self.lookahead = lookahead
        self.replaying = False
        self._made: list[ref[Value]] = []
        self._room = 1024
        self._next = 0
        self._heavy = 0
        self._flushes = queue.flushes

    def _numbers(self, count: int) -> range:
        first = self._next
        self._next += count
        return range(first, first + count)

    @property
    def asked(self) -> int:
        """Values that programs have asked for so far."""
        return self._next

    @property
    def full(self) -> bool:
        """True when so much is queued that it should be computed before more is asked for."""
        if self._flushes != self.queue.flushes:
            self._flushes, self._heavy = self.queue.flushes, 0
        return self._heavy >= self.lookahead

    @property
    def alive(self) -> list[Value]:
        """Every value that somebody still holds, by number."""
        found = [value for made in self._made if (value := made()) is not None]
        self._made = [ref(value) for value in found]
        return found

    def _note(self, values: tuple[Value, ...]) -> None:
        """Keeps track of new values; those that are gone are forgotten whenever half of the list may be gone."""
        self._made += map(ref, values)
        if len(self._made) > self._room:
            self._room = 1024 + 2 * len(self.alive)

    def known(self, data: Tensor) -> Value:
        """A value that needs no computing."""
        value = Value(data, None, self._numbers(1)[0])
        self._note((value,))
        return value

    def submit(self, op: Op, args: Job) -> tuple[Value, ...]:
        numbers = self._numbers(op.outputs)
        if self.replaying:
            values = tuple(Value(None, None, number) for number in numbers)
        else:
            values = self.queue.submit(op, args, numbers)
            self._heavy += op.heavy
        self._note(values)
        return values

    def snapshot(self) -> Iterator[tuple[str, Tensor]]:
        """Every value that somebody still holds; all of them are computed after a flush."""
        for value in self.alive:
            if value.data is not None:
                yield str(value.serial), value.data

    def restore(self, tensors: dict[str, Tensor]) -> None:
        for value in self.alive:
            if value.data is None and str(value.serial) in tensors:
                value.data = tensors[str(value.serial)]
        self.replaying = False


READY = PLAIN - {np.ndarray}
"""Types that are plain as they are, which most of a row is."""
Fetched = dict[int, Tensor]
"""Tensors in host memory by the identity of the value."""


def fetch(things: Sequence[Any]) -> Later[list[Any]]:
    """Nested structures in their `plain` form; the values in them that are known by now are brought over from now on.

    A thing may itself be one that comes later.
    """
    known = {id(value): value.data for value in values_in(things) if value.data is not None}
    copies = arriving(list(known.values()))
    late = [event for thing in things if isinstance(thing, Later) for event in thing.events]

    def arrived() -> list[Any]:
        fetched = dict(zip(known, copies.get(), strict=True))
        return [plain(thing, fetched) for thing in things]

    return Later(arrived, [*copies.events, *late])


def plain(value: Any, fetched: Fetched | None = None) -> Any:
    """Values become Python numbers or lists, everywhere in a nested structure."""
    if type(value) in READY:
        return value
    if isinstance(value, Value):
        known = None if fetched is None else fetched.get(id(value))
        return (value.get() if known is None else known).tolist()
    if isinstance(value, Later):
        return plain(value.get(), fetched)
    if isinstance(value, Chosen):
        return value.settled(plain(value.flags, fetched))
    if isinstance(value, dict):
        return {key: plain(part, fetched) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(part, fetched) for part in value]
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
