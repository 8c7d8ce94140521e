"""Who computes a convolution on a GPU: the rules and how they are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aedfl.training import choice
from aedfl.training.choice import Bands, PixelTiles, Precision, Rule, Shape, Tiles, choose

MEASURED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "results" / "bench" / "conv-choice.json").read_text()
)["passes"]


def shape(channels: int, filters: int, models: int = 20, kernel: int = 3, stride: int = 1, size: int = 16) -> Shape:
    ends = kernel // 2
    return Shape(models, 50, channels, size, size, filters, (kernel, kernel), (stride, stride), (ends, ends))


def measured(row: dict[str, Any]) -> Shape:
    sizes: list[Any] = [tuple(size) if isinstance(size, list) else size for size in row["shape"]]
    return Shape(*sizes)


def own(row: dict[str, Any]) -> dict[str, float]:
    """The times of our own kernels, by their tiles; bands for the gradient by the weights are no more."""
    of_bands = () if row["pass"] == "by_weight" else ("bands",)
    return {way: time for way, time in row["us"].items() if way[0].isdigit() or way.startswith(of_bands)}


def ways(row: dict[str, Any]) -> dict[str, float]:
    """The times that count; where ours was not measured in bf16, its time in TF32 is at most too long."""
    alike = [other for other in MEASURED if (other["shape"], other["pass"]) == (row["shape"], row["pass"])]
    ours = own(row) or next(own(other) for other in alike if other["precision"] == "tf32")
    return ours | {"library": row["us"]["library"]}


def way(tiles: Tiles | Bands | None) -> str:
    if tiles is None:
        return "library"
    return ("bands " if isinstance(tiles, Bands) else "") + ",".join(map(str, tiles))


def title(row: dict[str, Any]) -> str:
    models, _, channels, height, _, filters, kernel, stride, _ = row["shape"]
    sizes = f"{channels}>{filters} {kernel[0]}x{kernel[1]}/{stride[0]} @{height}"
    return f"{models} of {sizes}, {row['pass']}, {row['precision']}"


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
    assert not Rule(None, pixels=16 * 16).fits(Shape(20, 50, 3, 8, 17, 6, (3, 3), (1, 1), (1, 1)), "tf32")


@pytest.mark.parametrize(
    ("kernel", "line"), [((1, 2), True), ((1, 5), True), ((1, 1), False), ((2, 1), False), ((3, 3), False)]
)
def test_a_rule_knows_kernels_over_a_line(kernel: tuple[int, int], line: bool) -> None:
    given = Shape(20, 50, 50, 4, 256, 32, kernel, (1, 1), (0, 0))
    assert Rule(None, line=True).fits(given, "tf32") is line
    assert Rule(None, line=False).fits(given, "tf32") is not line
    assert Rule(None).fits(given, "tf32")


@pytest.mark.parametrize("row", MEASURED, ids=title)
def test_every_measured_pass_goes_the_way_that_was_fastest(row: dict[str, Any]) -> None:
    """But for what repeats of a measurement differ by; ways that need images turned round first do not count."""
    times = ways(row)
    assert len(times) > 1
    assert times[way(choose(row["pass"], measured(row), row["precision"]))] <= 1.03 * min(times.values())


def test_one_row_for_each_pass_of_a_shape_and_precision() -> None:
    keys = [(measured(row), row["pass"], row["precision"]) for row in MEASURED]
    assert len(set(keys)) == len(keys)


def test_more_filters_than_channels_are_not_what_the_library_is_good_at() -> None:
    for which in choice.RULES:
        assert choose(which, shape(16, 32, size=32), "tf32") is not None
        assert choose(which, shape(48, 48), "tf32") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_tf32_what_is_small_stays_with_our_own_kernels(precision: Precision) -> None:
    """But for 3x3 in bf16, which was measured."""
    for row in MEASURED:
        given = measured(row)
        if given.channels * given.filters <= 32 * 32 and (precision, given.kernel) != ("bf16", (3, 3)):
            assert isinstance(choose(row["pass"], given, precision), Tiles)


def test_bands_are_for_what_they_were_measured_for() -> None:
    """Their matrices grow with the square of the width, and with channels times filters."""
    narrow = Shape(20, 50, 6, 14, 14, 16, (5, 5), (1, 1), (0, 0))
    assert isinstance(choose("by_input", narrow, "tf32"), Bands)
    for change in ({"width": 28}, {"height": 2, "width": 98}, {"filters": 32}, {"stride": (2, 2)}, {"stride": (1, 2)}):
        assert isinstance(choose("by_input", replace(narrow, **change), "tf32"), Tiles)
    assert not any(isinstance(rule.tiles, Bands) for rule in choice.RULES["by_weight"])


@pytest.mark.parametrize("which", choice.RULES)
@pytest.mark.parametrize("precision", choice.ALL)
def test_kernels_of_one_pixel_are_never_left_to_the_library(which: choice.Pass, precision: Precision) -> None:
    assert choose(which, shape(128, 256, kernel=1, stride=2), precision) is not None


@pytest.mark.parametrize("which", choice.RULES)
def test_no_tiles_that_were_not_checked(which: choice.Pass) -> None:
    """Each was compared with the library on a GPU, with 20 models."""
    rows = [row for row in MEASURED if row["pass"] == which and measured(row).models == 20]
    checked = {name for row in rows for name in own(row)}
    used = {way(rule.tiles) for rule in choice.RULES[which] if rule.tiles}
    assert used <= checked


@pytest.mark.parametrize("which", choice.RULES)
def test_tiles_are_what_matrix_units_can_take(which: choice.Pass) -> None:
    for tiles in (rule.tiles for rule in choice.RULES[which] if rule.tiles):
        *sides, warps, stages = tiles
        for side, least in (*((side, 16) for side in sides), (warps, 1)):
            assert side >= least and side & (side - 1) == 0
        assert stages >= 1


def test_the_size_of_the_output() -> None:
    assert Shape(1, 1, 3, 32, 30, 6, (5, 5), (1, 1), (0, 0)).out == (28, 26)
    assert Shape(1, 1, 3, 32, 31, 6, (3, 3), (2, 2), (1, 1)).out == (16, 16)


def test_tiles_shrink_until_they_fit_into_shared_memory() -> None:
    """First what is read ahead, then what is read at once; what fits stays as it was measured."""
    tiles = PixelTiles(128, 64, 64, warps=4, stages=3)
    assert tiles.within(3 * 128 * 10, each=10) == tiles
    assert tiles.within(3 * 128 * 10 - 1, each=10) == tiles._replace(stages=2)
    assert tiles.within(2 * 128 * 10 - 1, each=10) == tiles._replace(stages=2, positions=64)
    assert tiles.within(2 * 64 * 10, each=10, besides=1) == tiles._replace(stages=2, positions=32)
    assert tiles.within(0, each=10) == tiles._replace(stages=1, positions=32)
