"""The change of the loss when a unit is set to zero, `dFC_c` = 1/2 m_c' H_cc m_c - g_c · m_c.

The forms differ in how they come by the quadratic term:

- "gauss_newton": the loss' curvature along the slopes of the outputs, plus g_c · m_c. The sum is exact where
  a unit acts as its incoming weights times its outgoing ones and all else is piecewise linear, as in networks
  of ReLU and maximum pooling: scaling both sides by s scales what the unit adds by s^2, and what the
  Gauss-Newton matrix leaves out of the Hessian is just the gradient's term. A few slopes per sample are
  enough, each a sixth of a Hessian product: their errors average out over the samples.
- "trace" (HAP): the unit's mean curvature tr(H_cc)/|c| times ||m_c||^2; wants about 100 probes.
- "unbiased": (z_c · m_c)((H z)_c · m_c), whose mean is right and whose variance is large.
- "exact": one Hessian product per unit.
- "full": the other parameters adapt as well, the paper's whole expression; for small models (see `adapted`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from aedfl.errors import UserError

from .curvature import Curvature
from .gates import unit_slopes
from .groups import ChannelGroups
from .minres import minres
from .objective import LossFn, Objective

Form = Literal["gauss_newton", "trace", "unbiased", "exact", "full"]
FORMS: tuple[str, ...] = get_args(Form)
CHUNK = 16
"""Vectors of the size of the model that are worked on at once, where there are many."""


class Probes(NamedTuple):
    """The random signs behind one set of scores."""

    entries: Tensor
    """[K, parameters]: for products with the Hessian."""
    outputs: Tensor
    """[K', samples, outputs]: for the form "gauss_newton"."""


def loss_changes(
    loss_fn: LossFn,
    at: Curvature,
    m: Tensor,
    groups: ChannelGroups,
    probes: Probes,
    products: Tensor,
    form: Form,
) -> Tensor:
    """`dFC_c` of every unit [count] at the parameters `m` [P]; `products` [K, P] are H `probes.entries`."""
    if form == "full":
        return adapted(at, m, groups)
    slope = groups.sums(at.gradient * m)
    if form == "gauss_newton":
        return 0.5 * (gauss_newton(loss_fn, m, groups, probes.outputs) + slope) - slope
    return 0.5 * _quadratic(at, m, groups, probes.entries, products, form) - slope


def _quadratic(at: Curvature, m: Tensor, groups: ChannelGroups, probes: Tensor, products: Tensor, form: Form) -> Tensor:
    """m_c' H_cc m_c of every unit, from products with the Hessian."""
    if form == "unbiased":
        return (groups.sums(probes * m) * groups.sums(products * m)).mean(0)
    if form == "trace":
        return groups.sums(probes * products).mean(0) / groups.sizes * groups.sums(m**2)
    if form == "exact":
        return torch.cat([(at.hessian(part) * part).sum(-1) for part in alone(m, groups)])
    raise UserError(f"form = {form!r} is not known; allowed are {', '.join(FORMS)}")


def gauss_newton(loss_fn: LossFn, m: Tensor, groups: ChannelGroups, signs: Tensor) -> Tensor:
    """(m ⊙ 1_c)' J' L J (m ⊙ 1_c) of every unit: J the outputs' Jacobian, L the loss' Hessian in the outputs.

    With random signs r of a sample's outputs, the slope of (root of L) r · outputs has this second moment; so
    one backward pass for each of the `signs` [K, samples, outputs] serves all units.
    """
    if not isinstance(loss_fn, Objective):
        raise UserError('form = "gauss_newton" needs an Objective, which knows the outputs behind the loss')
    root = loss_fn.bend(loss_fn.outputs(m, loss_fn.x))
    weights = torch.einsum("bij,kbj->kbi", root, signs)
    return (unit_slopes(loss_fn, m, groups, weights) ** 2).mean((0, 1))


def alone(m: Tensor, groups: ChannelGroups) -> Iterator[Tensor]:
    """m ⊙ 1_c of all units, a few at a time [<= CHUNK, P]."""
    every = torch.eye(groups.count, device=m.device)
    for begin in range(0, groups.count, CHUNK):
        yield groups.spread(every[begin : begin + CHUNK]) * m


def adapted(at: Curvature, m: Tensor, groups: ChannelGroups, shift: float = 0.0, steps: int = 200) -> Tensor:
    """`dFC_c` when all other entries r take the step that is best in the quadratic model, [count].

    The step solves (H_rr + shift I) dm_r = H_rp m_p - g_r by MINRES; the value is the unshifted model's. A
    real network's Hessian is indefinite and needs a shift. The systems of all units advance together, by at
    most `steps` products each: for small models.
    """
    inside = groups.spread(torch.eye(groups.count, device=m.device)) > 0
    removed = -m * inside
    right = ~inside * (-at.hessian(removed) - at.gradient)

    def rest(v: Tensor) -> Tensor:
        return ~inside * (at.hessian(~inside * v) + shift * v)

    step = removed + ~inside * minres(rest, right, steps)
    return (step @ at.gradient) + 0.5 * (step * at.hessian(step)).sum(-1)
