"""Selector features: exact on plain numbers, finite on anything."""

from __future__ import annotations

from math import inf, log, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aedfl.rules.features import AGE_CAP, LOSS_CAP, selector_features

anything = st.floats(allow_nan=True, allow_infinity=True)


def test_plain_numbers() -> None:
    features = selector_features(
        used=torch.tensor([[True, False]]),
        staleness=torch.tensor([[32.0, 1.0]]),
        loss=torch.tensor([[2.0, 0.5]]),
        own_loss=torch.tensor([1.0]),
        valid=torch.ones(1, 2, dtype=torch.bool),
        since_merge=torch.tensor([3]),
    )
    expected = torch.tensor([[[1, 1, log(2), 0.4], [0, 0, -log(2), 0.4]]])
    torch.testing.assert_close(features, expected)


def test_the_extra_feature_is_optional() -> None:
    ones = torch.ones(1, 2)
    features = selector_features(ones > 0, ones, ones, torch.ones(1), ones > 0)
    assert (features[..., 3] == 0).all()


def test_without_an_own_loss_neighbours_are_compared_with_each_other() -> None:
    loss = torch.tensor([[1.0, 4.0, nan, 50.0]])
    valid = torch.tensor([[True, True, True, False]])
    ones = torch.ones(1, 4)
    features = selector_features(ones > 0, ones, loss, torch.tensor([nan]), valid)
    assert features[0, :, 2].tolist() == pytest.approx([-log(2), log(2), LOSS_CAP, 0.0])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(anything, anything, st.booleans()), min_size=1, max_size=5), anything, anything)
def test_always_finite_and_bounded(slots: list[tuple[float, float, bool]], own_loss: float, since: float) -> None:
    ages, losses, valid = (torch.tensor([column]) for column in zip(*slots, strict=True))
    features = selector_features(valid, ages, losses, torch.tensor([own_loss]), valid, torch.tensor([since]))
    assert features.isfinite().all()
    assert features.abs().max() <= max(AGE_CAP, LOSS_CAP)
    assert (features[~valid] == 0).all()


def test_an_infinite_age_is_the_oldest() -> None:
    ones = torch.ones(1, 1)
    assert selector_features(ones > 0, ones * inf, ones, torch.ones(1), ones > 0)[0, 0, 1] == AGE_CAP
