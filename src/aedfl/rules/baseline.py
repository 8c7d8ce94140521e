"""The REINFORCE baseline `l_i`: the mean of the last few rewards `R` of each device.

A window [B, K] holds the last K rewards, oldest first; empty places are NaN. Functions return a new window.
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_window(devices: int, length: int) -> Tensor:
    """A window without rewards, float64 [devices, length]."""
    return torch.full((devices, length), torch.nan, dtype=torch.float64)


def remember(window: Tensor, reward: Tensor) -> Tensor:
    """Appends reward [B] and drops the oldest; a reward that is not finite is not remembered."""
    shifted = torch.cat([window[:, 1:], reward.to(window.dtype).unsqueeze(1)], 1)
    return torch.where(reward.isfinite().unsqueeze(1), shifted, window)


def recent_mean(window: Tensor) -> Tensor:
    """`l_i` [B], the mean of the rewards held; NaN where there is none yet."""
    return _mean(window)


def advantage(reward: Tensor, window: Tensor, standardise: bool = False) -> Tensor:
    """`R - l_i` [B], 0 where no baseline exists yet or the reward is not finite.

    `standardise` divides by the spread of the window, so that one learning rate fits losses of any scale; it
    is 0 until the window holds two different rewards.
    """
    mean = _mean(window)
    difference = reward.to(window.dtype) - mean
    if standardise:
        difference = difference / _mean((window - mean.unsqueeze(1)) ** 2).sqrt()
    return torch.where(difference.isfinite(), difference, 0.0)


def _mean(window: Tensor) -> Tensor:
    held = ~window.isnan()
    return torch.where(held, window, 0.0).sum(1) / held.sum(1)
