"""The layers for images whose channels lie side by side, against PyTorch in double precision; on the CPU by Triton's
interpreter."""

from __future__ import annotations

import json
from itertools import product
from unittest.mock import patch

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
    "gradients in many parts": Shape(1, 1, 16, 26, 26, 16, (3, 3), (1, 1), (1, 1)),
}
# of ResNet-8 and VGG-9
LAYERS = {
    "colours": Shape(2, 4, 3, 32, 32, 16, (3, 3), (1, 1), (1, 1)),
    "16": Shape(2, 4, 16, 32, 32, 16, (3, 3), (1, 1), (1, 1)),
    "16 to 32, strided": Shape(2, 4, 16, 32, 32, 32, (3, 3), (2, 2), (1, 1)),
    "16 to 32, shortcut": Shape(2, 4, 16, 32, 32, 32, (1, 1), (2, 2), (0, 0)),
    "32 to 64": Shape(2, 4, 32, 16, 16, 64, (3, 3), (1, 1), (1, 1)),
    "64": Shape(2, 4, 64, 8, 8, 64, (3, 3), (1, 1), (1, 1)),
    "128": Shape(2, 4, 128, 8, 8, 128, (3, 3), (1, 1), (1, 1)),
}
NORMS = {
    "four groups": (2, 3, 5, 6, 16, 4),
    "one group": (1, 2, 3, 3, 16, 1),
    "in parts": (2, 2, 33, 32, 32, 8),
    "in many parts": (1, 2, 64, 64, 16, 4),
    "blocks of channels": (2, 1, 3, 3, 128, 32),
}


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
        along, back = pixels.laid(shape, weight, dtype, True)
        found = {
            "forward": (pixels.forward(shape, x, along, bias, tiles), exact),
            "forward, ReLU": (pixels.forward(shape, x, along, bias, tiles, relu=True), F.relu(exact)),
            "forward, no bias": (pixels.forward(shape, x, along, None, tiles), exact - given[2][:, None, None, None]),
            "by_weight": (by_weight, dw),
            "by_weight, no bias": (pixels.by_weight(shape, x, slope, False, tiles)[0], dw),
            "by_bias": (by_bias, db),
        }
        if shape.channels % 16 == 0:
            assert back is not None
            found["by_input"] = pixels.by_input(shape, slope, back, tiles), dx
            found["by_input, more"] = pixels.by_input(shape, slope, back, tiles, more=x), dx + x
            found["by_input, gated"] = pixels.by_input(shape, slope, back, tiles, x), torch.where(x > 0, dx, 0.0)
        return {which: _error(*pair) for which, pair in found.items()}


def parted_errors(device: str) -> dict[str, float]:
    """Of gradients by weights that lie in more parts than are added up at a time."""
    from aedfl.training import pixels

    tiles = PixelTiles(32, 32, 32, warps=2, stages=1)
    with patch.object(pixels, "PARTS", 2):
        return errors(CONVOLUTIONS["gradients in many parts"], tiles, device)


def chained_errors(device: str) -> dict[str, float]:
    """Two convolutions with a ReLU between them, which is in the first and closed by the second; weights and biases as
    an evaluation has them, pieces of longer vectors. What comes out is added to what went in, relayed by the first."""
    from aedfl.training import pixels

    torch.manual_seed(0)
    one, two = Shape(2, 2, 16, 5, 6, 32, (3, 3), (1, 1), (1, 1)), Shape(2, 2, 32, 5, 6, 16, (3, 3), (1, 1), (1, 1))
    x = torch.randn(2, 2, 5, 6, 16, device=device, requires_grad=True)
    counts = 32 * 16 * 9, 32, 16 * 32 * 9, 16
    vectors = torch.randn(2, sum(counts) + 1, device=device, requires_grad=True)
    doubles = [part.detach().double().requires_grad_() for part in (x, vectors)]

    def parts(stack: Tensor) -> list[Tensor]:
        cut = stack[:, 1:].split(counts, 1)
        return [cut[0].view(2, 32, 16, 3, 3), cut[1], cut[2].view(2, 16, 32, 3, 3), cut[3]]

    exact_parts = parts(doubles[1])

    def exactly(n: int, image: Tensor) -> Tensor:
        first, bias, second, other = (part[n] for part in exact_parts)
        return F.conv2d(F.relu(F.conv2d(image, first, bias, padding=1)), second, other, padding=1) + image

    first, bias, second, other = parts(vectors)
    middle, relayed = pixels.conv(x, first, bias, one, relu=True)
    found = pixels.conv(middle, second, other, two, gated=True)[0] + relayed
    return _compared(found, _each(doubles[0], exactly), [x, vectors], doubles)


def norm_errors(sizes: tuple[int, ...], relu: bool, join: bool, device: str) -> dict[str, float]:
    from aedfl.training import pixel_layers

    torch.manual_seed(0)
    models, batch, height, width, channels, groups = sizes
    sizes_of_images = models, batch, height, width, channels
    x = (torch.randn(sizes_of_images, device=device) + 5).requires_grad_()  # an offset must not cost digits
    beside = torch.randn(sizes_of_images, device=device, requires_grad=True)
    scale, shift = (torch.randn(models, channels, device=device, requires_grad=True) for _ in range(2))
    inputs = [x, scale, shift, *([beside] if join else ())]
    doubles = [part.detach().double().requires_grad_() for part in inputs]
    exact = _each(doubles[0], lambda n, image: F.group_norm(image, groups, doubles[1][n], doubles[2][n]))
    exact = exact + doubles[3] if join else exact
    found = pixel_layers.group_norm(x, scale, shift, groups, 1e-5, relu, beside if join else None)
    return _compared(found, F.relu(exact) if relu else exact, inputs, doubles)


def shares_norms_out() -> bool:
    """As many channels a program as groups and sums over them allow; none where a group is too large."""
    from aedfl.training.pixel_layers import channels_at_once

    cases = {(64, 8): 64, (16, 4): 16, (512, 32): 64, (512, 1): None, (96, 32): 128, (2048, 32): 64}
    found = {sizes: channels_at_once(*sizes) for sizes in cases}
    return found == cases


def unused(device: str) -> Tensor:
    """The slope by images of which the other use alone leads anywhere."""
    from aedfl.training import pixels

    shape = Shape(1, 1, 16, 3, 3, 16, (3, 3), (1, 1), (1, 1))
    x = torch.randn(1, 1, 3, 3, 16, device=device, requires_grad=True)
    _, images = pixels.conv(x, torch.randn(1, 16, 16, 3, 3, device=device, requires_grad=True), None, shape)
    (slope,) = torch.autograd.grad(images.sum(), x)
    return slope


def pool_errors(height: int, width: int, device: str) -> dict[str, float]:
    from aedfl.training import pixel_layers

    torch.manual_seed(0)
    x = torch.randn(2, 3, height, width, 16, device=device, requires_grad=True)
    double = x.detach().double().requires_grad_()
    exact = _each(double, lambda n, image: F.max_pool2d(F.relu(image), 2))
    return _compared(pixel_layers.relu_pool(x), exact, [x], [double])


def sum_errors(sizes: tuple[int, int, int], device: str) -> dict[str, float]:
    from aedfl.training.pixel_layers import summed

    x = torch.randn(sizes, device=device)
    return {"sum": _error(summed(x), x.double().sum(1))}


def _each(x: Tensor, run) -> Tensor:  # type: ignore[no-untyped-def]
    """What PyTorch does to each model's images, in our order."""
    return torch.stack([run(n, images.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) for n, images in enumerate(x)])


def _compared(found: Tensor, exact: Tensor, inputs: list[Tensor], doubles: list[Tensor]) -> dict[str, float]:
    slope = torch.randn_like(found)
    ours = torch.autograd.grad(found, inputs, slope)
    theirs = torch.autograd.grad(exact, doubles, slope.double())
    pairs = zip((found, *ours), (exact, *theirs), strict=True)
    return {"values" if number == 0 else f"by input {number}": _error(*pair) for number, pair in enumerate(pairs)}


def _error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def interpreted() -> dict[str, dict[str, float]]:
    """All of the above in Triton's interpreter, if `TRITON_INTERPRET=1` was set before Triton was imported."""
    torch.backends.cudnn.allow_tf32 = False
    assert shares_norms_out()
    assert bool((unused("cpu") == 1).all())
    ways = {"": 0, ", row by row": 1, ", all rows": 3}
    cases = product(CONVOLUTIONS.items(), ways.items())
    tiles = PixelTiles(32, 32, 32, warps=2, stages=1)
    found = {name + way: errors(shape, tiles._replace(rows=rows), "cpu") for (name, shape), (way, rows) in cases}
    norms = product(NORMS.items(), (True, False), (True, False))
    for (name, sizes), relu, join in norms:
        found[f"norm, {name}, {relu}, {join}"] = norm_errors(sizes, relu, join, "cpu")
    found |= {f"pool, {size}": pool_errors(*size, "cpu") for size in ((8, 8), (5, 7))}
    found |= {f"sum, {sizes}": sum_errors(sizes, "cpu") for sizes in ((1, 40, 300), (3, 5, 7), (2, 1, 5))}
    return found | {"parted": parted_errors("cpu"), "chained": chained_errors("cpu")}


if __name__ == "__main__":
    print(json.dumps(interpreted()))
