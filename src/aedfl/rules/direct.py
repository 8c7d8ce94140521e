"""Merging on a CPU without stacking: a kernel reads each model once, where it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..native import library, pointer

Slots = Sequence[Tensor | None]
"""Models (or masks) of one job, the own first; None where there is none."""


def possible(vectors: Sequence[Slots], masks: Sequence[Slots]) -> bool:
    """Whether the kernels can do these jobs; all tensors lie on the device of the first."""
    first = vectors[0][0]
    if first is None or first.device.type != "cpu" or library() is None:
        return False
    there = (tensor for job in (*vectors, *masks) for tensor in job if tensor is not None)
    return all(tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.bool) for tensor in there)


def merge_each(vectors: Sequence[Slots], masks: Sequence[Slots], weights: Tensor) -> list[Tensor]:
    """`merge` for each job: [P] by P, with the same bits. `weights` [B, M+1] are 0 for slots that are empty."""
    kernels, found = library(), []
    assert kernels is not None, "ask `possible` first"
    for models, kept, shares in zip(vectors, masks, weights.float().unbind(), strict=True):
        assert models[0] is not None
        merged = torch.empty_like(models[0])
        kernels.merge_models(*_models(models, kept, shares, len(merged)), pointer(merged))
        found.append(merged)
    return found


def slopes_each(
    gradients: Iterable[Tensor],
    vectors: Sequence[Slots],
    masks: Sequence[Slots],
    weights: Tensor,
    merged: Iterable[Tensor],
) -> Tensor:
    """The exact derivative of `control_gradient`, times the control parameters: float64 [B, M+1]."""
    kernels, found = library(), torch.zeros(weights.shape, dtype=torch.float64)
    assert kernels is not None, "ask `possible` first"
    jobs = zip(gradients, vectors, masks, weights.float().unbind(), merged, found.unbind(), strict=True)
    for gradient, models, kept, shares, mean, slopes in jobs:
        parts = _models(models, kept, shares, len(gradient))
        kernels.merge_slopes(*parts, pointer(mean), pointer(gradient.contiguous()), pointer(slopes))
    return weights.double() * found


def _models(models: Slots, kept: Slots, shares: Tensor, size: int) -> tuple[object, ...]:
    count = len(models)
    array = ctypes.c_void_p * count
    return (
        ctypes.c_int64(size),
        ctypes.c_int64(count),
        array(*[pointer(model).value for model in models]),
        array(*[pointer(mask).value for mask in kept]),
        pointer(shares),
    )
