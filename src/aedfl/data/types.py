"""What a data set is: two splits of samples in memory (or memory-mapped), and how rows become model input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation per channel, for pixels scaled to [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """`(x / 255 - mean) / std` in float32, for uint8 x [..., C, H, W] on any device."""
        factor, shift = _affine(self, x.device)
        return x.to(torch.float32, copy=True).mul_(factor).add_(shift)


@lru_cache(maxsize=32)
def _affine(scale: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    """The normalisation as `x * factor + shift`; cached, since a copy to the device stalls it."""
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (scale.mean, scale.std))
    factor, shift = 1 / (255 * std), -mean / std
    return factor.to(device, torch.float32), shift.to(device, torch.float32)


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set, whole in memory or memory-mapped.

    x: [n, ...]: images as uint8 [n, C, H, W], token ids as any integer type, anything else as float32.
    y: [n] int64 labels, or float32 targets [n] or [n, k] for regression.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with what a model must know about it.

    classes: number of labels; None for regression.
    scale: turns uint8 images into model input; None where x is used as it is.
    class_names: one name per label, or empty.
    vocabulary: number of token ids (padding and unknown included); None where x is not token ids.
    """

    name: str
    train: Split
    test: Split
    classes: int | None
    scale: Normalisation | None = None
    class_names: tuple[str, ...] = ()
    vocabulary: int | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample, without the batch."""
        return tuple(self.train.x.shape[1:])

    @property
    def task(self) -> str:
        return "regression" if self.classes is None else "classification"

    def inputs(self, x: Tensor) -> Tensor:
        """Model input for gathered rows of `x`, with any leading dimensions: float32, or int64 token ids."""
        if self.scale is not None:
            return self.scale(x)
        return x if x.is_floating_point() else x.long()
