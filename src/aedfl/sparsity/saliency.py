"""What a unit is worth: the paper's two-term saliency of every unit at once (its formula for Delta F_i).

    dF_c = (1 - lambda_g) |dFC_c| / |F| + lambda_g ||dg_c|| / ||g||,    lambda_g = min(1, ||g|| / (C g_max))

`dFC_c` is the change of the loss, `dg_c` that of the gradient, when unit c is set to zero. A fixed number of
products prices every unit, however many there are. F, g and H are taken at the full vector, where pruned
units still have a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aedfl.randomness import torch_seed

from .curvature import Curvature, curvature, rademacher
from .groups import ChannelGroups
from .loss_change import Form, Probes, loss_changes
from .objective import LossFn


class Saliency(NamedTuple):
    """Scores of all units, with the quantities behind them."""

    score: Tensor
    """[count]; the lowest go first."""
    loss_change: Tensor
    gradient_change: Tensor
    loss: Tensor
    gradient_norm: Tensor
    balance: Tensor
    """lambda_g"""


def draw(seed: int, groups: ChannelGroups, samples: int, outputs: int, probes: int = 10, draws: int = 4) -> Probes:
    """Signs for `probes` Hessian products, and `draws` for each sample's outputs; a function of the seed."""
    entries = rademacher(torch_seed(seed, "entries"), (probes, groups.layout.parameters), groups.device)
    signs = rademacher(torch_seed(seed, "outputs"), (draws, samples, outputs), groups.device)
    return Probes(entries, signs)


def saliency(
    loss_fn: LossFn,
    vector: Tensor,
    groups: ChannelGroups,
    probes: Probes,
    largest_gradient: Tensor | float = 0.0,
    form: Form = "gauss_newton",
    control: float = 1.5,
    chunk: int | None = None,
    at: Curvature | None = None,
) -> Saliency:
    """Scores of all units at the full `vector` [size] (or its trainable part).

    `loss_fn` is an `Objective`, or for other forms than "gauss_newton" any function of the parameters.
    `largest_gradient` is the largest gradient norm seen before; g_max takes the present one in as well.
    `control` is the paper's C. `chunk` bounds the products made at once; `at` saves work where it is known
    already. Can be used under `vmap` over devices, except for the form "full".
    """
    m = vector[: groups.layout.parameters]
    at = at or curvature(loss_fn, m, chunk)
    norm, tiny = at.gradient.norm(), torch.finfo(m.dtype).tiny
    largest = torch.maximum(norm, torch.as_tensor(largest_gradient).to(norm))
    balance = (norm / (control * largest).clamp(min=tiny)).clamp(max=1.0)
    products = at.hessian(probes.entries)
    change = loss_changes(loss_fn, at, m, groups, probes, products, form)
    turn = gradient_changes(m, groups, products)
    loss_share = change.abs() / at.loss.abs().clamp(min=tiny)
    score = (1 - balance) * loss_share + balance * turn / norm.clamp(min=tiny)
    return Saliency(score, change, turn, at.loss, norm, balance)


def blend(worth: Tensor, scores: Tensor, view: float) -> Tensor:
    """`worth` [count] with `scores`, scaled to sum 1 so that devices can be compared, taking the share `view` of it.

    Zeros are a worth that is not known yet. Scores of a model that has diverged say nothing.
    """
    tiny = torch.finfo(scores.dtype).tiny
    scaled = scores / scores.sum().clamp(min=tiny)
    mixed = torch.where(worth.sum() > 0, worth + view * (scaled - worth), scaled)
    return torch.where(scaled.isfinite().all(), mixed, worth)


def gradient_changes(m: Tensor, groups: ChannelGroups, products: Tensor) -> Tensor:
    """`||H (m ⊙ 1_c)||` of every unit [count], from products H z [K, P] with random signs z.

    E[((H z) · (m ⊙ 1_c))^2] is its square, so the same products serve all units.
    """
    return (groups.sums(products * m) ** 2).mean(0).sqrt()
