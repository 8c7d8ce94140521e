"""Dynamic weight update: how much each model counts in a merge, and how that is learned.

Slot 0 of every [B, M+1] tensor is the device itself, slots 1 … M are its neighbours. Formula names
are the labels of the AEDFL paper's dynamic weight update section.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .merge import merge
from .reduce import add_slots, slot_sum, total

Derivative = Literal["paper", "exact"]
Step = Literal["exponentiated", "raw"]

# Below this share a float32 product loses its digits; such a model takes no part in the merge.
NEGLIGIBLE = 1e-20


def staleness(t_now: Tensor, t_arrival: Tensor) -> Tensor:
    """Receiver-side age `max(1, t_i - t_j)` in local updates: [B], [B, M] -> float64 [B, M]."""
    return (t_now.unsqueeze(-1) - t_arrival).clamp(min=1).double()


def own_staleness(since_merge: Tensor, counted: bool) -> Tensor:
    """The own model's age [B]: 1, or, when `counted`, 1 + own updates since anything was merged."""
    age = since_merge.double().clamp(min=0) + 1
    return age if counted else torch.ones_like(age)


def importance(
    samples: Tensor, control: Tensor, staleness: Tensor, loss: Tensor, loss_floor: float = 1e-3, power: float = 1.0
) -> Tensor:
    """Formula importanceDef, `s * lambda / (sqrt(dt) * loss)`, in float64 and always finite; or by a power of the loss.

    All arguments [B, M+1]. A loss or an age that is not finite counts as the worst there is: importance 0.
    """
    age = staleness.double().clamp(min=1)
    raw = samples.double() * control.double() / (age.sqrt() * loss.double().clamp(min=loss_floor) ** power)
    return torch.where(loss.isfinite() & raw.isfinite() & (raw > 0), raw, 0.0)


def normalise(importance: Tensor, chosen: Tensor) -> Tensor:
    """Formula weightDef: weights [B, M+1] that sum to 1 over the device itself and the `chosen` [B, M].

    Where nobody has any importance, the device keeps its own model.
    """
    itself = torch.ones(chosen.shape[0], 1, dtype=torch.bool, device=chosen.device)
    raw = torch.where(torch.cat([itself, chosen], 1), importance.double(), 0.0)
    largest = raw.amax(1, keepdim=True)
    raw = torch.where(largest > 0, raw / largest, _one_hot(raw))
    weights = raw / slot_sum(raw).unsqueeze(1)
    return torch.where(weights < NEGLIGIBLE, 0.0, weights)


@torch.no_grad()
def control_gradient(
    gradient: Tensor,
    vectors: Tensor,
    weights: Tensor,
    control: Tensor,
    masks: Tensor | None = None,
    merged: Tensor | None = None,
    kind: Derivative = "paper",
) -> Tensor:
    """Derivative of the loss by every control parameter lambda: float64 [B, M+1], 0 where no part was taken.

    `gradient` [B, G] is that of the merged model; G may be shorter than P when buffers follow the
    parameters. `vectors`, `masks` [B, M+1, P] and `weights` [B, M+1] are those of the merge,
    `merged` [B, P] its result (computed here if absent), `control` the lambdas of that merge.

    "paper" is formula derivative: only the term of the weight itself, `(1 - w_j) w_j / lambda_j * g·m_j`.
    "exact" is the whole derivative, per parameter `w_j o_jp / S_p * (x_jp - merged_p) / lambda_j` with
    `S_p = sum_k w_k o_kp`. Both are written in normalised weights: `c_j / S = w_j / lambda_j`.
    """
    vectors = vectors[..., : gradient.shape[1]]
    masks = None if masks is None else masks[..., : gradient.shape[1]]
    if kind == "paper":
        slopes = _paper_slopes(gradient, vectors, weights, masks)
    else:
        merged = merge(vectors, masks, weights) if merged is None else merged[:, : gradient.shape[1]]
        slopes = _exact_slopes(gradient, vectors, weights, masks, merged)
    return slopes / control.double()


def control_step(
    control: Tensor,
    gradient: Tensor,
    rate: float,
    mode: Step = "exponentiated",
    low: float = 0.1,
    high: float = 10.0,
) -> Tensor:
    """Formula control: the next lambdas [B, M+1], in the dtype of `control`.

    "exponentiated": `lambda * exp(-rate * grad / max|grad|)` within [low, high], the largest taken per
    device. "raw": the paper's `lambda - rate * grad`, kept above `low`. A gradient not finite counts as 0.
    """
    slope = torch.where(gradient.isfinite(), gradient.double(), 0.0)
    if mode == "raw":
        return (control.double() - rate * slope).clamp(min=low).to(control.dtype)
    largest = slope.abs().amax(1, keepdim=True)
    direction = torch.where(largest > 0, slope / largest, 0.0)
    return (control.double() * torch.exp(-rate * direction)).clamp(low, high).to(control.dtype)


def control_flops(models: int, parameters: int) -> int:
    """Floating-point operations of one `control_gradient` over `models` models."""
    return 4 * models * parameters


def _paper_slopes(gradient: Tensor, vectors: Tensor, weights: Tensor, masks: Tensor | None) -> Tensor:
    held = torch.where(_held(weights, masks), vectors, vectors.new_zeros(()))
    shares = weights.double()
    return shares * (1 - shares) * total(held.mul_(gradient.unsqueeze(1)))


def _exact_slopes(gradient: Tensor, vectors: Tensor, weights: Tensor, masks: Tensor | None, merged: Tensor) -> Tensor:
    holders = _holders(vectors, weights, masks)
    per_weight = torch.where(holders > 0, gradient / holders, 0.0)
    apart = vectors - merged.unsqueeze(1)
    torch.where(_held(weights, masks), apart, apart.new_zeros(()), out=apart)
    return weights.double() * total(apart.mul_(per_weight.unsqueeze(1)))


def _holders(vectors: Tensor, weights: Tensor, masks: Tensor | None) -> Tensor:
    """`S_p`: the summed weight of the models that hold each parameter, [B, P], or [B, 1] without masks."""
    weights = weights.to(vectors.dtype)
    if masks is None:
        return add_slots(weights.clone()).unsqueeze(1)
    return add_slots(weights.unsqueeze(-1) * masks)


def _held(weights: Tensor, masks: Tensor | None) -> Tensor:
    """Where a model with weight holds a parameter: [B, M+1, P], or [B, M+1, 1] without masks."""
    taking_part = weights.unsqueeze(-1) > 0
    return taking_part if masks is None else taking_part & masks


def _one_hot(values: Tensor) -> Tensor:
    only_self = torch.zeros_like(values)
    only_self[:, 0] = 1
    return only_self
