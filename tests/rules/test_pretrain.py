"""The shipped selector: reproducible, and it follows the heuristics it was trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from aedfl.rules.features import selector_features
from aedfl.rules.network import PARAMETERS
from aedfl.rules.pretrain import heuristic, pretrain, pretrained, synthetic
from aedfl.rules.selector import select


def judged(features: Tensor) -> Tensor:
    """What the shipped network thinks of each model, [B, M]."""
    count, slots = features.shape[:2]
    valid = torch.ones(count, slots, dtype=torch.bool)
    theta = pretrained().expand(count, PARAMETERS)
    return select(theta, features, valid, torch.zeros(count, slots), greedy=True).probabilities


def cache(used: bool, age: float, loss: float, slots: int = 6) -> Tensor:
    """A device whose cached models are all alike; the own loss is 1."""
    ones = torch.ones(1, slots)
    return selector_features(ones > (0 if used else 1), age * ones, loss * ones, torch.ones(1), ones > 0)


def test_training_again_gives_the_shipped_network() -> None:
    shipped = pretrained()
    assert shipped.shape == (PARAMETERS,) and shipped.dtype == torch.float32
    torch.testing.assert_close(pretrain(), shipped, rtol=1e-4, atol=1e-5)


def test_it_follows_the_heuristics_on_fresh_data() -> None:
    examples = synthetic(400, torch.Generator().manual_seed(99))
    wanted = examples.chances > 0.5
    right = (judged(examples.features) > 0.5) == wanted
    assert 0.2 < wanted.float().mean() < 0.4
    assert right.float().mean() > 0.98
    assert right[wanted].float().mean() > 0.95


def test_new_models_are_chosen_and_merged_ones_are_not() -> None:
    assert (judged(cache(used=False, age=1, loss=1)) > 0.9).all()
    assert (judged(cache(used=False, age=4, loss=0.3)) > 0.9).all()
    assert (judged(cache(used=True, age=1, loss=1)) < 0.05).all()
    assert (judged(cache(used=True, age=1, loss=0.3)) < 0.05).all()


def test_very_stale_or_much_worse_models_are_unlikely() -> None:
    assert (judged(cache(used=False, age=200, loss=1)) < 0.2).all()
    assert (judged(cache(used=False, age=1, loss=7)) < 0.2).all()
    ages = [judged(cache(used=False, age=age, loss=1))[0, 2].item() for age in (4, 16, 32, 64)]
    assert ages == sorted(ages, reverse=True)


def test_the_heuristic_itself() -> None:
    features = torch.tensor([[[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0], [0, 0, -2, 1]]])
    used, fresh, stale, worse, better = heuristic(features)[0].tolist()
    assert used < 0.05 and fresh > 0.9 and stale < 0.05 and worse < 0.05 and better == fresh


def test_synthetic_data_depend_on_the_generator_alone() -> None:
    first, again, other = (synthetic(5, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert torch.equal(first.features, again.features) and torch.equal(first.chances, again.chances)
    assert not torch.equal(first.features, other.features)
