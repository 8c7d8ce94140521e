"""What the ops of a queue take, seen from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..graph import Job, Op, Queue


@dataclass(frozen=True)
class Timed(Op):
    """Another op, with its wall time added to `seconds` under its name."""

    op: Op
    seconds: dict[str, float] = field(compare=False)

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return self.op.outputs

    @property
    def heavy(self) -> bool:  # type: ignore[override]
        return self.op.heavy

    def at_once(self, left: int, rounds: int) -> int:
        return self.op.at_once(left, rounds)

    def length(self, job: Job) -> float:
        return self.op.length(job)

    def run(self, jobs: Sequence[Job]) -> Sequence[tuple[Tensor, ...]]:
        begin = time.perf_counter()
        results = self.op.run(jobs)
        name = "training" if self.op.heavy else type(self.op).__name__.lower()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
        return results


def watch(queue: Queue) -> dict[str, float]:
    """Seconds by kind of op, from now on."""
    seconds: dict[str, float] = {}
    before: Any = queue.route
    queue.route = lambda op: Timed(op if before is None else before(op), seconds)
    return seconds
