"""What a context is tested through, and what the checks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pytest
import torch
from torch import Tensor

from aedfl.context import Context, Program
from aedfl.graph import Job, Op

Note = Callable[[Any], None]
Notes = dict[int, list[Any]]
"""What the program of each device (and of the server) noted, in order."""


@dataclass(frozen=True)
class Setting:
    """What a check may ask for."""

    server: Program | None = None
    devices: int = 2
    topology: str = "full"
    updates: int | None = None
    """The stop condition behind `Context.running`."""
    changes: Mapping[int, Sequence[tuple[float, str]]] | None = None
    """When, in units, a device has a "join", a "crash" or a "leave"; others are there from the beginning."""
    lr_decay: float = 0.0
    seed: int = 0
    units: float = 30.0


class Harness(Protocol):
    """Runs programs on contexts of one implementation."""

    unit: float
    """Seconds."""

    def run(self, device: Program, **settings: Any) -> Notes:
        """Runs `device(ctx, note)` on every device until all programs (or the server's) have ended, or `units`
        have passed; settings are those of `Setting`.

        Devices learn `tiny_task` with `PLAN` on `tiny_rows`.
        """


def noting(program: Program, notes: Notes) -> Program:
    """The program with a `note` in the place of hyper-parameters; what it notes is kept as it was."""

    async def noted(ctx: Context, _: Any) -> None:
        await program(ctx, lambda thing: notes.setdefault(ctx.index, []).append(deepcopy(thing)))

    return noted


def lapse(harness: Harness, seconds: float) -> float:
    """Seconds of the clock, in whole units where nothing is late."""
    return round(seconds / harness.unit, 6)


def near(units: float) -> Any:
    return pytest.approx(units, abs=0.25)


@dataclass(frozen=True)
class Total(Op):
    """Jobs are (vector, vectors); the result is the sum of all their entries."""

    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [(torch.stack([part.sum() for part in (first, *rest)]).sum(),) for first, rest in jobs]


@dataclass(frozen=True)
class Scaled(Op):
    """Jobs are (vector,); results are `factor` times it and the number of its entries."""

    factor: float
    outputs: ClassVar[int] = 2

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [(vector * self.factor, torch.tensor(len(vector))) for (vector,) in jobs]
