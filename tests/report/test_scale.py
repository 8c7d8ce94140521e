"""Axes and numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aedfl.report.scale import exact, fitted, linear, logarithmic, seconds, short

values = st.floats(-1e9, 1e9, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-9)


@settings(deadline=None)
@given(a=values, b=values)
def test_a_linear_axis_covers_its_values_with_few_even_ticks(a: float, b: float) -> None:
    lo, hi = min(a, b), max(a, b)
    axis = linear(lo, hi)
    room = 1e-6 * max(abs(lo), abs(hi), 1e-9)
    assert axis.lo <= lo + room and axis.hi >= hi - room
    assert 2 <= len(axis.ticks) <= 9
    steps = np.diff(axis.ticks)
    assert np.allclose(steps, steps[0], rtol=1e-4)


@settings(deadline=None)
@given(lo=st.floats(1e-8, 1e6), factor=st.floats(1.0, 1e9))
def test_a_logarithmic_axis_covers_its_values(lo: float, factor: float) -> None:
    axis = logarithmic(lo, lo * factor)
    assert axis.lo <= lo * (1 + 1e-9) and axis.hi >= lo * factor * (1 - 1e-9)
    share = axis.share(np.array([axis.lo, math.sqrt(axis.lo * axis.hi), axis.hi]))
    assert np.allclose(share, [0, 0.5, 1])


def test_ticks_are_round() -> None:
    assert linear(0.03, 0.97).ticks == (0, 0.2, 0.4, 0.6, 0.8, 1)
    assert exact(0, 1500).ticks == (0, 200, 400, 600, 800, 1000, 1200, 1400)
    assert [linear(0, 5.2e7, divide=1e6).text(t) for t in linear(0, 5.2e7, divide=1e6).ticks][-1] == "60"


def test_an_axis_for_nothing_is_still_an_axis() -> None:
    assert fitted(np.array([math.nan]), "x").hi > fitted(np.array([math.nan]), "x").lo
    assert fitted(np.array([0.0]), "x").hi > 0
    assert fitted(np.array([1e-3, 10.0]), "x", log_from=100.0).log


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1234567890, "B", "1.23 GB"),
        (999, "B", "999 B"),
        (45600, "", "45.6k"),
        (0, "B", "0 B"),
        (math.nan, "", "–"),
    ],
)
def test_short_numbers(value: float, unit: str, text: str) -> None:
    assert short(value, unit) == text


def test_seconds_are_not_kiloseconds() -> None:
    assert [seconds(v) for v in (1234.4, 5.678, None)] == ["1,234 s", "5.68 s", "–"]
