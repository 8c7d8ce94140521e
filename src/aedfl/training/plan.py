"""What local training is asked to do: settings, one job, and the order of its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from ..randomness import generator
from ..replay import padded_size

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Plan:
    """Settings of local SGD. No method copies the loop: what it wants changed is a field here."""

    epochs: int = 4
    batch_size: int = 50
    lr: float = 0.03
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    """mu of `mu/2 ||w - anchor||^2`, added to the loss."""
    clip_norm: float | None = None
    """Largest norm of a step's gradient."""
    probe: bool = False
    """Return the first mini-batch's gradient as well."""

    def shape(self) -> Plan:
        """What jobs of one batch must have in common; epochs and learning rate may differ."""
        return replace(self, epochs=0, lr=0.0)

    def steps(self, samples: int) -> int:
        return steps(samples, self.epochs, self.batch_size)


def steps(samples: int, epochs: int, batch_size: int) -> int:
    return epochs * -(-samples // batch_size)


@dataclass(frozen=True, eq=False)
class TrainJob:
    """One device's local training, with everything it depends on."""

    vector: Tensor
    samples: Indices
    """Sample numbers of the device's training data in the data set."""
    key: tuple[int | str, ...]
    """Key of the order of the samples and of dropout."""
    lr: float
    epochs: int
    mask: Tensor | None = None
    anchor: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TrainResult:
    """See `context.Trained`."""

    vector: Tensor
    loss: Tensor
    first_loss: Tensor
    gradient: Tensor


class Trainer(Protocol):
    """A back end. A job's result does not depend on the other jobs of the call."""

    def train(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]: ...


@runtime_checkable
class Choosy(Protocol):
    """A trainer that is best at some numbers of jobs: it says how many to give it next (see `graph.Op.at_once`)."""

    def at_once(self, left: int, rounds: int) -> int: ...


def even_share(left: int, rounds: int, most: int) -> int:
    """Jobs to train next, of `left` that need so many rounds: as many in each, so that no round has a few alone.

    They make full batches of `most`, or one batch of a size that needs no padding (but perhaps in its first step).
    """
    share = -(-left // rounds)
    return padded_size(share) if share <= most else -(-share // most) * most


def in_parts(
    train: Callable[[list[TrainJob]], list[TrainResult]], jobs: list[TrainJob], batch_size: int, most: int
) -> list[TrainResult]:
    """Trains at most so many jobs at a time, each part with jobs of about the same number of steps, most steps first.

    The results are in the order of the jobs.
    """
    lengths = [steps(len(job.samples), job.epochs, batch_size) for job in jobs]
    places = sorted(range(len(jobs)), key=lambda place: -lengths[place])
    parts = shared_out([jobs[place] for place in places], most)
    results = dict(zip(places, [result for part in parts for result in train(part)], strict=True))
    return [results[place] for place in range(len(jobs))]


def shared_out(jobs: list[TrainJob], most: int) -> list[list[TrainJob]]:
    """The jobs in parts of at most so many, all of about the same size."""
    parts = -(-len(jobs) // most)
    return [jobs[len(jobs) * k // parts : len(jobs) * (k + 1) // parts] for k in range(parts)]


def batches(job: TrainJob, batch_size: int, least: int = 1) -> Indices:
    """Sample numbers [steps, batch_size] of all epochs, each in an order of its own; -1 pads the last batch.

    A last batch of fewer than `least` samples is left empty.
    """
    count = len(job.samples)
    each = steps(count, 1, batch_size)
    order = np.full((job.epochs, each * batch_size), -1, dtype=np.int64)
    random = generator(*job.key, "batches")
    for epoch in range(job.epochs):
        order[epoch, :count] = job.samples[random.permutation(count)]
    if 0 < count - (each - 1) * batch_size < least:
        order[:, (each - 1) * batch_size :] = -1
    return order.reshape(job.epochs * each, batch_size)
