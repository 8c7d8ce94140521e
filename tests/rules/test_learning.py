"""REINFORCE learns what heuristics cannot know: which features mark a harmful neighbour."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aedfl.rules.baseline import advantage, empty_window, remember
from aedfl.rules.pretrain import pretrained, synthetic
from aedfl.rules.selector import reinforce_step, select

DEVICES, NEIGHBOURS, STEPS = 8, 5, 200
VALID = torch.ones(DEVICES, NEIGHBOURS, dtype=torch.bool)


def harm(features: Tensor) -> Tensor:
    """A toy world: used models and those of a much lower loss (overfitted ones) hurt, all others help.

    Where a neighbour stands in the list says nothing.
    """
    hurts = (features[..., 0] > 0.5) | (features[..., 2] < -0.5)
    return torch.where(hurts, 0.3, -0.3).double()


def caches(generator: torch.Generator) -> Tensor:
    return synthetic(DEVICES, generator, NEIGHBOURS).features.float()


def loss_after(features: Tensor, choices: Tensor) -> Tensor:
    return 1 + (harm(features) * choices).sum(1)


def train(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    theta, window = pretrained("wary").repeat(DEVICES, 1), empty_window(DEVICES, length=20)
    for _ in range(STEPS):
        features = caches(generator)
        uniforms = torch.rand(DEVICES, NEIGHBOURS, generator=generator)
        choices = select(theta, features, VALID, uniforms, epsilon=0.05).choices
        noise = 0.1 * torch.randn(DEVICES, generator=generator, dtype=torch.float64)
        reward = loss_after(features, choices) + noise
        gain = advantage(reward, window, standardise=True)
        window = remember(window, reward)
        theta = reinforce_step(theta, features, VALID, choices, gain, lr=0.1, epsilon=0.05)
    return theta


def greedy_loss(theta: Tensor) -> float:
    generator = torch.Generator().manual_seed(10_000)
    losses = []
    for _ in range(30):
        features = caches(generator)
        choices = select(theta, features, VALID, torch.zeros(DEVICES, NEIGHBOURS), greedy=True).choices
        losses.append(loss_after(features, choices).mean())
    return float(torch.stack(losses).mean())


def every_unused_loss() -> float:
    generator = torch.Generator().manual_seed(10_000)
    tables = [caches(generator) for _ in range(30)]
    return float(torch.stack([loss_after(f, f[..., 0] < 0.5).mean() for f in tables]).mean())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_training_beats_its_start_and_choosing_every_unused_model(seed: int) -> None:
    start = greedy_loss(pretrained("wary").repeat(DEVICES, 1))
    learned = greedy_loss(train(seed))
    assert learned < start - 0.2
    assert learned < every_unused_loss() - 0.1
