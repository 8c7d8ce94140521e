"""Merging and the consensus distance: the paper's example, identities, brute force."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aedfl.rules.merge import (
    consensus_distance,
    merge,
    merge_flops,
    pairwise_average,
    streamed_consensus_distance,
    weighted_mean,
)

Draw = Callable[..., Tensor]


def test_the_papers_worked_example() -> None:
    """Device 0 merges itself, 4 and 7 with weights 0.3, 0.6, 0.1; neighbour 6 was not selected."""
    weights = torch.tensor([[0.3, 0.6, 0.0, 0.1]])
    vectors = torch.tensor([[[2.0, 4.0, 7.0], [1.0, 1.0, 8.0], [50.0, 50.0, 50.0], [3.0, 2.0, 9.0]]])
    masks = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]], dtype=torch.bool)
    first, second, third = merge(vectors, masks, weights)[0].tolist()
    assert first == pytest.approx(1.5)
    assert second == pytest.approx((1 * 0.6 + 2 * 0.1) / 0.7)
    assert third == 7.0, "held by nobody who takes part: the own stored value stays"


def test_merge_is_the_masked_weighted_mean(normal: Draw, uniform: Draw) -> None:
    vectors, weights = normal(3, 5, 40), uniform(3, 5)
    masks = uniform(3, 5, 40) < 0.6
    shares = (weights.unsqueeze(-1) * masks).double()
    expected = (shares * vectors).sum(1) / shares.sum(1)
    expected = torch.where(shares.sum(1) > 0, expected, vectors[:, 2].double()).float()
    torch.testing.assert_close(merge(vectors, masks, weights, own=2), expected)


def test_slots_without_weight_may_hold_garbage(normal: Draw) -> None:
    vectors = normal(2, 3, 8)
    vectors[:, 2] = nan
    vectors[0, 0] = inf
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    merged = merge(vectors, None, weights)
    assert torch.equal(merged[0], vectors[0, 1]), "a diverged own model of weight 0 is healed"
    torch.testing.assert_close(merged[1], vectors[1, :2].mean(0))
    assert torch.equal(merge(vectors, torch.ones(2, 3, 8, dtype=torch.bool), weights), merged)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.booleans())
def test_merging_equal_models_is_the_identity(seed: int, models: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(2, 1, 30, generator=generator)
    masks = torch.rand(2, models, 30, generator=generator) < 0.5 if masked else None
    weights = torch.rand(2, models, generator=generator) + 1e-3
    merged = merge(one.expand(2, models, 30), masks, weights)
    torch.testing.assert_close(merged, one[:, 0], rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(1, 6)), st.integers(0, 10_000))
def test_permuting_neighbours_changes_nothing(order: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, 6, 30, generator=generator)
    masks = torch.rand(2, 6, 30, generator=generator) < 0.7
    weights = torch.rand(2, 6, generator=generator)
    slots = [0, *order]
    shuffled = merge(vectors[:, slots], masks[:, slots], weights[:, slots])
    torch.testing.assert_close(shuffled, merge(vectors, masks, weights), rtol=1e-5, atol=1e-6)


def test_merged_values_lie_between_the_models(normal: Draw, uniform: Draw) -> None:
    vectors = normal(4, 6, 50)
    merged = merge(vectors, None, uniform(4, 6))
    assert (merged <= vectors.amax(1) + 1e-6).all() and (merged >= vectors.amin(1) - 1e-6).all()


def test_weighted_mean_of_a_list_has_the_bits_of_merge(normal: Draw, uniform: Draw) -> None:
    vectors, weights = normal(4, 7, 33), uniform(4, 7)
    masks = uniform(4, 7, 33) < 0.6
    plain, masked = merge(vectors, None, weights), merge(vectors, masks, weights)
    for job in range(4):
        models, numbers = list(vectors[job]), weights[job].tolist()
        assert torch.equal(weighted_mean(models, numbers), plain[job])
        assert torch.equal(weighted_mean(models, weights[job], list(masks[job])), masked[job])


def test_weighted_mean_of_vectors_and_of_rows_are_the_same(normal: Draw, uniform: Draw) -> None:
    """A kernel takes vectors, PyTorch everything else; both fall back on what they are told."""
    models, masks = list(normal(5, 3000)), list(uniform(5, 3000) < 0.3)
    weights, fallback = uniform(5), normal(3000)
    found = weighted_mean(models, weights, masks, fallback)
    rows = weighted_mean([m[None] for m in models], weights, [m[None] for m in masks], fallback[None])
    nobody = ~torch.stack(masks).any(0)
    assert nobody.any() and torch.equal(found[nobody], fallback[nobody])
    assert torch.equal(found, rows[0])


def test_a_weight_that_is_no_number_is_seen(normal: Draw) -> None:
    """With kernels and without them."""
    models = list(normal(2, 50))
    for vectors in (models, [model[None] for model in models]):
        assert weighted_mean(vectors, torch.tensor([torch.nan, 1.0])).isnan().all()
    with pytest.raises(ValueError, match="1 masks were given for 2 vectors"):
        weighted_mean(models, [1, 1], [torch.ones(50, dtype=torch.bool)])


def test_weighted_mean_takes_counts_and_a_fallback() -> None:
    models = [torch.tensor([1.0, 10.0]), torch.tensor([4.0, 20.0])]
    assert weighted_mean(models, [100, 200]).tolist() == pytest.approx([3.0, 50 / 3])
    masks = [torch.tensor([True, False]), torch.tensor([True, False])]
    assert weighted_mean(models, [1, 1], masks, torch.tensor([0.0, -5.0])).tolist() == [2.5, -5.0]
    with pytest.raises(ValueError):
        weighted_mean(models, [1.0])


def test_pairwise_average_is_symmetric(normal: Draw) -> None:
    left, right = normal(500), normal(500)
    assert torch.equal(pairwise_average(left, right), pairwise_average(right, left))
    torch.testing.assert_close(pairwise_average(left, right), (left + right) / 2)


def brute_force(stack: Tensor) -> float:
    pairs = [((a - b).double() ** 2).sum() for a, b in combinations(stack, 2)]
    return float(torch.stack(pairs).mean().sqrt())


@pytest.mark.parametrize("models", [2, 3, 10])
@pytest.mark.parametrize("chunk", [1, 64, 1 << 22])
def test_consensus_distance_is_that_of_all_pairs(normal: Draw, models: int, chunk: int) -> None:
    stack = normal(models, 37) + 100
    expected = pytest.approx(brute_force(stack), rel=1e-5)
    assert consensus_distance(stack, chunk).item() == expected
    assert streamed_consensus_distance(list(stack)).item() == expected


def test_consensus_of_one_model_or_equal_ones_is_zero(normal: Draw) -> None:
    stack = normal(1, 20)
    assert consensus_distance(stack).item() == 0
    assert streamed_consensus_distance(stack).item() == 0
    assert consensus_distance(stack.expand(4, 20)).item() == pytest.approx(0, abs=1e-12)


def test_a_stream_must_be_repeatable(normal: Draw) -> None:
    with pytest.raises(TypeError, match="twice"):
        streamed_consensus_distance(v for v in normal(3, 4))
    with pytest.raises(ValueError, match="no models"):
        streamed_consensus_distance([])


def test_merge_flops() -> None:
    assert merge_flops(3, 1000) == 6000
