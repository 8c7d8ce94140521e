"""MINRES, against a direct solution."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aedfl.sparsity.minres import minres


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_solves_indefinite_systems(seed: int, systems: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.T + torch.diag(torch.tensor([9.0, -9.0] * 6).double())
    right = torch.randn(systems, 12, generator=generator, dtype=torch.float64)
    found = minres(lambda v: v @ matrix, right, 60, 1e-10)
    assert (found @ matrix - right).norm() < 1e-6 * right.norm()


def test_residuals_never_grow() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(20, 20, generator=generator, dtype=torch.float64)
    matrix, right = matrix + matrix.T, torch.randn(1, 20, generator=generator, dtype=torch.float64)
    residuals = [float((minres(lambda v: v @ matrix, right, k) @ matrix - right).norm()) for k in range(20)]
    assert all(after <= before + 1e-9 for before, after in pairwise(residuals))


def test_zero_needs_nothing() -> None:
    assert torch.equal(minres(lambda v: 2 * v, torch.zeros(2, 3), 5), torch.zeros(2, 3))
    found = minres(lambda v: 2 * v, torch.tensor([[0.0, 0, 0], [4, 0, 2]]), 5)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0, 0], [2, 0, 1]]))
