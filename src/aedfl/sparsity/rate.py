"""How much to prune: the paper's gap rule on the spectrum, a cap that rises with time, the merged rate."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi

import torch
from torch import Tensor
from torch.func import grad

from .curvature import Curvature, curvature
from .lanczos import Spectrum
from .objective import LossFn


def gap_rate(spectrum: Spectrum, lipschitz: Tensor | float, tolerance: float = 0.01) -> Tensor:
    """The paper's p* [...]: the share of eigenvalues below the first gap wider than 4 L; 0 without one.

    A gap lies between two neighbouring Ritz values [..., k] that have both converged: between others there
    may be eigenvalues that Lanczos has not resolved yet.
    """
    values, done = spectrum.values, spectrum.converged(tolerance)
    wide = (values.diff(dim=-1) > 4 * lipschitz) & done[..., 1:] & done[..., :-1]
    below = spectrum.weights.cumsum(-1)[..., :-1]
    first = wide.int().argmax(-1, keepdim=True)
    return (below.gather(-1, first) * wide.gather(-1, first)).squeeze(-1)


def lipschitz(loss_fn: LossFn, vector: Tensor, initial: Tensor, points: int = 4, at: Curvature | None = None) -> Tensor:
    """L of dm -> H(m) dm - grad F(m + dm): the largest difference quotient on the way dm = t (initial - m).

    `vector` and `initial` are parameters [P]. The quotients of neighbouring points t = 0, 1/points, …, 1
    bound those of all pairs. Infinite where the two are equal: then nothing is known, no gap wide enough.
    """
    at = at or curvature(loss_fn, vector)
    way = initial - vector
    there = [grad(loss_fn)(vector + (number / points) * way) for number in range(1, points + 1)]
    slopes = torch.stack([at.gradient, *there])
    changes = at.hessian(way) / points - slopes.diff(dim=0)
    quotient = changes.norm(dim=-1).amax() * points / way.norm()
    return torch.where(way.norm() > 0, quotient, torch.inf)


def cap(age: float, start: float, end: float, most: float = 0.5) -> float:
    """The largest rate allowed at an age in local updates: 0 until `start`, half a cosine up to `most` at `end`."""
    progress = min(max((age - start) / max(end - start, 1), 0.0), 1.0)
    return most * (1 - cos(pi * progress)) / 2


def merge_rates(weights: Tensor | Sequence[float], own: Tensor | float, neighbours: Tensor | Sequence[float]) -> Tensor:
    """The paper's p_i = w_ii p* + sum_j w_ij p_j. `weights` [1 + n] begin with the own one and sum to 1."""
    w = torch.as_tensor(weights, dtype=torch.float64)
    others = torch.as_tensor(neighbours, dtype=torch.float64).to(w.device)
    return w[0] * own + (w[1:] * others).sum()
