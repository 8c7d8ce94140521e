"""Queued work that methods share: merging as a batch over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .graph import Job, Op
from .placement import parts
from .replay import copies
from .rules.merge import weighted_mean
from .rules.reduce import norm
from .task import Task
from .training.gradients import batched_gradients
from .training.plan import Indices


@dataclass(frozen=True)
class WeightedMean(Op):
    """Jobs are (vectors, weights); the result is their weighted mean, weights normalised to sum 1."""

    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [(weighted_mean(list(vectors), [w / sum(weights) for w in weights]),) for vectors, weights in jobs]


@dataclass(frozen=True)
class Combination(Op):
    """Jobs are (vectors, factors); the result is the sum of the vectors, each times its factor."""

    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [(combination(vectors, factors),) for vectors, factors in jobs]


@dataclass(frozen=True)
class Step(Op):
    """Jobs are (vector, ends, starts, factors): the vector, moved by every `end - start` times its factor."""

    parameters: int
    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [(moved(self.parameters, *job),) for job in jobs]


@dataclass(frozen=True)
class Along(Op):
    """Jobs are (vector, end, start, times, weights): the vector, moved by so many times the way from start to end.

    Entries behind the first `parameters` are a state and no direction: they move by the first of the weights, which is
    what merging the end instead of the start would have done; without weights (None) they stay.
    """

    parameters: int
    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        vectors, ends, starts, times, weights = zip(*jobs, strict=True)
        moved = torch._foreach_sub(ends, starts)
        torch._foreach_mul_(moved, list(times))
        torch._foreach_add_(moved, vectors)
        if self.parameters < vectors[0].shape[0]:
            for job, result, weight in zip(jobs, moved, weights, strict=True):
                vector, end, start = (part[self.parameters :] for part in job[:3])
                result[self.parameters :] = vector if weight is None else vector + weight[0] * (end - start)
        return [(result,) for result in moved]


@dataclass(frozen=True)
class SlowMomentum(Op):
    """Jobs are (start, end, velocity, mask): the velocity times beta plus `end - start`, and the start moved by that.

    Results are (vector, velocity). Entries behind the first `parameters` are a state and stay those of the end. So do
    those that the mask (None: keeps everything) removes, without velocity: what comes back begins at rest.
    """

    beta: float
    parameters: int
    outputs: ClassVar[int] = 2

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        starts, ends, velocities, masks = zip(*jobs, strict=True)
        faster = torch._foreach_sub(ends, starts)
        torch._foreach_add_(faster, velocities, alpha=self.beta)
        vectors = torch._foreach_add(starts, faster)
        if self.parameters < vectors[0].shape[0]:
            states = [vector[self.parameters :] for vector in vectors]
            torch._foreach_copy_(states, [end[self.parameters :] for end in ends])
        masked = [job for job in zip(vectors, ends, faster, masks, strict=True) if job[3] is not None]
        if masked:
            _at_rest(*zip(*masked, strict=True))
        return list(zip(vectors, faster, strict=True))


def _at_rest(
    vectors: Sequence[Tensor], ends: Sequence[Tensor], faster: Sequence[Tensor], masks: Sequence[Tensor]
) -> None:
    """Where the masks remove, puts the vectors to the ends and takes away their velocity; on a GPU many in a few
    launches."""
    if not vectors[0].is_cuda:
        for vector, end, velocity, mask in zip(vectors, ends, faster, masks, strict=True):
            torch.where(mask, vector, end, out=vector)
            velocity.mul_(mask)
        return
    for part in parts(len(vectors), 5 * vectors[0].nbytes):
        kept = torch.stack(list(masks[part]))
        places = torch.where(kept, torch.stack(list(vectors[part])), torch.stack(list(ends[part])))
        torch._foreach_copy_(list(vectors[part]), list(places.unbind()))
        torch._foreach_mul_(list(faster[part]), list(kept.to(places.dtype).unbind()))


def combination(vectors: Sequence[Tensor], factors: Sequence[float] | Tensor) -> Tensor:
    """`sum_k factor_k vector_k`, one after the other."""
    total = torch.zeros_like(vectors[0])
    for vector, factor in zip(vectors, factors, strict=True):
        total += vector * factor
    return total


def moved(
    parameters: int, vector: Tensor, ends: Sequence[Tensor], starts: Sequence[Tensor], factors: Sequence[float] | Tensor
) -> Tensor:
    """`vector + sum_k factor_k (end_k - start_k)`.

    Entries behind the first `parameters` (running statistics) are a state and no direction: a sum of their changes
    could make a variance negative. They become the mean of the ends', with the factors as weights.
    """
    result = vector + combination([end - start for end, start in zip(ends, starts, strict=True)], factors)
    if parameters < len(vector):
        result[parameters:] = weighted_mean([end[parameters:] for end in ends], factors)
    return result


@dataclass(frozen=True)
class LargestNorm(Op):
    """Jobs are (largest [], vector); the result is the larger of the two: `largest`, or the vector's norm."""

    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        largest, vectors = zip(*jobs, strict=True)
        if vectors[0].is_cuda:
            norms = torch.cat([norm(torch.stack(vectors[part])) for part in parts(len(jobs), 2 * vectors[0].nbytes)])
        else:
            norms = torch.stack([norm(vector) for vector in vectors])
        before = torch.stack(largest)
        return [(one,) for one in torch.maximum(before, norms.to(before)).unbind()]


@dataclass(frozen=True)
class HeldOut(Op):
    """Jobs are (vector, mask or None, rows); results are loss [] and gradient [parameters] at the masked model.

    The model is in evaluation mode; pruned entries have no gradient.
    """

    task: Task
    outputs: ClassVar[int] = 2

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        if len(jobs) > 1 and self.task.device.type == "cuda" and self.task.stacks:
            return self.by_count(jobs)
        return [self._one(*job) for job in jobs]

    def by_count(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        """Those with as many samples together, as many at once as there is room for."""
        found: list[tuple[Tensor, ...]] = [()] * len(jobs)
        for count in {len(rows) for *_, rows in jobs}:
            same = [at for at, (*_, rows) in enumerate(jobs) if len(rows) == count]
            for part in parts(len(same), 12 * (count * self.task.spread + self.task.layout.size)):
                for at, result in zip(same[part], self.together([jobs[at] for at in same[part]]), strict=True):
                    found[at] = result
        return found

    def together(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        """All jobs at once, each with as many samples: for a GPU, which a single model leaves idle."""
        task = self.task
        vectors, masks, rows = zip(*jobs, strict=True)
        x, y = task.gather(torch.from_numpy(np.stack(rows)).to(task.device))
        whole = [v if mask is None else v * mask for v, mask in zip(vectors, masks, strict=True)]
        weights, buffers = torch.stack(whole).float().split_with_sizes(
            [task.layout.parameters, task.layout.size - task.layout.parameters], 1
        )
        slopes = batched_gradients(task, task.evaluation_module.module)
        keys = torch.zeros(len(jobs), dtype=torch.int64, device=task.device)
        gradients, (losses, _) = slopes(weights, buffers, x, y, torch.ones(y.shape[:2], device=task.device), keys)
        own = zip(copies(gradients.unbind()), masks, strict=True)
        kept = [gradient if mask is None else gradient * mask[: len(gradient)] for gradient, mask in own]
        return list(zip(losses.unbind(), kept, strict=True))

    def _one(self, vector: Tensor, mask: Tensor | None, rows: Indices) -> tuple[Tensor, ...]:
        task = self.task
        x, y = task.gather(torch.from_numpy(rows).to(task.device))
        masked = (vector if mask is None else vector * mask).float()
        if task.chain is not None and task.chain.takes(x, y):
            loss, gradient = task.chain.slopes(masked, x, y)
        else:
            loss, gradient = self._by_autograd(masked, x, y)
        return loss, gradient if mask is None else (gradient * mask[: task.layout.parameters]).float()

    def _by_autograd(self, vector: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.task.evaluation_module
        flat.load(vector)
        flat.gradient.zero_()
        with torch.enable_grad():
            loss = self.task.loss(flat.module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), flat.gradient.clone()
