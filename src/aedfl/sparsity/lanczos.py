"""Lanczos' method and stochastic Lanczos quadrature: an operator's spectrum from a few products."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .curvature import Operator


class Spectrum(NamedTuple):
    """Ritz values in ascending order with the share of eigenvalues each stands for."""

    values: Tensor
    """[..., k]"""
    weights: Tensor
    """[..., k], sum 1."""
    residuals: Tensor
    """Norm of (A - value) on the Ritz vector [..., k]: an eigenvalue lies at most this far from the value."""

    def converged(self, tolerance: float = 0.01) -> Tensor:
        """Ritz values whose residual is below `tolerance` times the largest magnitude, bool [..., k]."""
        return self.residuals <= tolerance * self.values.abs().amax(-1, keepdim=True)


def lanczos(operator: Operator, start: Tensor, steps: int) -> Spectrum:
    """Spectra as seen from each start vector [S, P] (or [P]), with full reorthogonalisation.

    The start vectors advance together, one stacked product per step. Steps past an invariant subspace add
    Ritz values of weight zero; there are no more steps than dimensions.
    """
    batch = start if start.dim() == 2 else start[None]
    basis, alphas, betas = [batch / batch.norm(dim=-1, keepdim=True)], [], []
    for _ in range(min(steps, batch.shape[-1])):
        image = operator(basis[-1])
        alphas.append((image * basis[-1]).sum(-1))
        rest = _orthogonal(image, torch.stack(basis, 1))
        betas.append(rest.norm(dim=-1))
        alive = betas[-1] > 1e-6 * image.norm(dim=-1)
        betas[-1] = betas[-1] * alive
        basis.append(rest / betas[-1].where(alive, 1.0)[:, None] * alive[:, None])
    spectrum = _ritz(torch.stack(alphas, -1).double(), torch.stack(betas, -1).double())
    if start.dim() == 2:
        return spectrum
    return Spectrum(spectrum.values[0], spectrum.weights[0], spectrum.residuals[0])


def _orthogonal(vectors: Tensor, basis: Tensor) -> Tensor:
    """`vectors` [S, P] less their parts in `basis` [S, k, P]; twice, which is enough against rounding."""
    for _ in range(2):
        parts = (basis @ vectors[..., None]).squeeze(-1)
        vectors = vectors - (parts[:, None] @ basis).squeeze(1)
    return vectors


def _ritz(alphas: Tensor, betas: Tensor) -> Spectrum:
    """From the tridiagonal matrices, diagonals [S, k] and the k betas of which the last is left over."""
    inner = betas[:, :-1]
    matrix = torch.diag_embed(alphas) + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
    values, vectors = torch.linalg.eigh(matrix)
    return Spectrum(values, vectors[:, 0] ** 2, (betas[:, -1:] * vectors[:, -1]).abs())


def mean_spectrum(spectrum: Spectrum) -> Spectrum:
    """Spectra of several start vectors [S, k] as one [S k]: stochastic Lanczos quadrature's estimate."""
    order = spectrum.values.flatten().argsort()
    weights = spectrum.weights.flatten() / len(spectrum.values)
    return Spectrum(spectrum.values.flatten()[order], weights[order], spectrum.residuals.flatten()[order])


def density(spectrum: Spectrum, grid: Tensor, width: float) -> Tensor:
    """The spectral density on `grid` [n], each Ritz value smeared to a Gaussian of deviation `width`."""
    distance = (grid[:, None] - spectrum.values.flatten()) / width
    shapes = torch.exp(-0.5 * distance**2) / (width * (2 * torch.pi) ** 0.5)
    weights = spectrum.weights.flatten()
    smeared: Tensor = (shapes @ weights) / weights.sum()
    return smeared
