"""Local training as queued work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..graph import Job, Op
from .plan import Plan, Trainer, TrainJob


@dataclass(frozen=True)
class Train(Op):
    """Jobs are (vector, mask, anchor, samples, key, lr, epochs); results are the fields of `TrainResult`."""

    trainer: Trainer
    plan: Plan
    outputs: ClassVar[int] = 4
    heavy: ClassVar[bool] = True

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        work = [
            TrainJob(vector, samples, key, lr, epochs, mask, anchor)
            for vector, mask, anchor, samples, key, lr, epochs in jobs
        ]
        return [(r.vector, r.loss, r.first_loss, r.gradient) for r in self.trainer.train(self.plan, work)]
