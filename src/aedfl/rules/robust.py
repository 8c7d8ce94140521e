"""Merging that survives a few bad models; options beside the weighted mean, none of them the default.

`others` [B, M, P] are cached models, `valid` [B, M] says which slots hold one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reduce import dot, norm


def clip_norms(own: Tensor, others: Tensor, factor: float) -> Tensor:
    """Pulls every other model towards the own one until `||x_j - own|| <= factor * ||own||`.

    own [B, P], others [B, M, P] -> [B, M, P]. A model with a value that is not finite becomes the own one.
    """
    limit = factor * norm(own)
    return torch.stack([_clip(own, other, limit) for other in others.unbind(1)], 1)


def trimmed_mean(vectors: Tensor, valid: Tensor, trim: float = 0.1) -> Tensor:
    """Per parameter, the mean without the `floor(trim * count)` lowest and as many highest values.

    vectors [B, K, P], valid [B, K] -> [B, P]; values that are not finite count as absent, and a
    parameter without any value is 0. `trim` is a share below 1/2.
    """
    ordered, count = _ordered(vectors, valid)
    cut = (trim * count.double()).floor().long()
    summed = torch.zeros_like(ordered[:, 0])
    for rank in range(ordered.shape[1]):
        kept = (rank >= cut) & (rank < count - cut)
        summed += torch.where(kept, ordered[:, rank], 0.0)
    return summed / (count - 2 * cut).clamp(min=1)


def coordinate_median(vectors: Tensor, valid: Tensor) -> Tensor:
    """Per parameter, the median (mean of the middle two if even): shapes and gaps as in `trimmed_mean`."""
    ordered, count = _ordered(vectors, valid)
    last = ordered.shape[1] - 1
    low = ((count - 1) // 2).clamp(0, last).unsqueeze(1)
    high = (count // 2).clamp(0, last).unsqueeze(1)
    middle = ordered.gather(1, low) * 0.5 + ordered.gather(1, high) * 0.5
    return torch.where(count > 0, middle.squeeze(1), 0.0)


def cosine_filter(own: Tensor, others: Tensor, valid: Tensor, threshold: float = 0.0) -> Tensor:
    """Which cached models point the own way: cosine with own [B, P] at least `threshold` -> bool [B, M].

    Whole models are nearly parallel; to compare directions of training, pass changes from a common reference.
    """
    length = norm(own)
    keep = []
    for slot, other in enumerate(others.unbind(1)):
        scale = length * norm(other)
        cosine = torch.where(scale == 0, 0.0, dot(own, other) / scale)
        keep.append(valid[:, slot] & (cosine >= threshold))
    return torch.stack(keep, 1) if keep else torch.zeros_like(valid)


def _clip(own: Tensor, other: Tensor, limit: Tensor) -> Tensor:
    shift = other - own
    length = norm(shift)
    scale = torch.where(length > limit, limit / length, 1.0).to(own.dtype).unsqueeze(-1)
    return own + torch.where(length.isfinite().unsqueeze(-1), shift * scale, 0.0)


def _ordered(vectors: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Values in ascending order with the absent ones last as infinity, and how many are present: [B, P]."""
    present = valid.unsqueeze(-1) & vectors.isfinite()
    ordered, _ = torch.where(present, vectors, torch.inf).sort(1)
    return ordered, present.sum(1)
