"""What a unit is worth: the paper's two-term saliency of every unit at once (its formula for Delta F_i).

    dF_c = (1 - lambda_g) |dFC_c| / |F| + lambda_g ||dg_c|| / ||g||,    lambda_g = min(1, ||g|| / (C g_max))

`dFC_c` is the change of the loss, `dg_c` that of the gradient, when unit c is set to zero. Both come from products of
the Hessian with vectors; a fixed number of products prices every unit, however many there are. F, g and H are
taken at the full vector, where pruned units still have a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from aedfl.errors import UserError
from aedfl.randomness import torch_seed

from .curvature import Curvature, LossFn, curvature, rademacher
from .groups import ChannelGroups
from .minres import minres

Form = Literal["signed", "unbiased", "trace", "exact", "full"]
FORMS: tuple[str, ...] = get_args(Form)

PROBES = 12
"""Default number of products for each of the two terms."""


class Probes(NamedTuple):
    """The random signs of one pruning step."""

    entries: Tensor
    """[K, parameters]: independent signs, for the gradient's change."""
    units: Tensor
    """[K', count]: one sign per unit, for the loss' change in the signed form."""


class Saliency(NamedTuple):
    """Scores of all units with the quantities behind them."""

    score: Tensor
    """[count]; the lowest go first."""
    loss_change: Tensor
    gradient_change: Tensor
    loss: Tensor
    gradient_norm: Tensor
    balance: Tensor
    """lambda_g"""


def draw(seed: int, groups: ChannelGroups, count: int = PROBES) -> Probes:
    """`count` probes of each sort, a function of the seed."""
    entries = rademacher(torch_seed(seed, "entries"), count, groups.layout.parameters, groups.device)
    return Probes(entries, rademacher(torch_seed(seed, "units"), count, groups.count, groups.device))


def saliency(
    loss_fn: LossFn,
    vector: Tensor,
    groups: ChannelGroups,
    probes: Probes,
    largest_gradient: Tensor | float = 0.0,
    form: Form = "signed",
    control: float = 1.5,
    chunk: int | None = None,
) -> Saliency:
    """Scores of all units at the full `vector` (its buffers are not looked at).

    `largest_gradient` is the largest gradient norm seen before (g_max takes the present one in as well), `control` the
    paper's C. Can be used under `vmap` over devices, except for the form "full". `chunk` bounds the products
    made at once.
    """
    m = vector[: groups.layout.parameters]
    at = curvature(loss_fn, m, chunk)
    norm = at.gradient.norm()
    largest = torch.maximum(norm, torch.as_tensor(largest_gradient).to(norm))
    balance = (norm / (control * largest)).clamp(max=1.0).nan_to_num(0.0)
    products = at.hessian(probes.entries)
    change = loss_changes(at, m, groups, probes, products, form)
    turn = gradient_changes(m, groups, products)
    score = (1 - balance) * change.abs() / at.loss.abs() + balance * turn / norm
    return Saliency(score, change, turn, at.loss, norm, balance)


def gradient_changes(m: Tensor, groups: ChannelGroups, products: Tensor) -> Tensor:
    """`||H (m ⊙ 1_c)||` of every unit, from products H z [K, P] with random signs z.

    E[((H z) · (m ⊙ 1_c))^2] is its square, so the same products serve all units.
    """
    return (groups.sums(products * m) ** 2).mean(0).sqrt()


def loss_changes(
    at: Curvature, m: Tensor, groups: ChannelGroups, probes: Probes, products: Tensor, form: Form
) -> Tensor:
    """`dFC_c` = 1/2 m_c' H_cc m_c - g_c · m_c of every unit; "full" lets the others adapt (see `adapted`).

    The forms differ in the quadratic term: "signed" multiplies H with all units at once under one random sign each,
    "unbiased" and "trace" (HAP: the mean curvature of the unit) reuse the entries' probes, "exact" makes one
    product per unit.
    """
    if form == "full":
        return adapted(at, m, groups)
    return 0.5 * _quadratic(at, m, groups, probes, products, form) - groups.sums(at.gradient * m)


def _quadratic(
    at: Curvature, m: Tensor, groups: ChannelGroups, probes: Probes, products: Tensor, form: Form
) -> Tensor:
    """m_c' H_cc m_c of every unit."""
    if form == "signed":
        images = at.hessian(groups.spread(probes.units) * m)
        return (probes.units * groups.sums(images * m)).mean(0)
    if form == "unbiased":
        return (groups.sums(probes.entries * m) * groups.sums(products * m)).mean(0)
    if form == "trace":
        trace = groups.sums(probes.entries * products).mean(0)
        return trace / groups.sizes * groups.sums(m**2)
    if form == "exact":
        return torch.cat([(at.hessian(part) * part).sum(-1) for part in _alone(m, groups)])
    raise UserError(f"form = {form!r} is not known; allowed are {', '.join(FORMS)}")


def _alone(m: Tensor, groups: ChannelGroups, chunk: int = 32) -> Iterator[Tensor]:
    """m ⊙ 1_c of all units, a few at a time [<= chunk, P]."""
    for units in torch.eye(groups.count, device=m.device).split(chunk):
        yield groups.spread(units) * m


def adapted(
    at: Curvature, m: Tensor, groups: ChannelGroups, shift: float = 0.0, steps: int = 200
) -> Tensor:
    """`dFC_c` when all other entries r take the step that is best in the quadratic model, [count].

    The step solves (H_rr + shift I) dm_r = H_rp m_p - g_r by MINRES; a real network's Hessian is indefinite and
    needs a shift. All units' systems advance together, at `steps` products each at most: for small models.
    """
    inside = groups.spread(torch.eye(groups.count, device=m.device)) > 0
    removed = -m * inside
    right = ~inside * (-at.hessian(removed) - at.gradient)

    def rest(v: Tensor) -> Tensor:
        return ~inside * (at.hessian(~inside * v) + shift * v)

    step = removed + ~inside * minres(rest, right, steps)
    return (step @ at.gradient) + 0.5 * (step * at.hessian(step)).sum(-1)
