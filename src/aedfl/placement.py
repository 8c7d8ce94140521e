"""Where models that wait lie: in the accelerator's memory until a budget is reached, then in pinned host memory.

The paper's rule for cached models. A model in host memory is brought over when it is used, and the copy is dropped
afterwards; results do not depend on where a model lay.
"""

from __future__ import annotations

import weakref
from threading import RLock

import torch
from torch import Tensor

from .graph import Value

SMALL = 1 << 12
"""Tensors below this many bytes are not worth moving."""
ROOM = 1 << 30
"""Bytes that an op may take for a while, beside what it is given and what it gives: with more jobs, it treats a part of
them after the other."""


def fitting(each: int, most: int) -> int:
    """How many things of so many bytes are treated at once: as `ROOM` holds, at most `most`, and one at least."""
    return max(1, min(ROOM // max(1, each), most))


def parts(count: int, each: int, most: int | None = None) -> list[slice]:
    """So many jobs that take so many bytes each, in parts of as many as fit, and of `most` at most."""
    size = fitting(each, most or count)
    return [slice(begin, begin + size) for begin in range(0, count, size)]


class Placement:
    """Keeps the tensors of living values within `budget` bytes of a device's memory, first come, first served."""

    def __init__(self, budget: int, device: torch.device) -> None:
        self.budget = budget
        self.device = device
        self.used = 0
        self.moved = 0
        self._alive: dict[int, weakref.ref[Value]] = {}
        self._lock = RLock()  # values are made in one thread and may go in another, or while one is being admitted

    def admit(self, value: Value) -> None:
        """Finds a place for a value that has just been computed."""
        data = value.data
        if data is None or data.nbytes < SMALL:
            return
        if self.used + data.nbytes <= self.budget:
            self._hold(value, data.nbytes)
        else:
            value.data, value.home = _host(data), data.device
            self.moved += 1

    def _hold(self, value: Value, size: int) -> None:
        key = id(value)

        def gone(_: weakref.ref[Value]) -> None:
            with self._lock:
                self.used -= size
                del self._alive[key]

        with self._lock:
            self.used += size
            self._alive[key] = weakref.ref(value, gone)


def _host(data: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is an accelerator to copy it back to."""
    if data.device.type != "cuda":
        return data.clone()
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)
