"""Small learning problems for every built-in model, and jobs on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aedfl import models
from aedfl.data import Dataset, from_user
from aedfl.task import Task
from aedfl.training.plan import Plan, TrainJob, TrainResult

SHAPES: dict[str, tuple[int, ...]] = {
    "mlp": (1, 8, 8),
    "cnn": (1, 8, 8),
    "lenet5": (1, 16, 16),
    "textcnn": (8,),
    "resnet8": (3, 8, 8),
    "resnet8-batch": (3, 16, 16),
    "vgg9": (3, 8, 8),
    "vgg9-batch": (3, 8, 8),
}
"""Input shapes of the built-in models, two of them also with BatchNorm."""

NAMES = tuple(SHAPES)
SAMPLES, CLASSES, WORDS = 40, 4, 20


def data(shape: tuple[int, ...], classes: int | None = CLASSES, words: bool = False) -> Dataset:
    """Random samples; their labels depend on them, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, *shape, generator=generator)
    if words:
        x = torch.randint(0, WORDS, (SAMPLES, *shape), generator=generator)
    score = x.double().flatten(1).sum(1)
    y = score.float() if classes is None else (score.argsort().argsort() * classes // SAMPLES)
    return from_user((x, y), (x, y))


@cache
def built_in(name: str) -> Task:
    """The model with that name (and with its norm after a dash), on samples that fit."""
    kind, _, norm = name.partition("-")
    options: dict[str, Any] = {"norm": norm} if norm else {"vocabulary": WORDS} if kind == "textcnn" else {}
    module = models.build(kind, SHAPES[name], CLASSES, seed=3, **options)
    return Task(module, data(SHAPES[name], words=kind == "textcnn"))


def own(module: nn.Module, classes: int | None = CLASSES, **parts: Any) -> Task:
    """A user's module on samples of 6 numbers."""
    return Task(module, data((6,), classes), **parts)


def jobs(task: Task, sizes: tuple[int, ...] = (3, 9, 6, 4), lr: float = 0.02, **parts: Any) -> list[TrainJob]:
    """Jobs that differ in everything: start, number of samples, learning rate, epochs."""
    found, first = [], 0
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(number)
        vector = task.start.clone()
        vector[: task.layout.parameters] += 0.01 * torch.randn(task.layout.parameters, generator=generator)
        rows = np.arange(first, first + size) % SAMPLES
        found.append(TrainJob(vector, rows, (5, number), lr * (1 + number), 1 + number % 2, **parts))
        first += size
    return found


def with_masks(task: Task, given: list[TrainJob], structured: bool = False) -> list[TrainJob]:
    """Every second job gets a mask that removes about a third, of the entries or of the units."""
    generator = torch.Generator().manual_seed(9)
    found = []
    for number, job in enumerate(given):
        if structured:
            kept = torch.rand(task.groups.count, generator=generator) > 0.3
            mask = task.groups.expand(kept)
        else:
            mask = torch.rand(task.layout.size, generator=generator) > 0.3
            mask[task.layout.parameters :] = True
        found.append(replace(job, mask=mask) if number % 2 else job)
    return found


PLANS = {
    "plain": Plan(batch_size=4),
    "momentum": Plan(batch_size=4, momentum=0.9, weight_decay=0.01),
    "proximal": Plan(batch_size=4, proximal=0.3),
    "clipped": Plan(batch_size=4, clip_norm=0.1, probe=True),
    "everything": Plan(batch_size=4, momentum=0.8, weight_decay=0.01, proximal=0.3, clip_norm=0.5, probe=True),
}


def parts(result: TrainResult) -> tuple[Tensor, ...]:
    return result.vector, result.loss, result.first_loss, result.gradient


def same_bits(first: list[TrainResult], second: list[TrainResult]) -> bool:
    return all(
        torch.equal(a, b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(parts(one), parts(other), strict=True)
    )


def assert_close(first: list[TrainResult], second: list[TrainResult], atol: float = 2e-5) -> None:
    for one, other in zip(first, second, strict=True):
        for a, b in zip(parts(one), parts(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)
