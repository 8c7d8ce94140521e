"""Reinforcement-learning model selection: which cached models take part in a merge (formula rlupdate).

The priority network gives a probability per neighbour, the priority converter turns it into choices,
and REINFORCE moves the network of each device by what the choices did to its loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .network import STEP_FLOPS, Network, Step, align, backward, forward, sigmoid, unpack
from .reduce import norm, slot_sum


class Selection(NamedTuple):
    """choices bool [B, M]; network probabilities float32 [B, M]; log_prob of the choices float32 [B]."""

    choices: Tensor
    probabilities: Tensor
    log_prob: Tensor


@torch.no_grad()
def select(
    theta: Tensor,
    features: Tensor,
    valid: Tensor,
    uniforms: Tensor,
    epsilon: float = 0.05,
    greedy: bool = False,
) -> Selection:
    """The priority network and the priority converter for B devices in one pass over M neighbours.

    theta [B, PARAMETERS], features [B, M, FEATURES], valid bool [B, M] (a model never received cannot
    be chosen and is passed over), uniforms [B, M] in [0, 1), drawn by the caller. Sampling picks a model
    with probability `(1 - epsilon) p + epsilon / 2`; greedy takes p > 0.5 and ignores uniforms and epsilon.
    """
    epsilon = 0.0 if greedy else epsilon
    needed = torch.zeros_like(uniforms) if greedy else _logit_needed(uniforms.double(), epsilon)
    walk = _walk(theta, features, valid, needed)
    probabilities = torch.where(walk.present, sigmoid(walk.logits), 0.0).float()
    log_probs = torch.where(walk.present, _log_prob(walk.logits, walk.choices, epsilon), 0.0)
    count = theta.shape[0]
    return Selection(
        _scatter(walk.choices & walk.present, walk.order)[:count],
        _scatter(probabilities, walk.order)[:count],
        slot_sum(log_probs)[:count].float(),
    )


@torch.no_grad()
def reinforce_step(
    theta: Tensor,
    features: Tensor,
    valid: Tensor,
    choices: Tensor,
    advantage: Tensor,
    lr: float,
    epsilon: float = 0.0,
    max_norm: float = 1.0,
) -> Tensor:
    """Formula rlupdate: `theta - lr * grad log P(choices) * (R - l)` per device: a new [B, PARAMETERS].

    `features`, `valid`, `choices` are those of the selection, `advantage` [B] is `R - l` (of a loss:
    negative is good). With the `epsilon` of the selection the gradient is that of the probabilities sampled
    from; with 0, the paper's. The step before lr is clipped to `max_norm`. Theta stays as it is, bit for bit,
    where the advantage is zero or not finite or no neighbour is valid.
    """
    gradient = log_prob_gradient(theta, features, valid, choices, epsilon)
    length = norm(gradient) * advantage.double().abs()
    clipped = torch.where(length > max_norm, advantage * (max_norm / length), advantage.double())
    factor = torch.where(length.isfinite(), lr * clipped, 0.0)
    return (theta - gradient.mul_(factor.unsqueeze(-1))).to(theta.dtype)


@torch.no_grad()
def log_prob_gradient(theta: Tensor, features: Tensor, valid: Tensor, choices: Tensor, epsilon: float = 0.0) -> Tensor:
    """The gradient of `log P(choices)` by the parameters of each device: float64 [B, PARAMETERS]."""
    dictated = torch.where(choices, -torch.inf, torch.inf)
    walk = _walk(theta, features, valid, dictated)
    slopes = torch.where(walk.present, _log_prob_slope(walk.logits, walk.choices, epsilon), 0.0)
    if not walk.steps:
        return torch.zeros_like(theta, dtype=torch.float64)
    return backward(walk.network, walk.steps, slopes)[: theta.shape[0]]


def selector_flops(neighbours: int) -> int:
    """Floating-point operations of one selection by one device."""
    return neighbours * STEP_FLOPS


def reinforce_flops(neighbours: int) -> int:
    """Floating-point operations of one REINFORCE step: a pass forward and one backward at twice its cost."""
    return 3 * selector_flops(neighbours)


class _Walk(NamedTuple):
    """One pass over the neighbours, the valid ones first; `order` [B, M] says which slot each step was."""

    network: Network
    order: Tensor
    present: Tensor
    logits: Tensor
    choices: Tensor
    steps: list[Step]


def _walk(theta: Tensor, features: Tensor, valid: Tensor, needed: Tensor) -> _Walk:
    """Valid slots move to the front, in order, so that what comes after a device's last one cannot matter."""
    theta, features, valid, needed = _pair(theta.double(), features.double(), valid, needed.double())
    order = (~valid).byte().argsort(dim=1, stable=True)
    present = valid.gather(1, order)
    seen = features.gather(1, order.unsqueeze(-1).expand(features.shape))
    network = align(unpack(theta))
    steps = forward(network, torch.where(present.unsqueeze(-1), seen, 0.0), needed.gather(1, order))
    logits = torch.cat([step.logit for step in steps], 1) if steps else needed
    choices = torch.cat([step.choice for step in steps], 1) if steps else valid
    return _Walk(network, order, present, logits, choices, steps)


def _pair(*tensors: Tensor) -> list[Tensor]:
    """A batch of one goes to another matrix kernel than a larger one and rounds differently: make it two."""
    return [torch.cat([t, t]) if t.shape[0] == 1 else t for t in tensors]


def _scatter(values: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(values).scatter(1, order, values)


def _logit_needed(uniforms: Tensor, epsilon: float) -> Tensor:
    """The logit above which `u < (1 - epsilon) p + epsilon / 2`."""
    return ((uniforms - epsilon / 2) / (1 - epsilon)).clamp(0, 1).logit()


def _log_prob(logits: Tensor, choices: Tensor, epsilon: float) -> Tensor:
    log_prob = logsigmoid(torch.where(choices, logits, -logits))
    return torch.log((1 - epsilon) * log_prob.exp() + epsilon / 2) if epsilon else log_prob


def _log_prob_slope(logits: Tensor, choices: Tensor, epsilon: float) -> Tensor:
    """The derivative of `_log_prob` by the logits."""
    other = sigmoid(torch.where(choices, -logits, logits))
    slope = torch.where(choices, other, -other)
    if not epsilon:
        return slope
    taken = (1 - epsilon) * (1 - other)
    return slope * taken / (taken + epsilon / 2)
