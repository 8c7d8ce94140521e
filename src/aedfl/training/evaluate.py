"""Loss and metric of models on many samples. Measuring costs no virtual time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ..task import Task
from ..transfer import Later, arriving, sent
from .dropout import dropouts
from .plan import Indices
from .stacked import Act, Stacked, has_kernels
from .traits import PROCESS, widest

CHUNK = 1000
"""Samples that go through a model at once."""
MODELS = 25
"""Most models that go through the batch at once on a GPU."""
NUMBERS = 1 << 27
"""Numbers that such a batch may have after a layer: half a GiB, and few enough for a GPU kernel to count them."""


Scores = tuple[list[float], list[float]]
"""Mean metrics and mean losses, one per vector."""


class Scorer(ABC):
    """Whoever scores models."""

    @abstractmethod
    def begin(self, vectors: Sequence[Tensor], rows: Indices, test: bool) -> Later[Scores]:
        """Mean metric and mean loss of each vector over the samples `rows` of the test (or training) data."""

    def score(self, vectors: Sequence[Tensor], rows: Indices, test: bool) -> Scores:
        return self.begin(vectors, rows, test).get()


def scores(table: Tensor) -> Later[Scores]:
    """From means [N, 2] wherever they lie."""

    def columns(tables: list[Tensor]) -> Scores:
        metrics, losses = tables[0].t().tolist()
        return metrics, losses

    return arriving([table]).then(columns)


class Speaker:
    """A task's module in evaluation mode, without gradients; by one thread only."""

    def __init__(self, task: Task, kernels: bool) -> None:
        self.flat = task.make_evaluation_module()
        self.layers = task.forward(self.flat.module, task.fusion(self.flat.module, kernels))
        recipe = task.recipe(self.flat.module, kernels, slopes=False)
        self.chain = None if recipe is None else recipe.chain(self.flat.module, task.input_shape)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """What the module says with the weights that `flat` was loaded with."""
        known = self.chain is not None and self.chain.takes(x)
        return self.chain.run(self.flat.vector, x) if self.chain and known else self.layers(x)


class Evaluator(Scorer):
    """Scores vectors; models in evaluation mode, the rest of the task as in training."""

    def __init__(self, task: Task, kernels: bool | None = None) -> None:
        self.task = task
        kernels = task.kernels if kernels is None else kernels
        self.fast = kernels and has_kernels(task.device)
        self.speaker = Speaker(task, kernels)
        self.flat = self.speaker.flat

    @torch.no_grad()
    def begin(self, vectors: Sequence[Tensor], rows: Indices, test: bool) -> Later[Scores]:
        gpu = self.task.device.type == "cuda" and len(vectors) > 1
        sums = [self._many(part, rows, test) for part in _parts(vectors, self.models)] if gpu else None
        with PROCESS:
            table = torch.cat(sums) if sums else torch.stack([self._one(v, rows, test) for v in vectors])
        return scores(table.double() / max(1, len(rows)))

    @cached_property
    def stacked(self) -> Stacked | None:
        """How many models are run at once, where it is not by `vmap`."""
        plain = self.task.layout.size == self.task.layout.parameters and not dropouts(self.flat.module)
        return Stacked.of(self.flat.module) if plain else None

    @cached_property
    def models(self) -> int:
        """Models that go through a chunk of samples at once on a GPU."""
        x, _ = self.task.gather(torch.arange(1))
        return max(1, min(MODELS, NUMBERS // (CHUNK * widest(self.flat.module, x))))

    def _one(self, vector: Tensor, rows: Indices, test: bool) -> Tensor:
        self.flat.load(vector)
        total = torch.zeros(2, dtype=torch.float64, device=self.task.device)
        for part in _parts(rows, CHUNK):
            x, y = self._gather(part, test)
            total += self._sums(self.speaker(x), y)
        return total

    def _many(self, vectors: Sequence[Tensor], rows: Indices, test: bool) -> Tensor:
        stack = torch.stack(list(vectors))
        total = torch.zeros(len(stack), 2, dtype=torch.float64, device=self.task.device)
        for part in _parts(rows, CHUNK):
            x, y = self._gather(part, test)
            total += self._all_sums(self._outputs(stack, x), y)
        return total

    def _gather(self, rows: Indices, test: bool) -> tuple[Tensor, Tensor]:
        return self.task.gather(sent(torch.from_numpy(rows), self.task.device), test)

    def _outputs(self, stack: Tensor, x: Tensor) -> Tensor:
        """What each model of a stack [N, size] says to the same inputs: [N, B, ...]."""
        if self.stacked is None:
            module = self.flat.module
            return vmap(lambda v: functional_call(module, self.task.layout.views(v), (x,)))(stack)  # type: ignore[no-any-return]
        count, images = len(stack), self.stacked.wants_images
        same = x.unsqueeze(1).expand(-1, count, *x.shape[1:]).flatten(1, 2) if images else x.expand(count, *x.shape)
        inputs = Act(same, count, "images" if images else "rows", self.fast)
        return self.stacked(self.task.layout.batched_views(stack), inputs, stack[:, 0])

    def _all_sums(self, outputs: Tensor, target: Tensor) -> Tensor:
        """`_sums` of each model: where samples count one by one, in a few launches for all instead of for each."""
        together = outputs.flatten(0, 1), target.expand(len(outputs), *target.shape).flatten(0, 1)
        metric, by_sample = self.task.metric(*together), self.task.example_loss
        if by_sample is None or metric.shape != together[1].shape[:1]:
            return torch.stack([self._sums(output, target) for output in outputs])
        table = torch.stack([metric.double(), by_sample(*together).double()])
        return table.view(2, len(outputs), -1).sum(2).t()

    def _sums(self, output: Tensor, target: Tensor) -> Tensor:
        metric = self.task.metric(output, target)
        metric = metric.double().sum() if metric.dim() else metric.double() * len(target)
        return torch.stack([metric, self.task.loss(output, target).double() * len(target)])


def _parts(things: Any, size: int) -> list[Any]:
    return [things[begin : begin + size] for begin in range(0, len(things), size)]


def rows_of(count: int, limit: int | None, random: np.random.Generator) -> Indices:
    """All sample numbers below `count`, or `limit` of them drawn at random, in ascending order."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(random.permutation(count)[:limit])
