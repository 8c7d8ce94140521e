"""Merging on a CPU, and what follows on it, without stacking: a kernel reads each model once, where it lies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..native import library, pointer

Slots = Sequence[Tensor | None]
"""Models (or masks) of one job, the own first; None where there is none."""


def possible(vectors: Sequence[Slots], masks: Sequence[Slots]) -> bool:
    """Whether the kernels can do these jobs: vectors of one size, and masks of it."""
    first = vectors[0][0]
    if first is None or first.device.type != "cpu" or library() is None:
        return False

    def are(jobs: Sequence[Slots], kind: torch.dtype) -> bool:
        there = (tensor for job in jobs for tensor in job if tensor is not None)
        return all(one.dtype == kind and one.shape == first.shape and one.is_contiguous() for one in there)

    return are(vectors, torch.float32) and are(masks, torch.bool)


def merge_each(vectors: Sequence[Slots], masks: Sequence[Slots], weights: Tensor) -> list[Tensor]:
    """`merge` for each job: [P] by P, with the same bits. `weights` [B, M+1] are 0 for slots that are empty."""
    found = []
    for models, kept, shares in zip(vectors, masks, weights.float().unbind(), strict=True):
        assert models[0] is not None
        found.append(merge_one(models, kept, shares, models[0]))
    return found


def merge_one(models: Slots, masks: Slots, weights: Tensor, fallback: Tensor) -> Tensor:
    """One merge; where nobody holds a number, it is that of `fallback`."""
    kernels = library()
    assert kernels is not None, "ask `possible` first"
    merged, weights = torch.empty_like(fallback), weights.contiguous()
    kernels.merge_models(*_models(models, masks, weights, len(merged)), pointer(fallback), pointer(merged))
    return merged


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
        parts, gradient = _models(models, kept, shares, len(gradient)), gradient.contiguous()
        kernels.merge_slopes(*parts, pointer(mean), pointer(gradient), pointer(slopes))
    return weights.double() * found


Way = tuple[Tensor, float, float | None] | None
"""The end of an update, and how often the way there is gone, and gone once more in what is sent (None: not)."""
Pace = tuple[Tensor, Tensor] | None
"""Where slow momentum begins, and its velocity."""


def follow_each(
    jobs: Iterable[tuple[Tensor, Tensor, Tensor, Tensor | None, Way, Pace]], parameters: int, beta: float
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What `Along`, `SlowMomentum` and `Along` once more make of (merged, weights, start, mask, way, pace), with the
    same bits: (vector, velocity, sent), which are the merged model itself where there is neither way nor pace.
    """
    kernels, found = library(), []
    assert kernels is not None, "ask `possible` first"
    for merged, weights, start, mask, way, pace in jobs:
        if way is None and pace is None:
            found.append((merged, merged, merged))
            continue
        end, times, more = way or (None, 0.0, None)
        base, velocity = pace or (None, None)
        vector = torch.empty_like(merged)
        faster = torch.empty_like(merged) if pace else None
        sent = torch.empty_like(merged) if more else None
        kernels.merge_follow(
            ctypes.c_int64(len(merged)), ctypes.c_int64(parameters), pointer(merged), pointer(start), pointer(end),
            ctypes.c_float(times), ctypes.c_float(float(weights[0])), pointer(base), pointer(velocity),
            ctypes.c_float(beta), pointer(mask), ctypes.c_float(more or 0.0), pointer(vector), pointer(faster),
            pointer(sent),
        )  # fmt: skip
        found.append((vector, vector if faster is None else faster, vector if sent is None else sent))
    return found


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
