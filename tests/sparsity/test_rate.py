"""Gap rule, Lipschitz estimate, cap and merged rate."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aedfl.sparsity import Spectrum, cap, curvature, gap_rate, lanczos, lipschitz, merge_rates, rademacher


def spectrum(values: list[float], weights: list[float], residuals: list[float]) -> Spectrum:
    return Spectrum(*(torch.tensor(numbers, dtype=torch.float64) for numbers in (values, weights, residuals)))


ALL_DONE = spectrum([-1, 0, 1, 6, 20], [0.1, 0.5, 0.2, 0.15, 0.05], [0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("bound", "rate"), [(0.2, 0.1), (0.5, 0.8), (1.2, 0.8), (2.0, 0.95), (3.4, 0.95), (3.6, 0.0), (inf, 0.0)]
)
def test_the_first_gap_wider_than_four_l(bound: float, rate: float) -> None:
    assert float(gap_rate(ALL_DONE, bound)) == pytest.approx(rate)


def test_values_that_have_not_converged_make_no_gap() -> None:
    found = spectrum([-1, 0, 1, 6, 20], [0.1, 0.5, 0.2, 0.15, 0.05], [0, 0, 1, 0, 0])
    assert float(gap_rate(found, 0.5)) == pytest.approx(0.95)
    assert float(gap_rate(found, 0.5, tolerance=0.1)) == pytest.approx(0.8)
    assert float(gap_rate(spectrum([0, 9], [0.5, 0.5], [1, 1]), 0.1)) == 0


def test_several_spectra_at_once() -> None:
    stack = Spectrum(*(torch.stack([part, part]) for part in ALL_DONE))
    assert gap_rate(stack, torch.tensor([[0.5], [3.6]])).tolist() == pytest.approx([0.8, 0.0])


def test_lipschitz_of_a_quadratic_is_zero() -> None:
    matrix = torch.diag(torch.tensor([1.0, 4.0, 9.0]))
    bound = lipschitz(lambda m: 0.5 * m @ matrix @ m, torch.ones(3), torch.zeros(3))
    assert float(bound) == pytest.approx(0, abs=1e-5)


def test_lipschitz_of_a_cubic() -> None:
    """F = m^3 has H(m) dm - F'(m + dm) = 6 m dm - 3 (m + dm)^2, of slope -6 dm: steepest at the far end."""
    bound = lipschitz(lambda m: (m**3).sum(), torch.ones(1), torch.zeros(1), points=100)
    assert float(bound) == pytest.approx(6, rel=0.01)
    assert float(lipschitz(lambda m: (m**3).sum(), torch.ones(1), torch.zeros(1), points=2)) < float(bound)


def test_lipschitz_without_training_is_unknown() -> None:
    assert float(lipschitz(lambda m: (m**3).sum(), torch.ones(2), torch.ones(2))) == inf


def test_the_whole_rule_on_a_network(lenet) -> None:
    at = curvature(lenet.objective, lenet.vector)
    found = lanczos(at.hessian, rademacher(0, (len(lenet.vector),)), 16)
    bound = lipschitz(lenet.objective, lenet.vector, lenet.initial, at=at)
    rate = float(gap_rate(found, bound))
    print(f"\nL = {float(bound):.2f}, largest Ritz value {float(found.values[-1]):.1f}, raw rate {rate:.4f}")
    assert 0 < float(bound) < inf and 0 <= rate <= 1


def test_cap_rises_smoothly() -> None:
    caps = [cap(update, 20, 120) for update in range(0, 200)]
    assert caps[20] == 0 and caps[70] == pytest.approx(0.25) and caps[120] == caps[199] == 0.5
    assert max(b - a for a, b in pairwise(caps)) < 0.01
    assert caps == sorted(caps)
    assert cap(5, 5, 5, 0.3) == 0 and cap(6, 5, 5, 0.3) == 0.3


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_the_merged_rate_is_a_mean(pairs: list[tuple[float, float]]) -> None:
    total = sum(w for w, _ in pairs)
    weights, rates = [w / total for w, _ in pairs], [p for _, p in pairs]
    merged = float(merge_rates(weights, rates[0], rates[1:]))
    assert merged == pytest.approx(sum(w * p for w, p in zip(weights, rates, strict=True)))
    assert min(rates) - 1e-9 <= merged <= max(rates) + 1e-9
