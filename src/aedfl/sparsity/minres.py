"""MINRES (Paige and Saunders, 1975): solves symmetric systems, indefinite ones too, by products alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .curvature import Operator


def minres(operator: Operator, right: Tensor, steps: int, tolerance: float = 1e-6) -> Tensor:
    """Solutions x [K, P] of A x = right [K, P], one stacked product per step.

    Stops after `steps` products, or when every residual has fallen to `tolerance` times its right-hand side;
    a system that gets there before the others stays as it is.
    """
    zeros, goal = torch.zeros_like(right), tolerance * right.norm(dim=-1, keepdim=True)
    x, old, w_old, w = zeros, zeros, zeros, zeros
    beta = eta = right.norm(dim=-1, keepdim=True)
    new = right / _nonzero(beta)
    c = c_old = torch.ones_like(beta)
    s = s_old = torch.zeros_like(beta)
    for _ in range(steps):
        image = operator(new)
        alpha = (image * new).sum(-1, keepdim=True)
        image = image - alpha * new - beta * old
        after = image.norm(dim=-1, keepdim=True)
        delta, rho2, rho3 = c * alpha - c_old * s * beta, s * alpha + c_old * c * beta, s_old * beta
        rho1 = _nonzero((delta**2 + after**2).sqrt())
        c_old, s_old, c, s = c, s, delta / rho1, after / rho1
        w_old, w = w, (new - rho3 * w_old - rho2 * w) / rho1
        active = eta.abs() > goal
        x = x + active * c * eta * w
        eta = torch.where(active, -s * eta, eta)
        old, new, beta = new, image / _nonzero(after), after
        if not bool((eta.abs() > goal).any()):
            break
    return x


def _nonzero(number: Tensor) -> Tensor:
    """The number, or 1 instead of 0: a divisor of something that is zero as well."""
    return number.where(number != 0, 1.0)
