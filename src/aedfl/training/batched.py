"""Many models at once: one vector per row of a stack, every step a single call for all rows.

Rows are padded to a few sizes: on a CPU a batch of one is run as two, and convolutions run without oneDNN,
because only then does a row's result not depend, bit for bit, on how many other rows there are; on a GPU a few
sizes mean a few captured graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..randomness import torch_seed
from ..replay import capture, most_models, padded_size
from ..task import Task
from .gradients import batched_gradients
from .plan import Plan, TrainJob, TrainResult, batches, even_share, in_parts
from .traits import PROCESS


def supports(task: Task) -> bool:
    """Whether `vmap` can train this module: it is tried on two samples."""
    if task.draws_randomness or task.replaces_buffers:
        return False
    rows = np.arange(min(2, len(task.dataset.train)))
    job = TrainJob(task.start.to(task.device), rows, (0,), 0.0, 1)
    try:
        BatchedTrainer(task)._train_batch(Plan(batch_size=len(rows)), [job])
    except (RuntimeError, NotImplementedError):
        return False
    return True


def padded(count: int, gpu: bool) -> int:
    """Rows that a batch of `count` jobs is run with."""
    return max(2, padded_size(count) if gpu else count)


@contextmanager
def _each_alone() -> Iterator[None]:
    """Without oneDNN, which computes a grouped convolution in a way that depends on the number of groups."""
    with PROCESS:
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.backends.mkldnn.enabled = before


@dataclass(eq=False)
class Stack:
    """The state of a batch: one row per job, and everything a step reads or writes."""

    weights: Tensor  # [N, P] trainable part
    buffers: Tensor  # [N, size - P]
    rows: Tensor  # [steps, N, batch] sample numbers, 0 where padded
    present: Tensor  # [steps, N, batch] 1.0 for a real sample
    keys: Tensor  # [N] dropout keys
    lr: Tensor  # [N, 1]
    mask: Tensor | None  # [N, P]
    anchor: Tensor | None  # [N, P]
    velocity: Tensor | None  # [N, P]
    loss: Tensor  # [N] sum over steps
    first_loss: Tensor  # [N]
    first_gradient: Tensor  # [N, P], or [N, 0]
    step: Tensor  # [] number of the step to run next


class BatchedTrainer:
    """Trains the jobs of a call as one batch with `vmap`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.limit = most_models(task.macs)
        self._gpu = task.device.type == "cuda"
        self._gradients = batched_gradients(task, deepcopy(task.module).train())
        self._graphs: dict[object, _Captured] = {}

    def train(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        with _each_alone():
            return in_parts(partial(self._train_batch, plan), jobs, plan.batch_size, self.limit)

    def at_once(self, left: int, rounds: int) -> int:
        """Sizes matter to captured graphs alone."""
        return even_share(left, rounds, self.limit) if self._gpu else left

    def _train_batch(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        count = padded(len(jobs), self._gpu)
        stack = self._stack(plan, jobs + [jobs[0]] * (count - len(jobs)))
        if self.task.whole_batches:
            for number in range(len(stack.rows)):
                self._step_by_size(plan, stack, number)
        elif self._gpu:
            stack = self._replay(plan, stack)
        else:
            for _ in range(len(stack.rows)):
                self._step(plan, stack)
        return self._results(stack, jobs)

    def _stack(self, plan: Plan, jobs: list[TrainJob]) -> Stack:
        task, count = self.task, self.task.layout.parameters
        device = task.device
        vectors = torch.stack([job.vector for job in jobs])
        masks = None
        if any(job.mask is not None for job in jobs):
            ones = torch.ones(task.layout.size, dtype=torch.bool, device=device)
            masks = torch.stack([ones if job.mask is None else job.mask for job in jobs]).to(torch.float32)
            vectors = vectors * masks
        anchor = None
        if plan.proximal:
            anchor = torch.stack([job.vector if job.anchor is None else job.anchor for job in jobs])[:, :count]
        rows, present = self._rows(plan, jobs)
        zero = torch.zeros(len(jobs), device=device)
        return Stack(
            weights=vectors[:, :count].clone(),
            buffers=vectors[:, count:].clone(),
            rows=rows,
            present=present,
            keys=torch.tensor([torch_seed(*job.key, "dropout") for job in jobs], device=device),
            lr=torch.tensor([[job.lr] for job in jobs], device=device),
            mask=None if masks is None else masks[:, :count].clone(),
            anchor=anchor,
            velocity=torch.zeros(len(jobs), count, device=device) if plan.momentum else None,
            loss=zero,
            first_loss=zero.clone(),
            first_gradient=torch.zeros(len(jobs), count if plan.probe else 0, device=device),
            step=torch.zeros((), dtype=torch.int64, device=device),
        )

    def _rows(self, plan: Plan, jobs: list[TrainJob]) -> tuple[Tensor, Tensor]:
        orders = [batches(job, plan.batch_size, self.task.least_batch) for job in jobs]
        steps = max(len(order) for order in orders)
        rows = np.full((steps, len(jobs), plan.batch_size), -1, dtype=np.int64)
        for column, order in enumerate(orders):
            rows[: len(order), column] = order
        table = torch.from_numpy(rows).to(self.task.device, non_blocking=True)
        return table.clamp(min=0), (table >= 0).to(torch.float32)

    def _step(self, plan: Plan, s: Stack) -> None:
        """One step of every row; rows without samples in it (jobs that are done) stay as they are."""
        rows = s.rows.index_select(0, s.step.view(1))[0]
        present = s.present.index_select(0, s.step.view(1))[0]
        x, y = self.task.gather(rows)
        gradient, (loss, state) = self._gradients(s.weights, s.buffers, x, y, present, s.keys + s.step)
        active = (present.sum(1) > 0).to(torch.float32)
        s.buffers.copy_(torch.where(active[:, None] > 0, state, s.buffers))
        self._apply(plan, s, gradient, loss, active)
        s.step.add_(1)

    def _step_by_size(self, plan: Plan, s: Stack, number: int) -> None:
        """As `_step`, for models that must not see padding: rows with batches of equal size run together."""
        sizes = s.present[number].sum(1).to(torch.int64)
        active = (sizes > 0).to(torch.float32)
        gradient, loss = torch.zeros_like(s.weights), torch.zeros_like(s.loss)
        for size in sorted(set(sizes.tolist())):
            if size == 0:
                continue
            who = (sizes == size).nonzero()[:, 0]
            who = who if len(who) > 1 else who.repeat(2)
            x, y = self.task.gather(s.rows[number, who, :size])
            present = s.present[number, who, :size]
            found, (value, state) = self._gradients(s.weights[who], s.buffers[who], x, y, present, s.keys[who] + number)
            gradient[who], loss[who], s.buffers[who] = found, value, state
        self._apply(plan, s, gradient, loss, active)
        s.step.add_(1)

    def _apply(self, plan: Plan, s: Stack, gradient: Tensor, loss: Tensor, active: Tensor) -> None:
        first = s.step == 0
        s.loss.add_(torch.where(active > 0, loss, 0.0))
        s.first_loss.add_(torch.where(first, loss, 0.0))
        masked = gradient if s.mask is None else gradient * s.mask
        if plan.probe:
            s.first_gradient.add_(torch.where(first, masked, 0.0))
        if s.anchor is not None:
            gradient = gradient + plan.proximal * (s.weights - s.anchor)
        if plan.weight_decay:
            gradient = gradient + plan.weight_decay * s.weights
        if s.mask is not None:
            gradient = gradient * s.mask
        if plan.clip_norm is not None:
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (plan.clip_norm / (norm + 1e-12)).clamp(max=1.0)
        if s.velocity is not None:
            gradient = s.velocity.mul_(plan.momentum).add_(gradient)
        s.weights.sub_(torch.where(active[:, None] > 0, gradient * s.lr, 0.0))

    def _replay(self, plan: Plan, stack: Stack) -> Stack:
        """Runs the steps as one captured CUDA graph each; captured once per shape."""
        steps = -(-len(stack.rows) // 8) * 8
        key = (plan, len(stack.weights), steps, stack.mask is None)
        if key not in self._graphs:
            self._graphs[key] = _Captured(self, plan, stack, steps)
        return self._graphs[key].run(stack)

    def _results(self, s: Stack, jobs: list[TrainJob]) -> list[TrainResult]:
        losses = s.loss / (s.present.sum(2) > 0).sum(0).clamp(min=1)
        results = []
        for row, job in enumerate(jobs):
            vector = torch.cat([s.weights[row], s.buffers[row]])
            if job.mask is not None:
                vector = torch.where(job.mask > 0, vector, job.vector)
            first_loss, gradient = s.first_loss[row].clone(), s.first_gradient[row].clone()
            results.append(TrainResult(vector, losses[row].clone(), first_loss, gradient))
        return results


class _Captured:
    """One training step as a CUDA graph over fixed tensors."""

    def __init__(self, trainer: BatchedTrainer, plan: Plan, stack: Stack, steps: int) -> None:
        values: dict[str, Any] = {k: None if v is None else v.clone() for k, v in vars(stack).items()}
        for name in ("rows", "present"):
            values[name] = values[name].new_zeros(steps, *values[name].shape[1:])
        self.stack = Stack(**values)
        self._load(stack)
        self._replay = capture(partial(trainer._step, plan, self.stack))

    def _load(self, stack: Stack) -> None:
        for name, fixed in vars(self.stack).items():
            given = getattr(stack, name)
            if name in ("rows", "present"):
                fixed[: len(given)].copy_(given)
                fixed[len(given) :].zero_()
            elif fixed is not None:
                fixed.copy_(given)

    def run(self, stack: Stack) -> Stack:
        self._load(stack)
        for _ in range(len(stack.rows)):
            self._replay()
        return self.stack
