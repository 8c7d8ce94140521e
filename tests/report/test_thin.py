"""Fewer points, same picture."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aedfl.report.thin import banded, binned_mean, coverage, held, thinned


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes(values: list[float]) -> None:
    x, y = np.arange(float(len(values))), np.array(values)
    few_x, few_y = thinned(x, y, 400)
    assert len(few_x) <= 400
    assert (few_x[0], few_x[-1]) == (x[0], x[-1])
    assert (few_y.min(), few_y.max()) == (y.min(), y.max())
    assert (np.diff(few_x) > 0).all()


def test_thinning_drops_what_is_not_a_number() -> None:
    x, y = thinned(np.array([0.0, 1.0, 2.0, np.nan]), np.array([1.0, np.nan, np.inf, 2.0]))
    assert x.tolist() == [0.0] and y.tolist() == [1.0]


def test_bands_are_means_and_quantiles_of_stretches() -> None:
    times = np.repeat([0.0, 10.0], 100)
    values = np.concatenate([np.arange(100.0), np.full(100, 7.0)])
    middle, mean, low, high = banded(times, values)
    assert len(middle) == 2
    assert np.allclose((mean[0], low[0], high[0]), (49.5, 9.9, 89.1))
    assert (mean[1], low[1], high[1]) == (7.0, 7.0, 7.0)
    assert all(len(part) == 0 for part in banded(np.empty(0), np.empty(0)))


def test_binned_means_have_gaps_that_can_be_held() -> None:
    found = binned_mean(np.array([0.5, 0.7, 3.5]), np.array([1.0, 3.0, 5.0]), 4.0, 4)
    assert np.array_equal(found, [2.0, np.nan, np.nan, 5.0], equal_nan=True)
    assert held(found).tolist() == [2.0, 2.0, 2.0, 5.0]


def test_coverage_is_the_busy_share_of_every_stretch() -> None:
    share = coverage(np.array([0.0, 2.0]), np.array([1.5, 2.5]), 4.0, 4)
    assert np.allclose(share, [1.0, 0.5, 0.5, 0.0])
    assert np.allclose(coverage(np.empty(0), np.empty(0), 4.0, 4), 0.0)
