"""The shipped selector: reproducible, and it follows the heuristics it was trained on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aedfl.rules.features import selector_features
from aedfl.rules.network import PARAMETERS
from aedfl.rules.pretrain import Start, heuristic, pretrain, pretrained, synthetic
from aedfl.rules.selector import select

STARTS: tuple[Start, ...] = ("open", "wary")


def judged(features: Tensor, start: Start = "open") -> Tensor:
    """What the shipped network thinks of each model, [B, M]."""
    count, slots = features.shape[:2]
    valid = torch.ones(count, slots, dtype=torch.bool)
    theta = pretrained(start).expand(count, PARAMETERS)
    return select(theta, features, valid, torch.zeros(count, slots), greedy=True).probabilities


def cache(used: bool, age: float, loss: float, slots: int = 6) -> Tensor:
    """A device whose cached models are all alike; the own loss is 1."""
    ones = torch.ones(1, slots)
    return selector_features(ones > (0 if used else 1), age * ones, loss * ones, torch.ones(1), ones > 0)


@pytest.mark.parametrize("start", STARTS)
def test_training_again_gives_the_shipped_network(start: Start) -> None:
    shipped = pretrained(start)
    assert shipped.shape == (PARAMETERS,) and shipped.dtype == torch.float32
    torch.testing.assert_close(pretrain(start), shipped, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("start", STARTS)
def test_it_follows_the_heuristics_on_fresh_data(start: Start) -> None:
    examples = synthetic(400, torch.Generator().manual_seed(99), start=start)
    wanted = examples.chances > 0.5
    right = (judged(examples.features, start) > 0.5) == wanted
    assert 0.2 < wanted.float().mean() < 0.4
    assert right.float().mean() > 0.98
    assert right[wanted].float().mean() > 0.95


@pytest.mark.parametrize("start", STARTS)
def test_new_models_are_chosen_and_merged_ones_are_not(start: Start) -> None:
    assert (judged(cache(used=False, age=1, loss=1), start) > 0.9).all()
    assert (judged(cache(used=False, age=4, loss=0.3), start) > 0.9).all()
    assert (judged(cache(used=True, age=1, loss=1), start) < 0.05).all()
    assert (judged(cache(used=True, age=1, loss=0.3), start) < 0.05).all()


def test_an_open_selector_takes_everything_new_and_a_wary_one_leaves_out_much_worse_models() -> None:
    for loss in (0.01, 1, 7, float("nan")):
        assert (judged(cache(used=False, age=1, loss=loss)) > 0.98).all()
    assert (judged(cache(used=False, age=1, loss=7), "wary") < 0.2).all()


@pytest.mark.parametrize("start", STARTS)
def test_very_stale_models_are_unlikely(start: Start) -> None:
    assert (judged(cache(used=False, age=200, loss=1), start) < 0.2).all()
    ages = [judged(cache(used=False, age=age, loss=1), start)[0, 2].item() for age in (4, 16, 32, 64)]
    assert ages == sorted(ages, reverse=True)


def test_the_heuristics_themselves() -> None:
    features = torch.tensor([[[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0], [0, 0, -2, 1]]])
    for start in STARTS:
        used, fresh, stale, worse, better = heuristic(features, start)[0].tolist()
        assert used < 0.05 and fresh > 0.9 and stale < 0.05 and better == fresh
        assert worse == fresh if start == "open" else worse < 0.05


def test_synthetic_data_depend_on_the_generator_alone() -> None:
    first, again, other = (synthetic(5, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert torch.equal(first.features, again.features) and torch.equal(first.chances, again.chances)
    assert not torch.equal(first.features, other.features)
