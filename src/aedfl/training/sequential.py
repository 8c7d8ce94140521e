"""One model at a time: the plain loop that every other back end is checked against."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..layout import Layout
from ..randomness import torch_seed
from ..sparsity.physical import shrink
from ..task import Task
from .chain import Recipe
from .dropout import Dropout
from .flat import FlatModule
from .fused import Fusion
from .plan import Plan, TrainJob, TrainResult, batches

REMEMBERED = 64
"""Shrunk networks that a worker keeps."""


class SequentialTrainer:
    """Trains each job with autograd on an ordinary module; with several workers, as many jobs side by side.

    Every job runs on one thread from its first to its last step, so its result is the same with any.
    A module that draws random numbers from torch's global generator is trained by one worker alone.
    """

    def __init__(self, task: Task, workers: int = 1, kernels: bool | None = None) -> None:
        self.task = task
        kernels = task.kernels if kernels is None else kernels
        module = deepcopy(task.module).train()
        self.fusion = task.fusion(module, kernels)
        self.recipe = task.recipe(module, kernels, slopes=True)
        self.workers = 1 if task.draws_randomness or task.device.type != "cpu" else max(1, workers)
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(self.workers, "train") if self.workers > 1 else None

    def train(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        if self._pool is None or len(jobs) == 1:
            return [self._worker().train(plan, job) for job in jobs]
        return list(self._pool.map(lambda job: self._worker().train(plan, job), jobs))

    def _worker(self) -> _Worker:
        if not hasattr(self._local, "worker"):
            self._local.worker = _Worker(self.task, self.fusion, self.recipe)
        worker: _Worker = self._local.worker
        return worker


class _Worker:
    """The loop over a job's mini-batches, on modules that no other thread uses."""

    def __init__(self, task: Task, fusion: Fusion | None = None, recipe: Recipe | None = None) -> None:
        self.task, self.fusion, self.recipe = task, fusion, recipe
        self._full = _Trainable(task.module, task, fusion, recipe)
        self._smaller: OrderedDict[bytes, tuple[_Trainable, _Places]] = OrderedDict()

    def train(self, plan: Plan, job: TrainJob) -> TrainResult:
        """A structured mask gives a network that is really smaller; any other is multiplied in.

        So is every mask of a module with dropout, whose draws belong to places in the full network.
        """
        units = None if job.mask is None or self._full.dropouts else self.task.units_of(job.mask)
        if units is None:
            return self._full.train(plan, job)
        small, places = self._shrunk(units)
        anchor = None if job.anchor is None else places.take(job.anchor)
        result = small.train(plan, replace(job, vector=places.take(job.vector), mask=None, anchor=anchor))
        gradient = result.gradient
        if plan.probe:
            gradient = places.put(gradient, job.vector.new_zeros(self.task.layout.parameters))
        return replace(result, vector=places.put(result.vector, job.vector.clone()), gradient=gradient)

    def _shrunk(self, units: Tensor) -> tuple[_Trainable, _Places]:
        """The smaller network for these kept units; the last few are remembered."""
        key = units.numpy(force=True).tobytes()
        if key not in self._smaller:
            small = shrink(self.task.module, self.task.groups, self.task.start.to(self.task.device), units)
            self._smaller[key] = _Trainable(small.module, self.task, self.fusion, self.recipe), _Places(small.index)
        self._smaller.move_to_end(key)
        if len(self._smaller) > REMEMBERED:
            self._smaller.popitem(last=False)
        return self._smaller[key]


class _Places:
    """Where the numbers of a smaller vector lie in the full one. Those that both begin with, such as a table of words,
    are copied in one piece; the parameters among all come first, so that these may be given alone."""

    def __init__(self, index: Tensor) -> None:
        moved = (index != torch.arange(len(index), device=index.device)).nonzero()
        self.lead = int(moved[0]) if len(moved) else len(index)
        self.rest = index[self.lead :]

    def take(self, full: Tensor) -> Tensor:
        return torch.cat([full[: self.lead], full[self.rest]])

    def put(self, small: Tensor, full: Tensor) -> Tensor:
        """Writes into the full vector, and returns it."""
        full[: self.lead] = small[: self.lead]
        full[self.rest[: max(0, len(small) - self.lead)]] = small[self.lead :]
        return full


class _Trainable:
    """One module, whole or shrunk, with the loop over a job's mini-batches."""

    def __init__(self, module: nn.Module, task: Task, fusion: Fusion | None, recipe: Recipe | None) -> None:
        self.task = task
        self.chain = None if recipe is None else recipe.chain(module, task.input_shape)
        self.layout = Layout.of(module)
        self.flat = FlatModule(module, self.layout, task.device)
        self.forward = task.forward(self.flat.module.train(), fusion)
        self.dropouts = [m for m in self.flat.module.modules() if isinstance(m, Dropout)]

    def train(self, plan: Plan, job: TrainJob) -> TrainResult:
        whole = self.chain and self.chain.train(plan, job, self.task.gather, self.task.least_batch)
        return whole or self._by_steps(plan, job)

    def _by_steps(self, plan: Plan, job: TrainJob) -> TrainResult:
        with torch.enable_grad():
            if not self.task.draws_randomness:
                return self._train(plan, job)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(torch_seed(*job.key, "module"))
                return self._train(plan, job)

    def _train(self, plan: Plan, job: TrainJob) -> TrainResult:
        layout, flat = self.layout, self.flat
        mask = None if job.mask is None else job.mask.to(torch.float32)
        flat.load(job.vector if mask is None else job.vector * mask)
        step = _Step(plan, job, mask, flat, layout.parameters)
        total = torch.zeros((), device=self.task.device)
        first_loss, first_gradient = total, torch.zeros(0)
        order = batches(job, plan.batch_size, self.task.least_batch)
        seed = torch_seed(*job.key, "dropout")
        steps = [number for number, first in enumerate(order[:, 0].tolist()) if first >= 0]
        for number in steps:
            rows = order[number]
            loss = self._backward(torch.from_numpy(rows[rows >= 0]), seed + number)
            if number == 0:
                first_loss = loss
                if plan.probe:
                    first_gradient = flat.gradient * (1.0 if mask is None else mask[: layout.parameters])
            total = total + loss
            step()
        flat.sync()
        vector = flat.vector.clone() if mask is None else torch.where(mask > 0, flat.vector, job.vector)
        return TrainResult(vector, total / max(1, len(steps)), first_loss, first_gradient)

    def _backward(self, rows: Tensor, key: int) -> Tensor:
        """The mini-batch's loss; its gradient is in `flat.gradient` then."""
        for layer in self.dropouts:
            layer.key = torch.tensor(key, device=self.task.device)
        x, y = self.task.gather(rows.to(self.task.device))
        self.flat.gradient.zero_()
        loss = self.task.loss(self.forward(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class _Step:
    """One SGD step on the flat vector: proximal pull, decay, clipping, momentum, mask."""

    def __init__(self, plan: Plan, job: TrainJob, mask: Tensor | None, flat: FlatModule, count: int) -> None:
        self.plan, self.lr = plan, job.lr
        self.weights, self.gradient = flat.vector[:count], flat.gradient
        self.mask = None if mask is None else mask[:count]
        anchor = job.vector if job.anchor is None else job.anchor
        self.anchor = anchor[:count] if plan.proximal else None
        self.velocity = torch.zeros_like(self.gradient) if plan.momentum else None

    @torch.no_grad()
    def __call__(self) -> None:
        g = self.gradient
        if self.anchor is not None:
            g.add_(self.weights - self.anchor, alpha=self.plan.proximal)
        if self.plan.weight_decay:
            g.add_(self.weights, alpha=self.plan.weight_decay)
        if self.mask is not None:
            g.mul_(self.mask)
        if self.plan.clip_norm is not None:
            g.mul_((self.plan.clip_norm / (g.norm() + 1e-12)).clamp(max=1.0))
        if self.velocity is not None:
            g = self.velocity.mul_(self.plan.momentum).add_(g)
        self.weights.add_(g, alpha=-self.lr)
