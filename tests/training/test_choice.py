"""Who computes a convolution on a GPU: the rules and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aedfl.training import choice
from aedfl.training.choice import Precision, Rule, Shape, Tiles, choose

MEASURED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "results" / "bench" / "conv-choice.json").read_text()
)["passes"]


def shape(channels: int, filters: int, models: int = 20, kernel: int = 3, stride: int = 1, size: int = 16) -> Shape:
    ends = kernel // 2
    return Shape(models, 50, channels, size, size, filters, (kernel, kernel), (stride, stride), (ends, ends))


def measured(row: dict[str, Any]) -> Shape:
    sizes: list[Any] = [tuple(size) if isinstance(size, list) else size for size in row["shape"]]
    return Shape(*sizes)


def tiled(row: dict[str, Any]) -> dict[str, float]:
    """The times of our own kernel, by its tiles."""
    return {way: time for way, time in row["us"].items() if way[0].isdigit()}


def title(row: dict[str, Any]) -> str:
    models, _, channels, height, _, filters, kernel, stride, _ = row["shape"]
    return f"{models} of {channels}>{filters} {kernel[0]}x{kernel[1]}/{stride[0]} @{height}, {row['pass']}"


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


def test_a_rule_looks_at_kind_and_size() -> None:
    of_kind = Rule(None, (3, 3), strided=True, least=16, pixels=16 * 16)
    assert of_kind.fits(shape(16, 8, stride=2), "tf32")
    assert not of_kind.fits(shape(16, 8), "tf32")
    assert not of_kind.fits(shape(16, 8, stride=2, kernel=5), "tf32")
    assert not of_kind.fits(shape(15, 8, stride=2), "tf32")
    assert not of_kind.fits(shape(16, 8, stride=2, size=17), "tf32")
    assert Rule(None, strided=False).fits(shape(16, 8), "tf32")
    assert Rule(None, equal=True).fits(shape(8, 8), "tf32") and not Rule(None, equal=True).fits(shape(16, 8), "tf32")
    assert not Rule(None, strided=False).fits(shape(16, 8, stride=2), "tf32")


@pytest.mark.parametrize("row", MEASURED, ids=title)
def test_every_measured_pass_goes_the_way_that_was_fastest(row: dict[str, Any]) -> None:
    """But for what repeats of a measurement differ by; ways that need images turned round first do not count.

    The gradient by the input of LeNet's second layer stays with the fastest of our own (see the rules).
    """
    given = measured(row)
    tiles = choose(row["pass"], given, "tf32")
    taken = row["us"]["library" if tiles is None else ",".join(map(str, tiles))]
    ours_only = row["pass"] == "by_input" and given.kernel == (5, 5)
    assert taken <= 1.03 * min(*tiled(row).values(), *([] if ours_only else [row["us"]["library"]]))


def test_more_filters_than_channels_are_not_what_the_library_is_good_at() -> None:
    for which in choice.RULES:
        assert choose(which, shape(16, 32, size=32), "tf32") is not None
        assert choose(which, shape(32, 32), "tf32") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_tf32_what_is_small_stays_with_our_own_kernels(precision: Precision) -> None:
    for row in MEASURED:
        given = measured(row)
        if given.channels * given.filters <= 32 * 32:
            assert choose(row["pass"], given, precision) is not None


@pytest.mark.parametrize("which", choice.RULES)
@pytest.mark.parametrize("precision", choice.ALL)
def test_kernels_of_one_pixel_are_never_left_to_the_library(which: choice.Pass, precision: Precision) -> None:
    assert choose(which, shape(128, 256, kernel=1, stride=2), precision) is not None


@pytest.mark.parametrize("which", choice.RULES)
def test_no_tiles_that_were_not_checked(which: choice.Pass) -> None:
    """Each was compared with the library in full precision on a GPU, with 20 models."""
    rows = [row for row in MEASURED if row["pass"] == which and measured(row).models == 20]
    checked = {way for row in rows for way in tiled(row)}
    used = {",".join(map(str, rule.tiles)) for rule in choice.RULES[which] if rule.tiles}
    assert used <= checked


@pytest.mark.parametrize("which", choice.RULES)
def test_tiles_are_what_matrix_units_can_take(which: choice.Pass) -> None:
    for tiles in (rule.tiles for rule in choice.RULES[which] if rule.tiles):
        for side, least in ((tiles.positions, 16), (tiles.patch, 16), (tiles.warps, 1)):
            assert side >= least and side & (side - 1) == 0
        assert tiles.stages >= 1


def test_the_size_of_the_output() -> None:
    assert Shape(1, 1, 3, 32, 30, 6, (5, 5), (1, 1), (0, 0)).out == (28, 26)
    assert Shape(1, 1, 3, 32, 31, 6, (3, 3), (2, 2), (1, 1)).out == (16, 16)
