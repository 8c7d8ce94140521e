"""Who computes a convolution of N models on a GPU: a kernel of our own, and in which pieces, or the library.

Decided for each of the three passes, by shape and precision, from measurements (`results/bench/conv-choice.json`, one
H200). All of it is in `RULES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Pass = Literal["forward", "by_input", "by_weight"]
Precision = Literal["fp32", "tf32", "bf16"]
ALL: tuple[Precision, ...] = ("fp32", "tf32", "bf16")
TF32: tuple[Precision, ...] = ("tf32",)
BF16: tuple[Precision, ...] = ("bf16",)
SHORT: tuple[Precision, ...] = ("tf32", "bf16")
ANY = 1 << 30


@dataclass(frozen=True)
class Shape:
    """What a convolution of N models looks like; images are [batch, N * channels, height, width]."""

    models: int
    batch: int
    channels: int
    height: int
    width: int
    filters: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        return (self.height + 2 * ph - kh) // sh + 1, (self.width + 2 * pw - kw) // sw + 1

    @property
    def sizes(self) -> dict[str, int]:
        """The compile-time constants of the kernels."""
        oh, ow = self.out
        return {
            "C": self.channels, "H": self.height, "W": self.width, "F": self.filters, "OH": oh, "OW": ow,
            "KH": self.kernel[0], "KW": self.kernel[1], "SH": self.stride[0], "SW": self.stride[1],
            "PH": self.padding[0], "PW": self.padding[1],
        }  # fmt: skip


class Tiles(NamedTuple):
    """The pieces in which a kernel of our own works."""

    positions: int
    """Positions of an image that a program takes at once."""
    patch: int
    """Numbers of a patch that it takes at once (at most, in the gradient by the weights)."""
    warps: int
    stages: int = 3
    """Loads under way at once."""


class Bands(NamedTuple):
    """The pieces in which image rows are multiplied with banded matrices."""

    rows: int
    patch: int
    """Numbers of a row that a program takes at once."""
    columns: int
    """Numbers of a row of the result that it makes."""
    warps: int
    stages: int = 3


class Rule(NamedTuple):
    """Tiles for convolutions of a kind, up to a size; None leaves them to the library."""

    tiles: Tiles | Bands | None
    kernel: tuple[int, int] | None = None
    line: bool | None = None
    """A kernel over a line, wider than 1, or not."""
    strided: bool | None = None
    equal: bool | None = None
    """As many filters as channels, or not."""
    least: int = 1
    """Channels, at least."""
    filters: int = ANY
    product: int = ANY
    """Channels times filters."""
    pixels: int = ANY
    """Of the input, were it as high and wide as its longer side: banded matrices grow with the square of it."""
    models: int = ANY
    precisions: tuple[Precision, ...] = ALL

    def fits(self, shape: Shape, precision: Precision) -> bool:
        kind = self.kernel in (None, shape.kernel) and self.strided in (None, shape.stride != (1, 1))
        wide = shape.channels * shape.filters <= self.product and shape.filters <= self.filters
        small = max(shape.height, shape.width) ** 2 <= self.pixels and shape.models <= self.models
        kind = kind and self.equal in (None, shape.channels == shape.filters)
        kind = kind and self.line in (None, shape.kernel[0] == 1 < shape.kernel[1])
        return kind and wide and small and shape.channels >= self.least and precision in self.precisions


POINT, SQUARE, LARGE = (1, 1), (3, 3), (5, 5)
BANDS = Bands(32, 32, 128, warps=4)
SMALL = 32 * 32
"""Up to this product of channels and filters the kernels of our own take what was not measured."""
RULES: dict[Pass, tuple[Rule, ...]] = {
    "forward": (
        Rule(Tiles(64, 32, warps=4), POINT),
        Rule(None, SQUARE, strided=False, least=16, product=16 * 16, models=50, precisions=TF32),
        Rule(Tiles(64, 32, warps=4, stages=1), SQUARE, strided=False, least=16, product=16 * 16, precisions=TF32),
        Rule(Tiles(128, 32, warps=4), SQUARE, strided=False, least=64, product=64 * 64, pixels=8 * 8, precisions=TF32),
        Rule(None, SQUARE, strided=False, equal=True, least=16, precisions=SHORT),
        Rule(Tiles(128, 32, warps=4), SQUARE, strided=True, product=32 * 64, precisions=SHORT),
        Rule(Tiles(128, 32, warps=4), SQUARE, product=SMALL, precisions=TF32),
        Rule(BANDS, LARGE, strided=False, least=3, filters=8, product=6 * 16, pixels=32 * 32, precisions=TF32),
        Rule(Tiles(64, 32, warps=2, stages=1), LARGE, filters=16, product=SMALL, precisions=TF32),
        Rule(Tiles(64, 32, warps=2, stages=1), line=True, product=64 * 64, precisions=TF32),
        Rule(Tiles(64, 32, warps=2), filters=16, product=SMALL),
        Rule(Tiles(64, 32, warps=4), product=SMALL),
    ),
    "by_input": (
        Rule(Tiles(128, 32, warps=4), POINT, product=16 * 32, precisions=TF32),
        Rule(Tiles(256, 32, warps=4, stages=2), POINT, product=16 * 32, precisions=BF16),
        Rule(Tiles(64, 32, warps=4), POINT),
        Rule(Tiles(256, 16, warps=8), SQUARE, strided=False, least=32, product=32 * 64, precisions=SHORT),
        Rule(None, SQUARE, equal=True, least=16, precisions=SHORT),
        Rule(None, SQUARE, strided=True, least=16, precisions=SHORT),
        Rule(Tiles(256, 32, warps=4, stages=2), SQUARE, least=16, product=SMALL, precisions=BF16),
        Rule(BANDS, LARGE, strided=False, product=6 * 16, pixels=16 * 16, precisions=TF32),
        Rule(Tiles(64, 32, warps=2, stages=1), line=True, product=64 * 64, precisions=TF32),
        Rule(Tiles(64, 32, warps=2, stages=1), product=SMALL, precisions=TF32),
        Rule(Tiles(64, 32, warps=4), product=SMALL),
    ),
    "by_weight": (
        Rule(Tiles(32, 128, warps=4), POINT),
        Rule(None, SQUARE, strided=False, equal=True, least=16, precisions=SHORT),
        Rule(Tiles(64, 64, warps=4), SQUARE, strided=True, least=16, filters=32, product=SMALL, precisions=TF32),
        Rule(Tiles(32, 64, warps=4, stages=2), SQUARE, strided=True, least=16, product=32 * 64, precisions=SHORT),
        Rule(Tiles(32, 64, warps=2), LARGE, least=6, filters=16, product=SMALL, precisions=TF32),
        Rule(Tiles(32, 128, warps=4), line=True, product=64 * 64, precisions=TF32),
        Rule(Tiles(32, 128, warps=2), filters=16, product=SMALL),
        Rule(Tiles(32, 128, warps=4), product=SMALL),
    ),
}
"""The first that fits counts; what fits none is the library's.

In full precision the library takes 25 times as long as the kernels of our own (5,306 µs against 200, 32 to 32 channels
at 16x16), so that it keeps to sizes alone; so does bf16 where it was not measured, but for 1x1, where the library goes
model by model. As many filters as channels is what the library is good at; with twice as many (VGG-9) it halved the
speed of a step. Forward, 16 to 16 channels: the library wins with 20 models, ours with 100; 50 lies between them.
Forward in bf16 was measured for the library only: ours is taken where its time in TF32 is no longer than that.
"""


def choose(which: Pass, shape: Shape, precision: Precision) -> Tiles | Bands | None:
    """The tiles of our own kernel, or None where the library is to compute this pass."""
    return next((rule.tiles for rule in RULES[which] if rule.fits(shape, precision)), None)


FEWEST = 32
"""Positions of an image that a program takes at once, at least."""


class PixelTiles(NamedTuple):
    """The pieces in which kernels work on images whose channels lie side by side."""

    positions: int
    """Positions of an image that a program takes at once."""
    inner: int
    """Most numbers that are multiplied and added up at once; in the gradient by the weights, most of a patch."""
    others: int
    """Most filters (in the gradient by the input: channels) that a program makes."""
    warps: int
    stages: int = 3
    rows: int = 0
    """Rows of the kernel that a program has, each as one operand; 0: it goes from position to position."""


    def within(self, most: int, each: int, besides: int = 0) -> PixelTiles:
        """Fewer stages, then fewer positions, until what all stages read fits into so many bytes of shared memory:
        `each` for a position, and `besides`."""
        if self.stages * (self.positions * each + besides) <= most:
            return self
        if self.stages > 2:
            return self._replace(stages=self.stages - 1).within(most, each, besides)
        if self.positions > FEWEST:
            return self._replace(positions=self.positions // 2).within(most, each, besides)
        return self._replace(stages=1)


def pixel_tiles(which: Pass, shape: Shape) -> PixelTiles:
    """The fastest, or nearly, of those measured by `bench/pixels.py` on one H200 in bf16."""
    strided, narrow = shape.stride != (1, 1), min(shape.channels, shape.filters) < 64
    if which == "by_weight":
        return _weight_tiles(shape)
    if which == "by_input" and strided:
        return PixelTiles(128, 64, 64, warps=4, stages=1 if shape.filters <= 32 or shape.kernel == (1, 1) else 2)
    return PixelTiles(128, 64, 64, warps=4) if narrow else PixelTiles(128, 64, 128, warps=8)


def _weight_tiles(shape: Shape) -> PixelTiles:
    if shape.channels < 16 or shape.kernel[1] == 1:
        return PixelTiles(128, 64, 64, warps=4, stages=2)
    if shape.channels == 16:
        return PixelTiles(64, 64, 64, warps=4, stages=2, rows=3)
    if shape.channels == 32:
        return PixelTiles(64, 64, 64, warps=4, rows=1)
    return PixelTiles(64, 64, 128, warps=8) if shape.filters >= 128 else PixelTiles(128, 64, 64, warps=4, stages=2)
