"""The layers for images whose channels lie side by side, against PyTorch in double precision; on the CPU by Triton's
interpreter."""

from __future__ import annotations

import json
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from aedfl.training.choice import PixelTiles, Shape

# models, batch, channels, height, width, filters, kernel, stride, padding
CONVOLUTIONS = {
    "first layer": Shape(2, 2, 3, 8, 9, 16, (3, 3), (1, 1), (1, 1)),
    "as many filters": Shape(2, 3, 16, 6, 5, 16, (3, 3), (1, 1), (1, 1)),
    "twice as many filters": Shape(3, 2, 16, 5, 6, 32, (3, 3), (1, 1), (1, 1)),
    "half as many filters": Shape(2, 2, 64, 4, 4, 32, (3, 3), (1, 1), (1, 1)),
    "strided": Shape(2, 2, 16, 8, 8, 32, (3, 3), (2, 2), (1, 1)),
    "strided, odd sizes": Shape(2, 2, 16, 7, 9, 16, (3, 3), (2, 2), (1, 1)),
    "shortcut": Shape(2, 2, 32, 6, 8, 64, (1, 1), (2, 2), (0, 0)),
    "unequal strides": Shape(1, 2, 16, 9, 6, 16, (3, 3), (2, 1), (0, 1)),
    "no padding": Shape(2, 2, 16, 6, 6, 48, (3, 3), (1, 1), (0, 0)),
    "48 channels": Shape(2, 2, 48, 5, 4, 16, (3, 3), (1, 1), (1, 1)),
}
NORMS = {"four groups": (2, 3, 5, 6, 16, 4), "one group": (1, 2, 3, 3, 16, 1), "in parts": (2, 2, 32, 32, 32, 8)}


def errors(shape: Shape, tiles: PixelTiles, device: str, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """How far each pass is from double precision, relative to the size of its result."""
    from aedfl.training import pixels

    torch.manual_seed(0)
    sizes = (shape.models, shape.filters, shape.channels, *shape.kernel), (shape.models, shape.filters)
    x = torch.randn(shape.models, shape.batch, shape.height, shape.width, shape.channels, device=device, dtype=dtype)
    weight, bias = (torch.randn(size, device=device) for size in sizes)
    given = [part.double().requires_grad_() for part in (x, weight.to(dtype), bias)]
    exact = _each(given[0], lambda n, image: F.conv2d(image, given[1][n], given[2][n], shape.stride, shape.padding))
    slope = torch.randn_like(exact).to(dtype)
    dx, dw, db = torch.autograd.grad(exact, given, slope.double())
    with torch.no_grad():
        by_weight, by_bias = pixels.by_weight(shape, x, slope, True, tiles)
        assert by_bias is not None
        found = {
            "forward": (pixels.forward(shape, x, weight, bias, tiles), exact),
            "forward, no bias": (pixels.forward(shape, x, weight, None, tiles), exact - given[2][:, None, None, None]),
            "by_weight": (by_weight, dw),
            "by_bias": (by_bias, db),
        }
        if shape.channels % 16 == 0:
            found["by_input"] = pixels.by_input(shape, slope, weight, tiles), dx
        return {which: _error(*pair) for which, pair in found.items()}


def norm_errors(sizes: tuple[int, ...], relu: bool, device: str) -> dict[str, float]:
    from aedfl.training import pixels

    torch.manual_seed(0)
    models, batch, height, width, channels, groups = sizes
    x = torch.randn(models, batch, height, width, channels, device=device, requires_grad=True)
    scale, shift = (torch.randn(models, channels, device=device, requires_grad=True) for _ in range(2))
    doubles = [part.detach().double().requires_grad_() for part in (x, scale, shift)]
    exact = _each(doubles[0], lambda n, image: F.group_norm(image, groups, doubles[1][n], doubles[2][n]))
    found = pixels.group_norm(x, scale, shift, groups, 1e-5, relu)
    return _compared(found, F.relu(exact) if relu else exact, [x, scale, shift], doubles)


def pool_errors(height: int, width: int, device: str) -> dict[str, float]:
    from aedfl.training import pixels

    torch.manual_seed(0)
    x = torch.randn(2, 3, height, width, 16, device=device, requires_grad=True)
    double = x.detach().double().requires_grad_()
    exact = _each(double, lambda n, image: F.max_pool2d(F.relu(image), 2))
    return _compared(pixels.relu_pool(x), exact, [x], [double])


def _each(x: Tensor, run) -> Tensor:  # type: ignore[no-untyped-def]
    """What PyTorch does to each model's images, in our order."""
    return torch.stack([run(n, images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) for n, images in enumerate(x)])


def _compared(found: Tensor, exact: Tensor, inputs: list[Tensor], doubles: list[Tensor]) -> dict[str, float]:
    slope = torch.randn_like(found)
    ours = torch.autograd.grad(found, inputs, slope)
    theirs = torch.autograd.grad(exact, doubles, slope.double())
    names = ("values", "by input", "by scale", "by shift")
    pairs = zip((found, *ours), (exact, *theirs), strict=True)
    return {name: _error(*pair) for name, pair in zip(names, pairs, strict=False)}


def _error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


def interpreted() -> dict[str, dict[str, float]]:
    """All of the above in Triton's interpreter, if `TRITON_INTERPRET=1` was set before Triton was imported."""
    torch.backends.cudnn.allow_tf32 = False
    tiles = PixelTiles(32, 32, 32, warps=2, stages=1)
    found = {name: errors(shape, tiles, "cpu") for name, shape in CONVOLUTIONS.items()}
    cases = product(NORMS.items(), (True, False))
    found |= {f"norm, {name}, {relu}": norm_errors(sizes, relu, "cpu") for (name, sizes), relu in cases}
    return found | {f"pool, {size}": pool_errors(*size, "cpu") for size in ((8, 8), (5, 7))}


if __name__ == "__main__":
    print(json.dumps(interpreted()))
