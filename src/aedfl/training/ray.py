"""Many machines: what looks at data is split over Ray actors; the rest, vector arithmetic, stays here.

Training, pruning and scoring leave as jobs and come back as tensors. A job's result does not depend on what is
computed beside it, so the record is the one of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..data import Dataset, Split
from ..graph import Job, Op
from ..task import Task
from ..transfer import Later
from .actors import Pool
from .evaluate import Scorer, Scores, scores
from .parcels import Rows, as_tensor
from .plan import Indices, Plan, TrainJob, TrainResult

Arrays = tuple[np.ndarray[Any, Any], ...]


class Remote:
    """One task at the actors: its module and data are sent once."""

    def __init__(self, pool: Pool, task: Task, equip: Callable[[Dataset], Any]) -> None:
        dataset = task.dataset
        arrays = tuple(part.numpy() for split in (dataset.train, dataset.test) for part in (split.x, split.y))
        bare = replace(dataset, train=_EMPTY, test=_EMPTY)
        self.pool, self.task = pool, task
        self._shared = pool.share(partial(_equipped, equip, bare, *arrays))

    def forget(self) -> None:
        """Lets the actors drop the task."""
        self.pool.drop(self._shared)

    def run(self, work: Callable[[Any, list[Job]], Rows], jobs: Sequence[Job], costs: Sequence[float]) -> Rows:
        rows = self.pool.run(self._shared, work, jobs, costs)
        return [tuple(tensor.to(self.task.device) for tensor in row) for row in rows]


_EMPTY = Split(torch.empty(0), torch.empty(0))


def _equipped(equip: Callable[[Dataset], Any], bare: Dataset, *arrays: np.ndarray[Any, Any]) -> Any:
    """In an actor: the data set lies in memory that it shares with the other actors of its machine."""
    train, train_y, test, test_y = map(as_tensor, arrays)
    return equip(replace(bare, train=Split(train, train_y), test=Split(test, test_y)))


@dataclass(frozen=True)
class RayTrainer:
    """A back end that has the jobs trained by the back ends of the actors."""

    remote: Remote

    def train(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        sent = [(job.vector, job.samples, job.key, job.lr, job.epochs, job.mask, job.anchor) for job in jobs]
        macs = self.remote.task.macs
        rows = self.remote.run(partial(_train, plan), sent, [cost(job, macs) for job in jobs])
        return [TrainResult(*row) for row in rows]


def cost(job: TrainJob, macs: float) -> float:
    """Multiply-accumulates of the job's forward passes, about; a pruned model takes part of the full one's."""
    share = 1.0 if job.mask is None else float(job.mask.float().mean())
    return len(job.samples) * job.epochs * macs * share


def _train(plan: Plan, shop: Any, jobs: list[Job]) -> Rows:
    results = shop.trainer.train(plan, [TrainJob(*job) for job in jobs])
    return [(r.vector, r.loss, r.first_loss, r.gradient) for r in results]


@dataclass(frozen=True)
class RayScorer(Scorer):
    """Scores many models at the actors; a single one here, while nothing else is to be done."""

    remote: Remote
    here: Scorer

    def begin(self, vectors: Sequence[Tensor], rows: Indices, test: bool) -> Later[Scores]:
        if len(vectors) == 1:
            return self.here.begin(vectors, rows, test)
        found = self.remote.run(partial(_score, rows, test), [(vector,) for vector in vectors], [1.0] * len(vectors))
        return scores(torch.stack([torch.stack(row) for row in found]))


def _score(rows: Indices, test: bool, shop: Any, jobs: list[Job]) -> Rows:
    metrics, losses = shop.evaluator.score([vector for (vector,) in jobs], rows, test)
    return list(zip(torch.tensor(metrics, dtype=torch.float64), torch.tensor(losses, dtype=torch.float64), strict=True))


@dataclass(frozen=True)
class RayOp(Op):
    """Another op, run by the actors on their copies of the task."""

    op: Any
    remote: Remote
    heavy: ClassVar[bool] = True

    def run(self, jobs: Sequence[Job]) -> Rows:
        return self.remote.run(partial(_run, replace(self.op, task=None)), jobs, [1.0] * len(jobs))


def _run(op: Any, shop: Any, jobs: list[Job]) -> Rows:
    rows: Rows = replace(op, task=shop.task).run(jobs)
    return rows


def route(remotes: Sequence[Remote], op: Op) -> Op:
    """An op that has one of these tasks looks at its data, and is worth sending to where they are."""
    if is_dataclass(op) and any(field.name == "task" for field in fields(op)):
        for remote in remotes:
            if op.task is remote.task:
                return RayOp(op, remote)
    return op
