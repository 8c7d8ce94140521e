"""What AEDFL makes of a local update and of the models it has, as two jobs: what to merge, and the merge.

Each is a few steps that could be jobs of their own; together they are cheaper to simulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..graph import Job, Op
from ..ops import Along, LargestNorm, SlowMomentum
from . import direct
from .jobs import Agree, Learn, Merge, Select

Results = Sequence[tuple[Tensor, ...]]
Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Choose(Op):
    """What the update says about the last merge, and which models are to be merged next.

    Jobs are (growth, known, lesson, selection): `growth` the job of `LargestNorm`; `known` (control, theta, window) and
    `lesson` the rest of the job of `Learn`; `selection` the job of `Select` but for theta, which is the learned one.
    Without growth or lesson (None) nothing is measured or learned.
    Results are (largest, control, theta, window) and those of `Select`; without growth the first means nothing.
    """

    learn: Learn
    select: Select
    outputs: ClassVar[int] = 4 + Select.outputs

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        growths, known, lessons, selections = zip(*jobs, strict=True)
        largest = _each(LargestNorm(), growths, [own[:1] for own in known])
        lesson = [given and (*own, *given) for own, given in zip(known, lessons, strict=True)]
        learned = _each(self.learn, lesson, known)
        picked = self.select.run([(own[1], *rest) for own, rest in zip(learned, selections, strict=True)])
        return [(*most, *own, *found) for most, own, found in zip(largest, learned, picked, strict=True)]


@dataclass(frozen=True)
class Exchange(Op):
    """The steps from selected models to the next ones, each for the jobs that have it.

    Jobs are (job of `Merge`, worths, update, pace). What is None leaves its step out: `worths` M+1 those of `Agree`;
    `update` (end, times, times sent) the end of training, and how often the way there is added to what was merged and
    then once more (None: not) to what is sent; `pace` (base, velocity) those of `SlowMomentum`.
    Results are (merged [P], weights [M+1], worth, vector [P], velocity, sent [P]); those of steps that were left out
    are what came before them.
    """

    merge: Merge
    momentum: SlowMomentum
    outputs: ClassVar[int] = 6

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        merging, worths, updates, paces = zip(*jobs, strict=True)
        starts, masks = [job[0][0] for job in merging], [job[1][0] for job in merging]
        found = self.merge.run(merging)
        merged, weights = zip(*found, strict=True)
        agreed = _each(Agree(), [given and (given, share) for given, share in zip(worths, weights, strict=True)], found)
        followed = self._follow(merged, weights, starts, masks, updates, paces)
        parts = zip(found, agreed, followed, strict=True)
        return [(*mean, worth[0], *new) for mean, worth, new in parts]

    def _follow(
        self, merged: Tensors, weights: Tensors, starts: Tensors, masks: Sequence[Tensor | None],
        updates: Sequence[direct.Way], paces: Sequence[direct.Pace],
    ) -> Results:  # fmt: skip
        """(vector, velocity, sent) of each job."""
        jobs = list(zip(merged, weights, starts, masks, updates, paces, strict=True))
        used = [(vector, start, way and way[0], *(pace or ())) for vector, _, start, _, way, pace in jobs]
        if direct.possible(used, [[mask] for mask in masks]):
            return direct.follow_each(jobs, self.momentum.parameters, self.momentum.beta)
        along = Along(self.momentum.parameters)
        moves = [
            update and (vector, update[0], start, update[1], share) for vector, share, start, _, update, _ in jobs
        ]
        moved = _each(along, moves, [(vector,) for vector in merged])
        going = [
            pace and (pace[0], vector, pace[1], mask)
            for pace, (vector, *_), mask in zip(paces, moved, masks, strict=True)
        ]
        gone = _each(self.momentum, going, [(vector, vector) for vector, *_ in moved])
        further = [
            (vector, update[0], start, update[2], None) if update and update[2] else None
            for (vector, _), start, update in zip(gone, starts, updates, strict=True)
        ]
        sent = _each(along, further, gone)
        return [(*new, out[0]) for new, out in zip(gone, sent, strict=True)]


def _each(op: Op, jobs: Sequence[Job | None], otherwise: Results) -> Results:
    """The op's results for the jobs that there are, and the other ones for those that are None."""
    there = [job for job in jobs if job]
    if not there:
        return otherwise
    found = iter(op.run(there))
    return [next(found) if job else other for job, other in zip(jobs, otherwise, strict=True)]
