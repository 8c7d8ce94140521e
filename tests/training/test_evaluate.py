"""Loss and metric over many samples."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aedfl.models import build
from aedfl.task import Task
from aedfl.training.evaluate import CHUNK, MODELS, Evaluator, rows_of
from aedfl.training.traits import widest
from training.tasks import NAMES, SAMPLES, built_in, data, own


def test_scores_are_means_over_samples() -> None:
    task = built_in("resnet8-batch")
    rows = np.arange(3, 30)
    (metric,), (loss,) = Evaluator(task).score([task.start], rows, test=True)
    x, y = task.gather(torch.from_numpy(rows), test=True)
    with torch.no_grad():
        output = deepcopy(task.module).eval()(x)
    assert metric == pytest.approx((output.argmax(1) == y).float().mean().item())
    assert loss == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-5)


def test_every_vector_has_its_own_score() -> None:
    task = built_in("mlp")
    rows = np.arange(SAMPLES)
    evaluator = Evaluator(task)
    metrics, losses = evaluator.score([task.start, -task.start], rows, test=False)
    assert evaluator.score([-task.start], rows, test=False) == ([metrics[1]], [losses[1]])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("scalar", [False, True])
def test_a_user_metric_may_be_per_sample_or_their_mean(scalar: bool) -> None:
    def metric(output: Tensor, target: Tensor) -> Tensor:
        found = (output.argmax(1) - target).abs().float()
        return found.mean() if scalar else found

    task = own(nn.Linear(6, 4), metric=metric)
    assert task.metric_name == "metric"
    (value,), _ = Evaluator(task).score([task.start], np.arange(SAMPLES), test=True)
    x, y = task.gather(torch.arange(SAMPLES), test=True)
    with torch.no_grad():
        assert value == pytest.approx((task.module(x).argmax(1) - y).abs().float().mean().item())


def test_chunks_are_weighted_by_their_samples() -> None:
    """More samples than go through at once, the last chunk short."""
    task = own(nn.Linear(6, 4))
    rows = np.arange(CHUNK + 37) % SAMPLES
    evaluator = Evaluator(task)
    (metric,), (loss,) = evaluator.score([task.start], rows, test=True)
    each = [evaluator.score([task.start], np.array([row]), test=True) for row in range(SAMPLES)]
    assert metric == pytest.approx(np.mean([each[row][0][0] for row in rows]))
    assert loss == pytest.approx(np.mean([each[row][1][0] for row in rows]), rel=1e-5)


def test_rows_are_all_or_a_keyed_few() -> None:
    random = np.random.default_rng
    assert rows_of(5, None, random(0)).tolist() == rows_of(5, 9, random(0)).tolist() == [0, 1, 2, 3, 4]
    few = rows_of(100, 10, random(0)).tolist()
    assert few == sorted(set(few)) and len(few) == 10 and max(few) < 100


# Many models at once, as on a GPU ----------------------------------------------------------------------------------


def assert_scored_alike(task: Task) -> None:
    """Models one by one and together, in chunks of which the last is short."""
    evaluator, random = Evaluator(task), torch.Generator().manual_seed(0)
    vectors = [task.start * (1 + 0.3 * torch.randn(task.start.shape, generator=random)) for _ in range(3)]
    rows = np.arange(SAMPLES)
    with torch.no_grad(), patch("aedfl.training.evaluate.CHUNK", 7):
        together = evaluator._many(vectors, rows, True)
        alone = torch.stack([evaluator._one(vector, rows, True) for vector in vectors])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert len(set(alone[:, 1].tolist())) == 3


@pytest.mark.parametrize("name", NAMES)
def test_models_together_are_scored_as_alone(name: str) -> None:
    assert_scored_alike(built_in(name))


@pytest.mark.parametrize("metric", [None, lambda output, target: (output - target).abs().mean()])
def test_numbers_are_scored_together_as_alone(metric: Any) -> None:
    assert_scored_alike(own(nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), classes=None, metric=metric))


def test_a_loss_that_is_no_mean_is_that_of_each_models_chunk() -> None:
    """Over all models it would be another one."""
    task = own(nn.Linear(6, 4), loss=lambda output, target: nn.functional.cross_entropy(output, target).exp())
    assert_scored_alike(task)


def test_few_models_are_scored_at_once_where_maps_are_large() -> None:
    module = build("resnet8", (3, 32, 32), 4, seed=0)
    task = Task(module, data((3, 32, 32)))
    assert widest(module, torch.zeros(2, 3, 32, 32)) == 16 * 32 * 32
    assert Evaluator(task).models == 8, "half a GiB for a thousand samples each"
    assert Evaluator(built_in("mlp")).models == MODELS
