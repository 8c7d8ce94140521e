"""Sums over parameters: right, and the same bits whatever the batch and the number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aedfl.rules.reduce import dot, norm, pair_sum, total

Draw = Callable[..., Tensor]


@pytest.mark.parametrize("length", [0, 1, 2, 1023, 1024, 1025, 5000, 1024 * 1024 + 3])
def test_total_is_the_sum(normal: Draw, length: int) -> None:
    values = normal(2, length)
    torch.testing.assert_close(total(values), values.double().sum(-1), rtol=1e-5, atol=1e-3)
    assert total(values).dtype == torch.float64


def test_dot_and_norm(normal: Draw) -> None:
    left, right = normal(3, 4000), normal(3, 4000)
    torch.testing.assert_close(dot(left, right), (left.double() * right).sum(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(norm(left), left.double().norm(dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [7, 1500, 70_001])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_batch_or_threads(normal: Draw, length: int, threads: int) -> None:
    values = normal(9, length)
    together = total(values)
    torch.set_num_threads(threads)
    for first, last in [(0, 1), (8, 9), (3, 5), (2, 9)]:
        assert torch.equal(total(values[first:last].clone()), together[first:last])


def _by_pairs(numbers: list[Tensor]) -> Tensor:
    """The same order of sums as an independent recursion: both halves of the next power of two."""
    half = 1 << (len(numbers) - 1).bit_length() >> 1
    return numbers[0] if len(numbers) == 1 else _by_pairs(numbers[:half]) + _by_pairs(numbers[half:])


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 8, 13])
def test_pairs_are_summed_as_a_tree_whatever_the_batch_and_the_padding(normal: Draw, slots: int) -> None:
    values = normal(4, slots, 37)
    expected = torch.stack([_by_pairs(list(device)) for device in values])
    padded = torch.cat([values, torch.zeros(4, 5, 37)], 1)
    assert torch.equal(pair_sum(values.clone()), expected)
    assert torch.equal(pair_sum(values[1:2].clone())[0], expected[1])
    assert torch.equal(pair_sum(padded), expected)


def test_pairs_of_nothing_sum_up_to_zero() -> None:
    assert torch.equal(pair_sum(torch.ones(2, 0, 3)), torch.zeros(2, 3))
