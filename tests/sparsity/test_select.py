"""Which units go: shares reached, layers kept alive, and channels that come back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aedfl.models import build
from aedfl.sparsity import ChannelGroups, prune

GROUPS = ChannelGroups.of(build("cnn", (1, 8, 8), 10, seed=0), torch.zeros(1, 1, 8, 8))
PRUNABLE = int(GROUPS.prunable.sum())


def gone(mask: Tensor) -> int:
    """Prunable parameters that a mask removes."""
    return GROUPS.layout.parameters - int(GROUPS.kept_parameters(mask))


def random_scores(seed: int, *lead: int) -> Tensor:
    return torch.rand(*lead, GROUPS.count, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.floats(0, 0.9))
def test_the_share_is_reached_and_no_unit_too_many(seed: int, rate: float) -> None:
    scores = random_scores(seed)
    mask = prune(scores, GROUPS, rate)
    assert gone(mask) >= rate * PRUNABLE
    if not mask.all():
        last = scores.masked_fill(mask, -1).argmax()
        mask[last] = True
        assert gone(mask) < rate * PRUNABLE


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 0.8))
def test_a_share_of_the_macs_is_reached_by_the_units_worth_least_per_mac(seed: int, rate: float) -> None:
    scores = random_scores(seed)
    full, alone = GROUPS.full(), torch.eye(GROUPS.count, dtype=torch.bool)
    saved = GROUPS.macs(full) - GROUPS.macs(~alone)
    mask = prune(scores, GROUPS, rate, max_layer_share=1.0, amounts=GROUPS.entry_macs)
    safe = torch.cat([s[u] == s[u].max() for s in [scores] for u in GROUPS.layers.values()])
    worth = (scores / saved).masked_fill(mask, -1)
    assert worth.max() < (scores / saved).masked_fill(~mask | safe, torch.inf).min()
    assert GROUPS.macs(mask) <= (1 - rate) * GROUPS.macs(full) or torch.equal(mask, safe)
    mask[worth.argmax()] = True
    assert GROUPS.macs(mask) > (1 - rate) * GROUPS.macs(full)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_rate_removes_a_superset(seed: int, one: float, other: float) -> None:
    scores = random_scores(seed)
    low, high = sorted([one, other])
    assert not (prune(scores, GROUPS, high) & ~prune(scores, GROUPS, low)).any()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.sampled_from([0.5, 0.8, 0.95, 1.0]))
def test_every_layer_keeps_its_best(seed: int, least: int, share: float) -> None:
    scores = random_scores(seed)
    mask = prune(scores, GROUPS, 1.0, keep_min=least, max_layer_share=share)
    for units in GROUPS.layers.values():
        width = units.stop - units.start
        wanted = max(least, -int(-(1 - share) * width // 1 + 1e-9))
        best = scores[units].argsort(descending=True)
        kept = int(mask[units].sum())
        assert kept >= least and width - kept <= share * width
        assert abs(kept - wanted) <= 1
        assert mask[units][best[:kept]].all()


def test_nothing_goes_at_rate_zero() -> None:
    assert prune(random_scores(0), GROUPS, 0.0).all()


def test_lowest_scores_go_first() -> None:
    scores = torch.arange(GROUPS.count).float().roll(7)
    mask = prune(scores, GROUPS, 0.1)
    assert scores[~mask].max() < scores[mask].min()


def test_a_pruned_unit_comes_back_when_its_score_rises() -> None:
    scores = random_scores(3)
    first = prune(scores, GROUPS, 0.4)
    unit = int((~first).nonzero()[0])
    scores[unit] = 2.0
    assert prune(scores, GROUPS, 0.4)[unit]


def test_ties_go_by_number_and_the_answer_is_always_the_same() -> None:
    scores = torch.ones(GROUPS.count)
    mask = prune(scores, GROUPS, 0.1)
    assert not mask[0] and torch.equal(mask, prune(scores, GROUPS, 0.1))
    removed = (~mask).nonzero().flatten().tolist()
    free = [n for units in GROUPS.layers.values() for n in range(units.start, units.stop)]
    assert removed == [n for n in free if n in removed] and max(removed) < 12


def test_a_score_that_is_not_a_number_is_kept_longest() -> None:
    scores = random_scores(4)
    scores[5] = torch.nan
    assert prune(scores, GROUPS, 0.5)[5]


def test_many_devices_at_once() -> None:
    scores, rates = random_scores(5, 3, 2), torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.0, 1.0]])
    together = prune(scores, GROUPS, rates)
    for i in range(3):
        for j in range(2):
            assert torch.equal(together[i, j], prune(scores[i, j], GROUPS, float(rates[i, j])))


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_shares_are_of_parameters_not_of_units(rate: float) -> None:
    mask = prune(random_scores(6), GROUPS, rate)
    assert gone(mask) / PRUNABLE == pytest.approx(rate, abs=0.06)
