"""Figures for people."""

from __future__ import annotations

import pytest

from aedfl.bench.table import optional, short


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2_155_592.8, "2.16 M"),
        (286_375.8, "286,376"),
        (1234.4, "1,234"),
        (12.345, "12.3"),
        (0.012345, "0.0123"),
        (0.0, "0"),
    ],
)
def test_numbers_are_narrow_and_keep_three_digits(value: float, words: str) -> None:
    assert short(value) == words


def test_what_there_is_not_is_a_dash() -> None:
    assert optional(None, 2) == "–"
    assert optional(1234.567, 2) == "1,234.57"
