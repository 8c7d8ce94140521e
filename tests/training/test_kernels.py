"""The GPU kernels against PyTorch's own functions in double precision: values and all gradients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aedfl.training.choice import BANDS, Pass, PixelTiles, Shape, pixel_tiles
from training import descents, lines, pixels
from training.convolutions import FOR_BANDS, errors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# models, batch, channels, height, width, filters, kernel, stride, padding
CONVOLUTIONS = {
    "lenet, first": (3, 4, 1, 28, 28, 6, (5, 5), (1, 1), (0, 0)),
    "lenet, second": (2, 50, 6, 12, 12, 16, (5, 5), (1, 1), (0, 0)),
    "strided": (3, 2, 16, 8, 8, 20, (3, 3), (2, 2), (1, 1)),
    "shortcut": (2, 2, 17, 6, 7, 70, (1, 1), (2, 2), (0, 0)),
    "line": (2, 3, 50, 1, 20, 32, (1, 4), (1, 1), (0, 0)),
    "padded": (2, 30, 3, 9, 10, 5, (3, 3), (1, 1), (1, 1)),
    "resnet, second block": (2, 4, 32, 16, 16, 32, (3, 3), (1, 1), (1, 1)),
    "32 channels, small image": (2, 4, 32, 8, 8, 32, (3, 3), (1, 1), (1, 1)),
    "32 channels, wide kernel": (2, 4, 32, 16, 16, 32, (5, 5), (1, 1), (2, 2)),
    "32 channels, strided": (2, 4, 32, 16, 16, 32, (3, 3), (2, 2), (1, 1)),
    "to more filters": (2, 4, 16, 16, 16, 32, (3, 3), (1, 1), (1, 1)),
    "to fewer filters": (2, 4, 32, 16, 16, 16, (3, 3), (1, 1), (1, 1)),
    "no power of two": (2, 4, 24, 16, 16, 24, (3, 3), (1, 1), (1, 1)),
    "several tiles": (2, 4, 64, 8, 8, 80, (3, 3), (1, 1), (1, 1)),
}
TIMED = Path(__file__).parents[2] / "results" / "bench" / "conv-choice.json"
SIZES = list(dict.fromkeys(json.dumps(row["shape"]) for row in json.loads(TIMED.read_text())["passes"]))
"""Shapes whose rules and tiles were chosen by measurement."""


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float = 2e-6) -> None:
    slope = torch.randn_like(found)
    ours = torch.autograd.grad(found, inputs, slope)
    theirs = torch.autograd.grad(expected, inputs, slope.to(expected.dtype))
    for one, other in zip((found, *ours), (expected, *theirs), strict=True):
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


def assert_convolves(shape: Shape, biased: bool, tolerance: float = 2e-6) -> None:
    from aedfl.training import kernels

    n = shape.models
    x = drawn(shape.batch, n * shape.channels, shape.height, shape.width)
    weight, bias = drawn(n, shape.filters, shape.channels, *shape.kernel), drawn(n, shape.filters)
    found = kernels.conv(x, weight, bias if biased else None, shape)
    filters, biases = weight.double().flatten(0, 1), bias.double().flatten() if biased else None
    expected = F.conv2d(x.double(), filters, biases, shape.stride, shape.padding, 1, n)
    assert_same(found, expected, [x, weight, bias] if biased else [x, weight], tolerance)


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case: str, biased: bool) -> None:
    assert_convolves(Shape(*CONVOLUTIONS[case]), biased)


@pytest.mark.parametrize("sizes", SIZES)
def test_convolution_in_tf32_with_the_tiles_chosen_for_it(sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    given: list[Any] = [tuple(size) if isinstance(size, list) else size for size in json.loads(sizes)]
    assert_convolves(replace(Shape(*given), batch=4), True, tolerance=4e-3)


@pytest.mark.parametrize("case", FOR_BANDS)
def test_rows_times_banded_matrices(case: str) -> None:
    assert max(errors(FOR_BANDS[case], BANDS, "cuda").values()) <= 2e-6


@pytest.mark.parametrize("own", [{"forward"}, {"by_input"}, {"by_weight"}, set()], ids=str)
@pytest.mark.parametrize("case", ["strided", "shortcut", "line", "padded"])
def test_convolution_shared_with_the_library(case: str, own: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from aedfl.training import convolution
    from aedfl.training.choice import Tiles

    monkeypatch.setattr(convolution, "choose", lambda which, *_: Tiles(32, 32, 4) if which in own else None)
    assert_convolves(Shape(*CONVOLUTIONS[case]), True)


@pytest.mark.parametrize("size", [(8, 8), (5, 7)])
def test_relu_and_pooling(size: tuple[int, int]) -> None:
    from aedfl.training import kernels

    x = drawn(3, 4, *size)
    assert_same(kernels.relu_pool(x), F.max_pool2d(F.relu(x), 2), [x], tolerance=0.0)


@pytest.mark.parametrize("relu", [True, False])
def test_group_norm(relu: bool) -> None:
    from aedfl.training import kernels

    x, scale, shift = drawn(3, 12, 5, 6), drawn(2, 6), drawn(2, 6)
    expected = F.group_norm(x.double(), 4, scale.double().flatten(), shift.double().flatten())
    found = kernels.group_norm(x, scale, shift, 4, 1e-5, relu)
    assert_same(found, F.relu(expected) if relu else expected, [x, scale, shift])


def test_cross_entropy_counts_present_samples_only() -> None:
    from aedfl.training import kernels

    logits, target = drawn(3, 50, 26), torch.randint(0, 26, (3, 50), device="cuda")
    present = (torch.rand(3, 50, device="cuda") > 0.3).float()
    present[2] = 0
    each = F.cross_entropy(logits.double().flatten(0, 1), target.flatten(), reduction="none").view(3, 50)
    expected = (each * present).sum(1) / present.sum(1).clamp(min=1)
    assert_same(kernels.cross_entropy(logits, target, present), expected, [logits])
    assert kernels.cross_entropy(logits, target, present)[2] == 0


def all_below(found: dict[str, float], most: float) -> bool:
    """An error that is not a number is not small."""
    return all(error < most for error in found.values())


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("case", pixels.CONVOLUTIONS)
def test_convolution_of_channels_side_by_side(case: str, rows: int) -> None:
    tiles = PixelTiles(32, 32, 32, warps=2, stages=2, rows=rows)
    assert all_below(pixels.errors(pixels.CONVOLUTIONS[case], tiles, "cuda"), 2e-6)


@pytest.mark.parametrize("which", ["forward", "by_input", "by_weight"])
@pytest.mark.parametrize("case", pixels.LAYERS)
def test_convolution_in_bf16_with_the_tiles_chosen_for_it(case: str, which: Pass) -> None:
    shape = pixels.LAYERS[case]
    found = pixels.errors(shape, pixel_tiles(which, shape), "cuda", torch.bfloat16)
    assert all_below({name: error for name, error in found.items() if name.startswith(which)}, 1e-2)


def test_gradients_by_weights_in_more_parts_than_are_added_at_a_time() -> None:
    assert all_below(pixels.parted_errors("cuda"), 2e-6)


def test_convolutions_with_a_relu_between_them_and_a_sum_after() -> None:
    assert all_below(pixels.chained_errors("cuda"), 2e-6)


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("case", pixels.NORMS)
def test_norm_of_channels_side_by_side(case: str, relu: bool, join: bool) -> None:
    assert all_below(pixels.norm_errors(pixels.NORMS[case], relu, join, "cuda"), 2e-6)


@pytest.mark.parametrize("size", [(8, 8), (5, 7)])
def test_relu_and_pooling_of_channels_side_by_side(size: tuple[int, int]) -> None:
    assert all_below(pixels.pool_errors(*size, "cuda"), 2e-6)


@pytest.mark.parametrize("sizes", [(1, 40, 300), (3, 5, 7), (2, 1, 5)])
def test_sums_in_order(sizes: tuple[int, int, int]) -> None:
    assert all_below(pixels.sum_errors(sizes, "cuda"), 2e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("plan", descents.PLANS)
def test_steps_in_one_pass_are_those_of_the_plain_path(plan: str, masked: bool) -> None:
    assert all_below(descents.errors(descents.PLANS[plan], masked, "cuda"), 2e-6)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", lines.CASES)
def test_convolution_relu_and_maximum(case: str, turned: bool) -> None:
    for biased in (True, False):
        assert all_below(lines.errors(case, "cuda", turned, biased), 2e-6)


def test_convolution_relu_and_maximum_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left after a large bias is off by more; of nearly equal answers another may win and get the slope."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    found = lines.errors("textcnn", "cuda", turned=True)
    assert found["forward"] < 1e-2
    assert all_below(found, 0.1)


def test_convolution_relu_and_maximum_in_bf16() -> None:
    from aedfl.training.line import line_max

    torch.manual_seed(0)
    x, weight, bias = drawn(2, 3, 50, 100), drawn(2, 32, 50, 4), drawn(2, 32)
    half = x.detach().to(torch.bfloat16).requires_grad_()
    found = line_max(half, weight, bias)
    slope = torch.randn_like(found)
    dx, dw, db = torch.autograd.grad(found, [half, weight, bias], slope)
    assert [part.dtype for part in (found, dx, dw, db)] == [torch.bfloat16] * 2 + [torch.float32] * 2
    exact = lines.plain(half.double(), weight.to(torch.bfloat16).double(), bias.double())
    assert (found.double() - exact).norm() <= 1e-2 * exact.norm()
    by_weight, by_bias = torch.autograd.grad(exact, [weight, bias], slope.double())
    assert (dw - by_weight).norm() <= 0.1 * by_weight.norm()
    assert (db - by_bias).norm() <= 1e-2 * by_bias.norm()


def test_what_is_not_a_number_stays_so() -> None:
    assert lines.broken("cuda") == lines.BROKEN


def test_slopes_of_equal_words_add_up() -> None:
    assert all_below(lines.shared("cuda"), 2e-6)
