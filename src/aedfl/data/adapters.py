"""A user's own data as splits: arrays, a PyTorch data set, a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from ..errors import UserError
from .types import Dataset, Normalisation, Split

_CHANNELS = (1, 3, 4)


def as_split(data: Any, *, features: Sequence[str] | str | None = None, target: str | None = None) -> Split:
    """`data` as one split: a `Split`, a pair (x, y) of arrays or tensors, a map-style data set of (x, y)
    pairs, or the path of a Parquet file, for which alone `features` and `target` name columns.

    uint8 images may also come as [n, H, W] or [n, H, W, C]. Other integers are token ids, never scaled.
    """
    if isinstance(data, str | os.PathLike):
        from .tables import read_table

        x, y = read_table(Path(data), [features] if isinstance(features, str) else features, target)
    elif isinstance(data, Split):
        x, y = data.x, data.y
    elif isinstance(data, TensorDataset) and len(data.tensors) == 2:
        x, y = data.tensors
    elif isinstance(data, tuple | list) and len(data) == 2:
        x, y = data
    else:
        x, y = _from_pairs(data)
    return _checked(_inputs(_tensor(x, "x")), _targets(_tensor(y, "y")))


def from_user(
    train: Any,
    test: Any,
    classes: int | None = None,
    *,
    name: str = "custom",
    features: Sequence[str] | str | None = None,
    target: str | None = None,
    class_names: Sequence[str] = (),
) -> Dataset:
    """A data set of two things that `as_split` takes. Integer y is classification, float y is regression.

    classes: the number of labels where not all of them occur; otherwise one more than the largest label.
    """
    first, second = (as_split(data, features=features, target=target) for data in (train, test))
    if first.x.shape[1:] != second.x.shape[1:] or first.x.dtype != second.x.dtype:
        raise UserError(f"training inputs are {_kind(first.x)} each, but test inputs are {_kind(second.x)}")
    number = _classes(first.y, second.y, classes)
    scale = _normalisation(first.x) if first.x.dtype == torch.uint8 else None
    ids = not first.x.is_floating_point() and scale is None
    vocabulary = 1 + int(max(first.x.max(), second.x.max())) if ids else None
    return Dataset(name, first, second, number, scale, tuple(class_names), vocabulary)


def _from_pairs(data: Any) -> tuple[Any, Any]:
    """All (x, y) pairs of a map-style data set, stacked."""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(
            f"data of type {type(data).__name__} cannot be used: give (x, y) arrays, a map-style data set of "
            "(x, y) pairs, or the path of a Parquet file"
        )
    xs, ys = [], []
    for number in range(len(data)):
        pair = data[number]
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise UserError(f"sample {number} of {type(data).__name__} is not a pair (x, y)")
        xs.append(_tensor(pair[0], "x"))
        ys.append(_tensor(pair[1], "y"))
    try:
        return torch.stack(xs), torch.stack(ys)
    except RuntimeError as error:
        raise UserError(f"the samples of {type(data).__name__} do not all have one shape") from error


def _tensor(value: Any, what: str) -> Tensor:
    """A tensor that shares memory where it can; pictures and numbers are taken too."""
    if isinstance(value, Tensor):
        return value.detach()
    try:
        array = np.asarray(value)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} of type {type(value).__name__} cannot be turned into an array") from error


def _inputs(x: Tensor) -> Tensor:
    """uint8 images as [n, C, H, W], integers as they are, everything else as float32."""
    if x.dtype == torch.uint8 and x.dim() == 3:
        return x.unsqueeze(1)
    if x.dtype == torch.uint8 and x.dim() == 4:
        last = x.shape[3] in _CHANNELS and x.shape[1] not in _CHANNELS
        return x.permute(0, 3, 1, 2).contiguous() if last else x
    if x.is_floating_point() or x.dtype in (torch.bool, torch.uint8):
        return x.to(torch.float32)
    return x


def _targets(y: Tensor) -> Tensor:
    """[n] int64, or float32 with a trailing dimension of one removed."""
    y = y.squeeze(1) if y.dim() == 2 and y.shape[1] == 1 else y
    return y.to(torch.float32) if y.is_floating_point() else y.to(torch.int64)


def _checked(x: Tensor, y: Tensor) -> Split:
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y):
        raise UserError(f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}: the first sizes must be equal")
    if len(y) == 0:
        raise UserError("the data have no samples")
    if y.dim() > (2 if y.is_floating_point() else 1):
        raise UserError(
            f"y has shape {tuple(y.shape)}: each sample needs one label or a row of float targets"
        )
    for values, what in ((x, "x"), (y, "y")):
        if values.is_floating_point() and not torch.isfinite(values).all():
            raise UserError(f"{what} holds values that are not finite numbers")
    if not y.is_floating_point() and y.min() < 0:
        raise UserError(f"labels must be 0 or more, found {int(y.min())}")
    return Split(x, y)


def _classes(train: Tensor, test: Tensor, classes: int | None) -> int | None:
    if train.is_floating_point() != test.is_floating_point():
        raise UserError("y must be integer labels in both splits, or float targets in both")
    if train.is_floating_point():
        if classes is not None:
            raise UserError(f"classes = {classes}, but y holds float targets: labels must be integers")
        return None
    largest = int(max(train.max(), test.max()))
    if classes is not None and largest >= classes:
        raise UserError(f"classes = {classes}, but y holds the label {largest}: labels start from 0")
    return largest + 1 if classes is None else classes


def _normalisation(images: Tensor) -> Normalisation:
    """From counts of the 256 values, which is exact and needs no float copy of the images."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).double()
        centre = (counts * levels).sum() / counts.sum()
        spread = ((counts * (levels - centre) ** 2).sum() / counts.sum()).sqrt().item()
        mean.append(centre.item())
        std.append(spread or 1.0)
    return Normalisation(tuple(mean), tuple(std))


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape[1:])}"
