"""One model at a time: the plain loop that every other back end is checked against."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import torch
from torch import Tensor, nn

from ..layout import Layout
from ..randomness import torch_seed
from ..task import Task
from .dropout import Dropout
from .plan import Plan, TrainJob, TrainResult, batches


class FlatModule:
    """A module whose parameters and gradients are views of two flat vectors: loading, stepping and reading
    back are then single operations, whatever the number of layers."""

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.module = deepcopy(module)
        self.vector = torch.zeros(layout.size, device=device)
        self.gradient = torch.zeros(layout.parameters, device=device)
        self._converted: list[tuple[Tensor, Tensor]] = []
        parameters = dict(self.module.named_parameters())
        for e in layout.entries:
            view = self.vector[e.offset : e.end].view(e.shape)
            if e.trainable:
                parameters[e.name].data = view
                parameters[e.name].grad = self.gradient[e.offset : e.end].view(e.shape)
            else:
                self._bind_buffer(e.name, view)

    def _bind_buffer(self, name: str, view: Tensor) -> None:
        path, _, leaf = name.rpartition(".")
        owner = self.module.get_submodule(path)
        buffer = owner._buffers[leaf]
        assert buffer is not None
        if buffer.dtype == torch.float32:
            owner._buffers[leaf] = view
        else:
            self._converted.append((buffer, view))

    def load(self, vector: Tensor) -> None:
        with torch.no_grad():
            self.vector.copy_(vector)
            for buffer, view in self._converted:
                buffer.copy_(view)

    def sync(self) -> None:
        """Brings buffers that are not float32 (counters) back into the vector."""
        with torch.no_grad():
            for buffer, view in self._converted:
                view.copy_(buffer)


class SequentialTrainer:
    """Trains each job with autograd on an ordinary module; with several workers, as many jobs side by side.

    Every job runs on one thread from its first to its last step, so its result is the same with any.
    A module that draws random numbers from torch's global generator is trained by one worker alone.
    """

    def __init__(self, task: Task, workers: int = 1) -> None:
        self.task = task
        self.workers = 1 if task.draws_randomness or task.device.type != "cpu" else max(1, workers)
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(self.workers, "train") if self.workers > 1 else None

    def train(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        if self._pool is None or len(jobs) == 1:
            return [self._worker().train(plan, job) for job in jobs]
        return list(self._pool.map(lambda job: self._worker().train(plan, job), jobs))

    def _worker(self) -> _Worker:
        if not hasattr(self._local, "worker"):
            self._local.worker = _Worker(self.task)
        worker: _Worker = self._local.worker
        return worker


class _Worker:
    """One module and the loop over a job's mini-batches."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.flat = FlatModule(task.module, task.layout, task.device)
        self.flat.module.train()
        self._dropouts = [m for m in self.flat.module.modules() if isinstance(m, Dropout)]

    def train(self, plan: Plan, job: TrainJob) -> TrainResult:
        with torch.enable_grad():
            if not self.task.draws_randomness:
                return self._train(plan, job)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(torch_seed(*job.key, "module"))
                return self._train(plan, job)

    def _train(self, plan: Plan, job: TrainJob) -> TrainResult:
        layout, flat = self.task.layout, self.flat
        mask = None if job.mask is None else job.mask.to(torch.float32)
        flat.load(job.vector if mask is None else job.vector * mask)
        step = _Step(plan, job, mask, flat, layout.parameters)
        total = torch.zeros((), device=self.task.device)
        first_loss, first_gradient = total, torch.zeros(0)
        order = torch.from_numpy(batches(job, plan.batch_size))
        seed = torch_seed(*job.key, "dropout")
        for number, rows in enumerate(order):
            loss = self._backward(rows[rows >= 0], seed + number)
            if number == 0:
                first_loss = loss
                if plan.probe:
                    first_gradient = flat.gradient * (1.0 if mask is None else mask[: layout.parameters])
            total = total + loss
            step()
        flat.sync()
        vector = flat.vector.clone() if mask is None else torch.where(mask > 0, flat.vector, job.vector)
        return TrainResult(vector, total / max(1, len(order)), first_loss, first_gradient)

    def _backward(self, rows: Tensor, key: int) -> Tensor:
        """The mini-batch's loss; its gradient is in `flat.gradient` then."""
        for layer in self._dropouts:
            layer.key = torch.tensor(key, device=self.task.device)
        x, y = self.task.gather(rows.to(self.task.device))
        self.flat.gradient.zero_()
        loss = self.task.loss(self.flat.module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class _Step:
    """One SGD step on the flat vector: proximal pull, decay, clipping, momentum, mask."""

    def __init__(self, plan: Plan, job: TrainJob, mask: Tensor | None, flat: FlatModule, count: int) -> None:
        self.plan, self.lr = plan, job.lr
        self.weights, self.gradient = flat.vector[:count], flat.gradient
        self.mask = None if mask is None else mask[:count]
        self.anchor = None if job.anchor is None or not plan.proximal else job.anchor[:count]
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
