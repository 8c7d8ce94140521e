"""Local training as queued work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..graph import Job, Op
from .plan import Choosy, Plan, Trainer, TrainJob, steps


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

    def at_once(self, left: int, rounds: int) -> int:
        return self.trainer.at_once(left, rounds) if isinstance(self.trainer, Choosy) else left

    def length(self, job: Job) -> float:
        _, _, _, samples, _, _, epochs = job
        return steps(len(samples), epochs, self.plan.batch_size)
