"""Curvature of a loss on a flat parameter vector, by Hessian-vector products only.

A `loss_fn` maps a parameter vector [P] to a scalar and must be smooth enough to differentiate twice. Everything
here is a pure function: the same arguments give the same numbers, and probes are keyed by a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vjp, vmap
from torch.nn import functional as F

from aedfl.layout import Layout

LossFn = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Operator = Callable[[Tensor], Tensor]
"""A symmetric matrix as its action on vectors: [P] to [P], or a stack [K, P] to [K, P]."""


def flat_loss(
    module: nn.Module, layout: Layout, x: Tensor, y: Tensor, loss: Loss = F.cross_entropy, vector: Tensor | None = None
) -> LossFn:
    """The loss on samples (x, y) as a function of the trainable part [layout.parameters] of the flat vector.

    The module runs in evaluation mode, so that norms and dropout are smooth functions without side effects.
    Buffers come from `vector` [layout.size] if given, else from the module.
    """
    frozen = deepcopy(module).eval()
    buffers = (layout.flatten(module) if vector is None else vector)[layout.parameters :]

    def value(parameters: Tensor) -> Tensor:
        named = layout.views(torch.cat([parameters, buffers.to(parameters)]))
        return loss(functional_call(frozen, named, (x,)), y)

    return value


@dataclass(frozen=True)
class Curvature:
    """A loss up to second order at one point."""

    loss: Tensor
    gradient: Tensor
    """[P]"""
    hessian: Operator


def curvature(loss_fn: LossFn, vector: Tensor, chunk: int | None = None) -> Curvature:
    """Loss, gradient and Hessian at `vector` [P]. The gradient's graph is made once and serves every product.

    A stack of vectors is multiplied at once, at most `chunk` of them at a time.
    """
    gradient, pull, loss = vjp(grad_and_value(loss_fn), vector, has_aux=True)

    def one(v: Tensor) -> Tensor:
        return pull(v, create_graph=False)[0]  # type: ignore[no-any-return]

    def product(v: Tensor) -> Tensor:
        return one(v) if v.dim() == 1 else vmap(one, chunk_size=chunk)(v)

    return Curvature(loss, gradient, product)


def hvp(loss_fn: LossFn, vector: Tensor, v: Tensor, chunk: int | None = None) -> Tensor:
    """H v at `vector` [P] for one `v` [P] or a stack [K, P]."""
    return curvature(loss_fn, vector, chunk).hessian(v)


def rademacher(seed: int, count: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Random signs, float32 [count, size]: a function of the seed alone, the same on every device.

    Row k does not depend on `count`, so that more probes are a refinement of fewer.
    """
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (count, size), generator=generator, dtype=torch.int8)
    return (2 * bits - 1).to(device, torch.float32)


def hutchinson(hessian: Operator, probes: Tensor) -> tuple[Tensor, Tensor]:
    """The trace's estimate from `probes` [K, P], and its standard error (K >= 2)."""
    samples = (probes * hessian(probes)).sum(-1)
    return samples.mean(), samples.std() / len(probes) ** 0.5
