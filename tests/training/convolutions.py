"""The convolution kernels pass by pass, against PyTorch in double precision; on the CPU by Triton's interpreter."""

from __future__ import annotations

import json

import torch
from torch import Tensor
from torch.nn import functional as F

from aedfl.training.choice import Bands, Shape, Tiles

# models, batch, channels, height, width, filters, kernel, stride, padding
FOR_BANDS = {
    "lenet, first": Shape(2, 2, 1, 28, 28, 6, (5, 5), (1, 1), (0, 0)),
    "lenet, second": Shape(2, 3, 6, 12, 12, 16, (5, 5), (1, 1), (0, 0)),
    "padded": Shape(3, 2, 3, 8, 9, 5, (3, 3), (1, 1), (1, 1)),
    "wide kernel, wide padding": Shape(2, 2, 5, 6, 7, 4, (1, 4), (1, 1), (0, 2)),
    "high kernel, high padding": Shape(2, 2, 5, 7, 6, 4, (4, 3), (1, 1), (2, 0)),
    "rows no multiple of a tile": Shape(2, 7, 2, 9, 11, 3, (3, 2), (1, 1), (1, 0)),
}
"""Strides of 1, which is all that banded matrices can."""
FOR_TILES = {
    "lenet, second": Shape(2, 2, 6, 12, 12, 16, (5, 5), (1, 1), (0, 0)),
    "strided": Shape(2, 2, 16, 8, 8, 20, (3, 3), (2, 2), (1, 1)),
    "shortcut": Shape(2, 2, 17, 6, 7, 40, (1, 1), (2, 2), (0, 0)),
    "line": Shape(1, 2, 20, 1, 20, 32, (1, 4), (1, 1), (0, 0)),
    "filters in several steps": Shape(2, 2, 5, 6, 5, 70, (3, 3), (1, 1), (1, 1)),
}


def errors(shape: Shape, tiles: Tiles | Bands, device: str) -> dict[str, float]:
    """How far each pass is from double precision, relative to the size of its result."""
    from aedfl.training import convolution

    torch.manual_seed(0)
    images = shape.batch, shape.models * shape.channels, shape.height, shape.width
    x, weight, bias = (
        torch.randn(size, device=device, requires_grad=True)
        for size in (
            images,
            (shape.models, shape.filters, shape.channels, *shape.kernel),
            (shape.models, shape.filters),
        )
    )
    exact = F.conv2d(
        x.double(), weight.double().flatten(0, 1), bias.double().flatten(), shape.stride, shape.padding, 1, shape.models
    )
    slope = torch.randn_like(exact, dtype=torch.float32)
    dx, dw, db = torch.autograd.grad(exact, (x, weight, bias), slope.double())
    with torch.no_grad():
        found = {"forward": (convolution.forward(shape, x, weight, bias, tiles), exact)}
        unbiased = exact - bias.double().flatten()[:, None, None]
        found["forward, no bias"] = convolution.forward(shape, x, weight, None, tiles), unbiased
        found["by_input"] = convolution.by_input(shape, slope, weight, tiles), dx
        if isinstance(tiles, Tiles):
            by_weight, by_bias = convolution.by_weight(shape, x, slope, True, tiles)
            assert by_bias is not None
            found |= {"by_weight": (by_weight.view_as(dw), dw), "by_bias": (by_bias.view_as(db), db)}
        return {which: _error(*pair) for which, pair in found.items()}


def _error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def interpreted() -> dict[str, dict[str, float]]:
    """All of the above in Triton's interpreter, if `TRITON_INTERPRET=1` was set before Triton was imported."""
    torch.backends.cudnn.allow_tf32 = False
    bands, tiles = Bands(32, 32, 64, warps=2, stages=1), Tiles(64, 32, warps=2, stages=1)
    found = {f"bands, {name}": errors(shape, bands, "cpu") for name, shape in FOR_BANDS.items()}
    return found | {f"tiles, {name}": errors(shape, tiles, "cpu") for name, shape in FOR_TILES.items()}


if __name__ == "__main__":
    print(json.dumps(interpreted()))
