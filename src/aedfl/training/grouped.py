"""Many models at once, the fast way: known layers run for all models in single calls, each step one CUDA graph.

For modules made of the layers that `stacked` knows, without buffers. Parameters of one name lie together for all N
models, so that weights are contiguous for every layer. The learning rate is folded into the loss, so that plain SGD
is a subtraction. Devices have more and fewer samples: models with many steps lie first, and a step is run for as many
rows as still have samples. On a CPU the same code runs step by step; it is there to be checked, not to be fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..randomness import torch_seed
from ..replay import capture, copies, most_models, padded_size
from ..task import Task
from ..transfer import sent
from .plan import Plan, TrainJob, TrainResult, batches, even_share, in_parts
from .stacked import Act, Stacked, has_kernels, kernels

STEPS = 32
"""Room for steps grows in units of this, so that graphs are seldom captured anew."""
FEW = 4
"""A step is not run for fewer rows than this only because other models are done: it would hardly be faster."""
FIRST_SIZES = (2, 8, 16, 24, 32, 48, 64, 96, 128)
"""Sizes of the first step, which has graphs of its own: it is one of many, and the rows that are added cost less than
captures for all sizes would."""
Order = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""Sample numbers [steps, batch]."""


def supports(task: Task) -> bool:
    """Whether the module is made of known layers only, and its loss a mean over samples."""
    plain = task.layout.size == task.layout.parameters and not task.whole_batches and not task.draws_randomness
    return plain and Stacked.of(task.module) is not None


@dataclass(eq=False)
class Batch:
    """The tensors of a batch of N models; a captured graph reads and writes exactly these."""

    weights: list[Tensor]  # one [N, ...] per parameter
    masks: list[Tensor] | None
    anchors: list[Tensor] | None
    velocity: list[Tensor] | None
    rows: Tensor  # [steps, N, batch] sample numbers, 0 where padded
    present: Tensor  # [steps, N, batch] 1.0 for a real sample
    keys: Tensor  # [N]
    lr: Tensor  # [N]
    loss: Tensor  # [N], sum over steps
    first_loss: Tensor  # [N]
    first_gradient: list[Tensor]
    step: Tensor  # [1]

    def holds(self, count: int, steps: int) -> bool:
        return self.rows.shape[0] >= steps and self.rows.shape[1] >= count

    def head(self, count: int) -> Batch:
        """The first models alone, in the same memory; their weights are leaves of autograd."""

        def cut(parts: list[Tensor] | None) -> list[Tensor] | None:
            return None if parts is None else [part[:count] for part in parts]

        return Batch(
            weights=[part[:count].detach().requires_grad_() for part in self.weights],
            masks=cut(self.masks),
            anchors=cut(self.anchors),
            velocity=cut(self.velocity),
            rows=self.rows[:, :count],
            present=self.present[:, :count],
            keys=self.keys[:count],
            lr=self.lr[:count],
            loss=self.loss[:count],
            first_loss=self.first_loss[:count],
            first_gradient=[part[:count] for part in self.first_gradient],
            step=self.step,
        )


class GroupedTrainer:
    """Trains the jobs of a call as batches of grouped layers."""

    def __init__(self, task: Task, bf16: bool = False, fast: bool = True) -> None:
        forward = Stacked.of(task.module.train())
        assert forward is not None, "ask `supports` first"
        self.task, self.forward = task, forward
        self._fast = fast and has_kernels(task.device)
        self.limit = most_models(task.macs)
        self.capture_seconds = 0.0
        self._bf16 = bf16
        self.pool: Any = None
        self._captured: dict[tuple[Plan, bool], _Captured] = {}
        self._most = self._room = 0

    def train(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        return in_parts(partial(self._train_sorted, plan), jobs, plan.batch_size, self.limit)

    def at_once(self, left: int, rounds: int) -> int:
        return even_share(left, rounds, self.limit)

    def _train_sorted(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        orders = [batches(job, plan.batch_size) for job in jobs]
        sizes = rows_at_work([len(order) for order in orders])
        masked = any(job.mask is not None for job in jobs)
        captured = self._captured.get((plan, masked))
        if captured is None or not captured.batch.holds(sizes[0], len(sizes)):
            captured = self._roomier(plan, masked, sizes)
        captured.prepare(sizes)  # before anything is loaded: capturing runs steps
        self._captured[plan, masked] = captured
        batch = captured.head(sizes[0])
        self._load(batch, jobs, orders)
        captured.run(sizes)
        return self._results(batch, plan, jobs, orders)

    def _roomier(self, plan: Plan, masked: bool, sizes: list[int]) -> _Captured:
        """Memory for a batch that there is no room for yet, and for all that was before.

        One pool serves the graphs of all plans: they never run side by side and leave nothing behind in it. When a
        batch is larger than any before, all begin anew in a new pool, since the old one's pieces are too small.
        Otherwise what is to be replaced stays until then: PyTorch does not take a pool whose graphs are gone.
        """
        if sizes[0] > self._most or not self._captured:
            self._captured.clear()
            self.pool = torch.cuda.graph_pool_handle() if self.task.device.type == "cuda" else None
        self._most = max(self._most, sizes[0])
        self._room = max(self._room, -(-len(sizes) // STEPS) * STEPS)
        return _Captured(self, plan, self._empty(plan, self._most, self._room, masked))

    def _empty(self, plan: Plan, count: int, room: int, masked: bool) -> Batch:
        device = self.task.device

        def parts(wanted: bool = True) -> list[Tensor]:
            entries = self.task.layout.entries if wanted else ()
            return [torch.zeros(count, *entry.shape, device=device) for entry in entries]

        table = torch.zeros(room, count, plan.batch_size, device=device)
        numbers = torch.zeros(count, device=device)
        return Batch(
            weights=parts(),
            masks=parts() if masked else None,
            anchors=parts() if plan.proximal else None,
            velocity=parts() if plan.momentum else None,
            rows=table.long(),
            present=table,
            keys=numbers.long(),
            lr=numbers.clone(),
            loss=numbers.clone(),
            first_loss=numbers.clone(),
            first_gradient=parts(plan.probe),
            step=torch.zeros(1, dtype=torch.int64, device=device),
        )

    @torch.no_grad()
    def _load(self, batch: Batch, jobs: list[TrainJob], orders: list[Order]) -> None:
        count = len(batch.lr)
        padded = jobs + [jobs[0]] * (count - len(jobs))
        vectors = torch.stack([job.vector for job in padded])
        if batch.masks is not None:
            ones = torch.ones(self.task.layout.size, dtype=torch.bool, device=self.task.device)
            masks = torch.stack([ones if job.mask is None else job.mask for job in padded])
            vectors = vectors * masks
            self._spread(masks, batch.masks)
        self._spread(vectors, batch.weights)
        if batch.anchors is not None:
            anchors = [job.vector if job.anchor is None else job.anchor for job in padded]
            self._spread(torch.stack(anchors), batch.anchors)
        for part in batch.velocity or ():
            part.zero_()
        rows = np.full((len(batch.rows), count, batch.rows.shape[2]), -1, dtype=np.int32)
        for column, order in enumerate(orders):
            rows[: len(order), column] = order
        table = self._sent(torch.from_numpy(rows))
        batch.present.copy_(table >= 0)
        batch.rows.copy_(table.clamp_(min=0))
        batch.keys.copy_(self._sent(torch.tensor([torch_seed(*job.key, "dropout") for job in padded])))
        batch.lr.copy_(self._sent(torch.tensor([job.lr for job in padded])))
        batch.loss.zero_()
        batch.step.zero_()

    def _sent(self, table: Tensor) -> Tensor:
        """On the device, without waiting for what it is doing."""
        return sent(table, self.task.device)

    def _spread(self, stack: Tensor, parts: list[Tensor]) -> None:
        """Copies vectors [N, size] into one tensor per parameter."""
        for entry, part in zip(self.task.layout.entries, parts, strict=True):
            part.copy_(stack[:, entry.offset : entry.end].view_as(part))

    @torch.enable_grad()
    def step(self, plan: Plan, batch: Batch, first: bool) -> None:
        """One SGD step of every model; those without samples in it (jobs that are done) stay as they are."""
        rows = batch.rows.index_select(0, batch.step)[0]
        present = batch.present.index_select(0, batch.step)[0]
        keys = batch.keys + batch.step
        kept = first and plan.probe
        plain = not kept and _is_plain(plan) and not (self._fast and batch.masks is not None)
        one_pass = self._fast and not plain
        active = present.sum(1).clamp(max=1.0)
        losses = self._losses(batch.weights, rows, present, keys)
        scale = batch.lr * active if plain else active
        gradients = list(torch.autograd.grad((losses * scale).sum(), batch.weights))
        with torch.no_grad():
            batch.loss.add_(losses * active)
            if first:
                batch.first_loss.copy_(losses)
            if batch.masks is not None and (kept or not one_pass):
                torch._foreach_mul_(gradients, batch.masks)
            if kept:
                torch._foreach_copy_(batch.first_gradient, gradients)
            if one_pass:
                parts = batch.weights, gradients, batch.masks, batch.anchors, batch.velocity
                kernels().descend(plan, *parts, batch.lr * active)
            else:
                moves = gradients if plain else _adjusted(plan, batch, gradients, batch.lr * active)
                torch._foreach_sub_(batch.weights, moves)
            batch.step.add_(1)

    def _losses(self, weights: list[Tensor], rows: Tensor, present: Tensor, keys: Tensor) -> Tensor:
        """Each model's mean loss on its mini-batch, [N]."""
        task, count = self.task, len(rows)
        if self.forward.wants_images:
            x, _ = task.gather(rows.t())
            act = Act(x.flatten(1, 2), count, "images", self._fast)
            y = task.train_data.y[rows]
        else:
            x, y = task.gather(rows)
            act = Act(x, count, "rows", self._fast)
        names = [entry.name for entry in task.layout.entries]
        with self._precision():
            output = self.forward(dict(zip(names, weights, strict=True)), act, keys)
        if self._fast and task.loss is F.cross_entropy and output.dim() == 3:
            return kernels().cross_entropy(output, y, present)  # type: ignore[no-any-return]
        assert task.example_loss is not None
        found = task.example_loss(output.flatten(0, 1).float(), y.flatten(0, 1)).view_as(present)
        return (found * present).sum(1) / present.sum(1).clamp(min=1.0)

    def _precision(self) -> AbstractContextManager[object]:
        if not self._bf16:
            return nullcontext()
        return torch.autocast(self.task.device.type, torch.bfloat16, cache_enabled=False)

    def _results(self, batch: Batch, plan: Plan, jobs: list[TrainJob], orders: list[Order]) -> list[TrainResult]:
        count = len(jobs)
        vectors = torch.cat([part.detach()[:count].flatten(1) for part in batch.weights], 1)
        parts = [part[:count].flatten(1) for part in batch.first_gradient]
        gradients = torch.cat(parts, 1) if plan.probe else vectors[:, :0]
        if batch.masks is not None:
            masks = torch.cat([part[:count].flatten(1) for part in batch.masks], 1).bool()
            vectors = torch.where(masks, vectors, torch.stack([job.vector for job in jobs]))
        steps = self._sent(torch.tensor([max(1, len(order)) for order in orders]))
        losses, first = batch.loss[:count] / steps, batch.first_loss[:count].clone()
        rows = (copies(vectors.unbind()), losses.unbind(), first.unbind(), copies(gradients.unbind()))
        return [TrainResult(*row) for row in zip(*rows, strict=True)]


def _is_plain(plan: Plan) -> bool:
    return not (plan.momentum or plan.weight_decay or plan.proximal) and plan.clip_norm is None


def _adjusted(plan: Plan, batch: Batch, gradients: list[Tensor], scale: Tensor) -> list[Tensor]:
    """The step after proximal pull, decay, mask, clipping and momentum, times the learning rate of each model."""
    if batch.anchors is not None:
        pull = torch._foreach_sub(batch.weights, batch.anchors)
        torch._foreach_add_(gradients, pull, alpha=plan.proximal)
    if plan.weight_decay:
        torch._foreach_add_(gradients, batch.weights, alpha=plan.weight_decay)
    if batch.masks is not None:
        torch._foreach_mul_(gradients, batch.masks)
    if plan.clip_norm is not None:
        squares = torch.stack([part.flatten(1).square().sum(1) for part in gradients]).sum(0)
        shrink = (plan.clip_norm / (squares.sqrt() + 1e-12)).clamp(max=1.0)
        gradients = [part * _per_model(shrink, part) for part in gradients]
    if batch.velocity is not None:
        torch._foreach_mul_(batch.velocity, plan.momentum)
        torch._foreach_add_(batch.velocity, gradients)
        gradients = batch.velocity
    return [part * _per_model(scale, part) for part in gradients]


def _per_model(numbers: Tensor, part: Tensor) -> Tensor:
    return numbers.view(-1, *[1] * (part.dim() - 1))


def rows_at_work(steps: list[int]) -> list[int]:
    """Rows that each step is run with, for models with so many steps, most first: all in the first one, then those
    that are not done, padded."""
    count = len(steps)
    first = padded_size(count, FIRST_SIZES)
    left = count - np.searchsorted(steps[::-1], np.arange(1, steps[0]), side="right")
    return [first, *(min(first, max(FEW, padded_size(number))) for number in left.tolist())]


class _Captured:
    """The memory of a batch, and its first and later steps for the sizes that came up: on a GPU, CUDA graphs."""

    def __init__(self, trainer: GroupedTrainer, plan: Plan, batch: Batch) -> None:
        self.trainer, self.plan, self.batch = trainer, plan, batch
        self._heads: dict[int, Batch] = {}
        self._steps: dict[tuple[int, bool], Callable[[], object]] = {}

    def head(self, count: int) -> Batch:
        if count not in self._heads:
            self._heads[count] = self.batch.head(count)
        return self._heads[count]

    def prepare(self, sizes: list[int]) -> None:
        """Captures the steps that are not captured yet; overwrites what is in the batch.

        The largest first: the others then find room in the memory that it leaves.
        """
        wanted = {(sizes[0], True), *((count, False) for count in sizes[1:])}
        for count, first in sorted(wanted - self._steps.keys(), reverse=True):
            step: Callable[[], object] = partial(self.trainer.step, self.plan, self.head(count), first)
            if self.trainer.task.device.type == "cuda":
                begin = time.perf_counter()
                self.batch.step.zero_()
                step = capture(step, self.trainer.pool)
                self.trainer.capture_seconds += time.perf_counter() - begin
            self._steps[count, first] = step

    def run(self, sizes: list[int]) -> None:
        self._steps[sizes[0], True]()
        for count in sizes[1:]:
            self._steps[count, False]()
