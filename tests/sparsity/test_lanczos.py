"""Spectra from a few products, against the exact eigenvalues."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import hessian, vmap

from aedfl.sparsity import Spectrum, curvature, density, lanczos, mean_spectrum, rademacher


def symmetric(size: int, seed: int = 0) -> Tensor:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return matrix + matrix.T


def test_all_steps_give_all_eigenvalues() -> None:
    matrix = symmetric(30)
    found = lanczos(lambda v: v @ matrix, rademacher(0, (30,)).double(), 30)
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(matrix))
    torch.testing.assert_close(found.weights.sum(), torch.tensor(1.0).double())
    assert found.converged(1e-6).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 20))
def test_an_eigenvalue_lies_within_the_residual(seed: int, steps: int) -> None:
    matrix = symmetric(25, seed)
    exact = torch.linalg.eigvalsh(matrix)
    found = lanczos(lambda v: v @ matrix, rademacher(seed, (2, 25)).double(), steps)
    nearest = (found.values[..., None] - exact).abs().amin(-1)
    assert (nearest <= found.residuals + 1e-9).all()


def test_moments_are_matched() -> None:
    """Gauss quadrature: k steps are exact for polynomials of degree 2k - 1."""
    matrix, start = symmetric(40), rademacher(1, (40,)).double()
    found = lanczos(lambda v: v @ matrix, start, 4)
    for power in range(8):
        wanted = start @ torch.linalg.matrix_power(matrix, power) @ start / 40
        torch.testing.assert_close((found.weights * found.values**power).sum(), wanted)


def test_an_invariant_subspace_ends_it_quietly() -> None:
    matrix = torch.diag(torch.tensor([3.0, 3.0, 3.0, -1.0, -1.0]).double())
    found = lanczos(lambda v: v @ matrix, rademacher(0, (5,)).double(), 5)
    heavy = found.weights > 1e-9
    torch.testing.assert_close(found.values[heavy], torch.tensor([-1.0, 3.0]).double())
    torch.testing.assert_close(found.weights[heavy], torch.tensor([0.4, 0.6]).double())


def test_several_starts_are_each_alone() -> None:
    matrix, starts = symmetric(20), rademacher(2, (3, 20)).double()
    together = lanczos(lambda v: v @ matrix, starts, 6)
    for row in range(3):
        torch.testing.assert_close(together.values[row], lanczos(lambda v: v @ matrix, starts[row], 6).values)


def test_many_devices_at_once() -> None:
    matrices, starts = torch.stack([symmetric(20, 0), symmetric(20, 1)]), rademacher(3, (2, 20)).double()
    together = vmap(lambda matrix, start: lanczos(lambda v: v @ matrix, start, 6))(matrices, starts)
    for row in range(2):
        alone = lanczos(lambda v, row=row: v @ matrices[row], starts[row], 6)
        torch.testing.assert_close(together.values[row], alone.values)
        torch.testing.assert_close(together.residuals[row], alone.residuals)


def test_extremes_of_a_networks_spectrum(tiny) -> None:
    exact = torch.linalg.eigvalsh(hessian(tiny.objective)(tiny.vector))
    at = curvature(tiny.objective, tiny.vector)
    found = lanczos(at.hessian, rademacher(0, (294,)), 30)
    done = found.converged(0.001)
    assert done.sum() >= 4 and done[-1]
    for value in found.values[done]:
        assert (exact - value).abs().min() < 0.002 * exact.abs().max()


def test_density_of_a_networks_spectrum(tiny) -> None:
    """Quadrature over 20 starts, against the exact eigenvalues smeared alike."""
    exact = torch.linalg.eigvalsh(hessian(tiny.objective)(tiny.vector)).double()
    at = curvature(tiny.objective, tiny.vector)
    found = mean_spectrum(lanczos(at.hessian, rademacher(0, (20, 294)), 40))
    width = 0.05 * float(exact.max())
    grid = torch.linspace(float(exact.min()) - 5 * width, float(exact.max()) + 5 * width, 400).double()
    truth = density(Spectrum(exact, torch.full_like(exact, 1 / 294), torch.zeros_like(exact)), grid, width)
    spacing = float(grid[1] - grid[0])
    assert float(truth.sum()) * spacing == pytest.approx(1, abs=1e-3)
    assert float((density(found, grid, width) - truth).abs().sum()) * spacing < 0.03
    assert float((found.weights * found.values).sum()) == pytest.approx(float(exact.mean()), rel=0.1)
