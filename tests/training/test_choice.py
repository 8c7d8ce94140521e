"""Who computes a convolution on a GPU: the rules and how they are read."""

from __future__ import annotations

import pytest

from aedfl.training import choice
from aedfl.training.choice import Rule, Shape, Tiles, choose


def shape(channels: int, filters: int, models: int = 20) -> Shape:
    return Shape(models, 50, channels, 16, 16, filters, (3, 3), (1, 1), (1, 1))


def test_the_first_rule_that_fits_counts_and_the_library_takes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    few, narrow, wide = Tiles(16, 16, 1), Tiles(32, 16, 1), Tiles(64, 16, 1)
    rules = (
        Rule(None, filters=8, precisions=("bf16",)),
        Rule(few, filters=8, models=10),
        Rule(narrow, filters=8),
        Rule(wide, product=256),
    )
    monkeypatch.setitem(choice.RULES, "forward", rules)
    assert choose("forward", shape(3, 8), "tf32") == narrow
    assert choose("forward", shape(3, 8, models=10), "tf32") == few
    assert choose("forward", shape(3, 8), "bf16") is None
    assert choose("forward", shape(16, 16), "bf16") == wide
    assert choose("forward", shape(16, 17), "tf32") is None


@pytest.mark.parametrize("which", choice.RULES)
def test_tiles_are_what_matrix_units_can_take(which: choice.Pass) -> None:
    for tiles in (rule.tiles for rule in choice.RULES[which] if rule.tiles):
        for side, least in ((tiles.positions, 16), (tiles.patch, 16), (tiles.warps, 1)):
            assert side >= least and side & (side - 1) == 0
        assert tiles.stages >= 1


def test_the_size_of_the_output() -> None:
    assert Shape(1, 1, 3, 32, 30, 6, (5, 5), (1, 1), (0, 0)).out == (28, 26)
    assert Shape(1, 1, 3, 32, 31, 6, (3, 3), (2, 2), (1, 1)).out == (16, 16)
