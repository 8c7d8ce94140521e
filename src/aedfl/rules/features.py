"""What the selector sees of a cached model: numbers of about unit size, finite whatever arrives."""

from __future__ import annotations

import torch
from torch import Tensor

AGE_CAP = 2.0
LOSS_CAP = 2.0


def selector_features(
    used: Tensor,
    staleness: Tensor,
    loss: Tensor,
    own_loss: Tensor,
    valid: Tensor,
    since_merge: Tensor | None = None,
    loss_floor: float = 1e-3,
) -> Tensor:
    """Used before, staleness, loss, and own updates since the last merge: float32 [B, M, FEATURES].

    used, staleness, loss, valid [B, M]; own_loss [B]; since_merge [B], or None where the option is
    off (then 0). Ages are `log2(age)/5` up to `AGE_CAP`; a loss is the log of its ratio to the own one within
    ±`LOSS_CAP`, the worst if it is not finite. Invalid slots are 0.
    """
    since = torch.zeros_like(own_loss) if since_merge is None else since_merge
    columns = [
        used.double(),
        _age(staleness),
        _relative_loss(loss, own_loss, valid, loss_floor),
        _age(since.double() + 1).unsqueeze(-1).expand(used.shape),
    ]
    return torch.where(valid.unsqueeze(-1), torch.stack(columns, -1), 0.0).float()


def _age(age: Tensor) -> Tensor:
    scaled = torch.log2(age.double().clamp(min=1)) / 5
    return torch.where(scaled.isnan(), AGE_CAP, scaled).clamp(max=AGE_CAP)


def _relative_loss(loss: Tensor, own_loss: Tensor, valid: Tensor, floor: float) -> Tensor:
    """Log-ratio to the own loss, or to the neighbours' mean log-loss where the own one is not finite."""
    logs = loss.double().clamp(min=floor).log()
    own = own_loss.double().clamp(min=floor).log()
    reference = torch.where(own.isfinite(), own, _mean(logs, valid & logs.isfinite())).unsqueeze(-1)
    ratio = torch.where(logs.isfinite(), logs - reference, LOSS_CAP)
    return ratio.clamp(-LOSS_CAP, LOSS_CAP)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Mean over the counted slots in slot order, 0 if there is none: [B, M] -> [B]."""
    summed = values.new_zeros(values.shape[0])
    for slot in range(values.shape[1]):
        summed = summed + torch.where(counted[:, slot], values[:, slot], 0.0)
    return summed / counted.sum(1).clamp(min=1)
