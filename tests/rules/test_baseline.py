"""The REINFORCE baseline: a sliding mean per device."""

from __future__ import annotations

from math import isnan, nan, sqrt

import pytest
import torch

from aedfl.rules.baseline import advantage, empty_window, recent_mean, remember


def test_mean_of_the_last_few_rewards() -> None:
    window = empty_window(devices=2, length=3)
    assert all(isnan(v) for v in recent_mean(window).tolist())
    for rewards in ([1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [7.0, 70.0]):
        window = remember(window, torch.tensor(rewards))
    assert recent_mean(window).tolist() == [4.0, 40.0]


def test_advantage_is_reward_minus_mean_and_zero_without_a_baseline() -> None:
    window = empty_window(1, 4)
    assert advantage(torch.tensor([5.0]), window).item() == 0
    window = remember(remember(window, torch.tensor([1.0])), torch.tensor([2.0]))
    assert advantage(torch.tensor([5.0]), window).item() == 3.5
    assert advantage(torch.tensor([nan]), window).item() == 0


def test_standardised_advantage_counts_in_spreads() -> None:
    window = remember(empty_window(1, 4), torch.tensor([1.0]))
    assert advantage(torch.tensor([5.0]), window, standardise=True).item() == 0
    for reward in (3.0, 2.0):
        window = remember(window, torch.tensor([reward]))
    expected = 3 / sqrt(2 / 3)
    assert advantage(torch.tensor([5.0]), window, standardise=True).item() == pytest.approx(expected)


def test_a_reward_that_is_not_finite_is_forgotten_for_that_device_only() -> None:
    window = remember(empty_window(2, 3), torch.tensor([1.0, 1.0]))
    window = remember(window, torch.tensor([nan, 3.0]))
    assert recent_mean(window).tolist() == [1.0, 2.0]
