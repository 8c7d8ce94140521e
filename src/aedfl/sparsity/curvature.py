"""Curvature of a loss on a flat parameter vector, by Hessian-vector products only.

Everything here is a pure function: the same arguments give the same numbers, and probes are keyed by a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vjp, vmap

from ..transfer import sent
from .objective import LossFn

Operator = Callable[[Tensor], Tensor]
"""A symmetric matrix as its action on vectors: [P] to [P], or a stack [K, P] to [K, P]."""
Pulled = tuple[Tensor, Callable[..., tuple[Tensor]], Tensor]


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
    gradient, pull, loss = cast("Pulled", vjp(grad_and_value(loss_fn), vector, has_aux=True))

    def one(v: Tensor) -> Tensor:
        return pull(v, create_graph=False)[0]

    def product(v: Tensor) -> Tensor:
        return one(v) if v.dim() == 1 else vmap(one, chunk_size=chunk)(v)

    return Curvature(loss, gradient, product)


def hvp(loss_fn: LossFn, vector: Tensor, v: Tensor, chunk: int | None = None) -> Tensor:
    """H v at `vector` [P] for one `v` [P] or a stack [K, P]."""
    return curvature(loss_fn, vector, chunk).hessian(v)


@cache
def _signs(device: torch.device | str) -> Tensor:
    """The signs [256, 8] that each byte stands for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return (torch.from_numpy(bits).float() * 2 - 1).to(device)


def rademacher(seed: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Random signs, float32: a function of the seed alone, the same on every device.

    A longer first dimension only adds rows, so that more probes refine fewer. Drawn 8 to a byte: of a hundred probes of
    a million entries each, drawing takes longer than what is done with them.
    """
    rows, entries = (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))
    generator = np.random.Generator(np.random.PCG64(seed))
    width = -(-entries // 8)
    drawn = np.frombuffer(bytearray(generator.bytes(rows * width)), np.uint8)
    packed = sent(torch.from_numpy(drawn), torch.device(device))
    signs = _signs(device).index_select(0, packed.int())
    return signs.view(rows, 8 * width)[:, :entries].reshape(tuple(shape))


def hutchinson(hessian: Operator, probes: Tensor) -> tuple[Tensor, Tensor]:
    """The trace's estimate from `probes` [K, P], and its standard error (K >= 2)."""
    samples = (probes * hessian(probes)).sum(-1)
    return samples.mean(), samples.std() / len(probes) ** 0.5
