"""Who computes a convolution of N models on a GPU: a kernel of our own, and in which pieces, or the library.

Decided for each of the three passes, by shape and precision, from measurements. All of it is in `RULES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Pass = Literal["forward", "by_input", "by_weight"]
Precision = Literal["fp32", "tf32", "bf16"]
ALL: tuple[Precision, ...] = ("fp32", "tf32", "bf16")
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


class Rule(NamedTuple):
    """Tiles for convolutions up to a size; None leaves them to the library."""

    tiles: Tiles | None
    filters: int = ANY
    product: int = ANY
    """Channels times filters."""
    models: int = ANY
    precisions: tuple[Precision, ...] = ALL

    def fits(self, shape: Shape, precision: Precision) -> bool:
        small = shape.filters <= self.filters and shape.channels * shape.filters <= self.product
        return small and shape.models <= self.models and precision in self.precisions


RULES: dict[Pass, tuple[Rule, ...]] = {
    "forward": (
        Rule(Tiles(64, 32, warps=2), filters=16, product=32 * 32),
        Rule(Tiles(64, 32, warps=4), product=32 * 32),
    ),
    "by_input": (Rule(Tiles(64, 32, warps=4), product=32 * 32),),
    "by_weight": (
        Rule(Tiles(32, 128, warps=2), filters=16, product=32 * 32),
        Rule(Tiles(32, 128, warps=4), product=32 * 32),
    ),
}
"""The first that fits counts; what fits none is the library's."""


def choose(which: Pass, shape: Shape, precision: Precision) -> Tiles | None:
    """The tiles of our own kernel, or None where the library is to compute this pass."""
    return next((rule.tiles for rule in RULES[which] if rule.fits(shape, precision)), None)
