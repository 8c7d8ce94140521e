"""What a device that runs AEDFL knows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..context import Context, Model
from ..graph import Value
from ..rules.baseline import empty_window
from ..rules.pretrain import pretrained
from ._options import Hyper


@dataclass(frozen=True)
class Cached:
    """The newest model of an in-neighbour."""

    model: Model
    loss: Value
    samples: int
    rate: float
    worth: Value | None
    arrived: int
    """Own local updates when it came."""
    version: int
    """How many models of this neighbour have come, this one included."""


@dataclass(frozen=True)
class Merged:
    """What the last merge was made of, until its result has been judged."""

    vectors: tuple[Value | None, ...]
    masks: tuple[Value | None, ...]
    weights: Value
    result: Value
    features: Value
    versions: tuple[int, ...]
    choices: Value


@dataclass
class State:
    """Everything a device knows; what survives a crash."""

    model: Model
    control: Value
    theta: Value
    window: Value
    largest: Value
    seen: Value
    since: Value
    cache: dict[int, Cached] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    last: Merged | None = None
    judged: tuple[Value, Value, Value | None] | None = None
    """On held-out data: loss and gradient of the last merge's result, and the loss before the merge."""
    rate: float = 0.0
    rates: tuple[float, ...] = ()
    """Pruning rates of the neighbours whose models were there at the last merge, by slot."""
    worth: Value | None = None
    """What each unit is worth: own scores, averaged with what the models that were merged bring; zeros: not known yet.
    Devices that rank units alike keep the same ones; models of different structure do not average well."""
    kept: Value | None = None
    """The units that are left; None: all."""
    cut: tuple[Value, ...] | None = None
    """Kept entries, MACs and rate of the last pruning, until they have been read."""
    base: Value | None = None
    velocity: Value | None = None
    """With slow momentum: where it was applied last, and what changed between such points of late."""
    age: float = 0.0
    """Local updates behind the model: averaged with the ages of the models that come, plus what was trained. So it
    grows alike on fast and slow devices, by the fleet's mean number of updates."""
    next_cut: float = 0.0
    """Age at which the next pruning step is due."""
    next_group: float = 0.0
    """Age at which the mask next follows what units are worth by then."""
    quiet: int = 0
    """Local updates since a model came."""
    slots: tuple[int, ...] = ()
    """The in-neighbours that `control` and `seen` are about."""

    @classmethod
    def begin(cls, ctx: Context, hyper: Hyper) -> State:
        slots = len(ctx.in_neighbours)
        known = ctx.known
        return cls(
            model=ctx.initial(),
            control=known(torch.ones(slots + 1)),
            theta=known(pretrained(hyper.selector) if hyper.selection else torch.zeros(0)),
            window=known(empty_window(1, hyper.window)[0]),
            largest=known(torch.zeros(())),
            seen=known(torch.zeros(slots, dtype=torch.int64)),
            since=known(torch.zeros((), dtype=torch.int64)),
            slots=ctx.in_neighbours,
        )
