"""Robust merging: exact numbers on small models, ragged neighbours, garbage."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor

from aedfl.rules.robust import clip_norms, coordinate_median, cosine_filter, trimmed_mean

Draw = Callable[..., Tensor]


def test_far_models_are_pulled_to_the_limit_and_near_ones_stay() -> None:
    own = torch.tensor([[3.0, 4.0]])
    others = torch.tensor([[[3.0, 5.0], [3.0, 24.0], [nan, 0.0], [inf, 0.0]]])
    clipped = clip_norms(own, others, factor=2.0)
    assert clipped.tolist() == [[[3, 5], [3, 14], [3, 4], [3, 4]]]


def test_trimmed_mean_drops_extremes_per_parameter() -> None:
    vectors = torch.tensor([[[1.0, 9.0], [2.0, -500.0], [3.0, 1.0], [900.0, 2.0], [nan, 3.0]]])
    valid = torch.ones(1, 5, dtype=torch.bool)
    assert trimmed_mean(vectors, valid, trim=0.25).tolist() == [[2.5, 2.0]]


def test_trimmed_mean_without_trimming_is_the_mean(normal: Draw, uniform: Draw) -> None:
    vectors, valid = normal(4, 6, 9), uniform(4, 6) < 0.6
    valid[0] = False
    expected = (vectors * valid.unsqueeze(-1)).sum(1) / valid.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(trimmed_mean(vectors, valid, trim=0.0), expected)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_median_of_the_valid_models(normal: Draw, count: int) -> None:
    vectors = normal(3, 6, 20)
    valid = torch.zeros(3, 6, dtype=torch.bool)
    valid[:, 6 - count :] = True
    expected = vectors[:, 6 - count :].quantile(0.5, dim=1)
    torch.testing.assert_close(coordinate_median(vectors, valid), expected)


def test_median_of_nothing_is_zero(normal: Draw) -> None:
    assert (coordinate_median(normal(1, 3, 4), torch.zeros(1, 3, dtype=torch.bool)) == 0).all()


def test_one_attacker_cannot_move_the_median(normal: Draw) -> None:
    honest = 0.01 * normal(1, 6, 50) + 1
    attacked = torch.cat([honest, torch.full((1, 1, 50), 1e9)], 1)
    valid = torch.ones(1, 7, dtype=torch.bool)
    assert (coordinate_median(attacked, valid) - 1).abs().max() < 0.05
    assert (trimmed_mean(attacked, valid, trim=0.2) - 1).abs().max() < 0.05


def test_cosine_filter_keeps_models_that_point_the_own_way() -> None:
    own = torch.tensor([[1.0, 0.0]])
    others = torch.tensor([[[2.0, 1.0], [-1.0, 0.1], [0.0, 0.0], [nan, 1.0], [5.0, 0.0]]])
    valid = torch.tensor([[True, True, True, True, False]])
    assert cosine_filter(own, others, valid, threshold=0.5).tolist() == [[True, False, False, False, False]]
    assert cosine_filter(own, others, valid).tolist() == [[True, False, True, False, False]]
    assert cosine_filter(own, others[:, :0], valid[:, :0]).shape == (1, 0)
