"""A module's loss on fixed samples, as a function of the trainable part of its flat vector."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from aedfl.layout import Layout

LossFn = Callable[[Tensor], Tensor]
"""From a parameter vector [P] to a scalar, twice differentiable."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""From outputs [B, ...] and targets [B, ...] to the mean over samples."""


@dataclass(frozen=True, eq=False)
class Objective:
    """Call it with parameters [layout.parameters] to get the mean loss on `x` [B, ...] and `y` [B, ...]."""

    module: nn.Module
    layout: Layout
    x: Tensor
    y: Tensor
    loss: Loss
    buffers: Tensor
    """The rest of the flat vector, held fixed."""

    def outputs(self, parameters: Tensor, x: Tensor) -> Tensor:
        """What the module says to `x`, with these parameters."""
        outputs: Tensor = functional_call(self.module, self._named(parameters), (x,))
        return outputs

    def _named(self, parameters: Tensor) -> dict[str, Tensor]:
        """All tensors by name. Buffers are kept apart: a norm refuses one that could have a gradient."""
        named: dict[str, Tensor] = {}
        for e in self.layout.entries:
            source, start = (parameters, 0) if e.trainable else (self.buffers, self.layout.parameters)
            part = source[e.offset - start : e.end - start].view(e.shape)
            named[e.name] = part.to(parameters.dtype if e.dtype.is_floating_point else e.dtype)
        return named

    def __call__(self, parameters: Tensor) -> Tensor:
        return self.loss(self.outputs(parameters, self.x), self.y)

    def bend(self, outputs: Tensor) -> Tensor:
        """A square root [B, C, C] of the loss' Hessian in each sample's outputs [B, ...] of C numbers."""

        def single(output: Tensor, target: Tensor) -> Tensor:
            return self.loss(output.view(1, *outputs.shape[1:]), target[None])

        flat = outputs.reshape(len(outputs), -1)
        bends = vmap(jacrev(jacrev(single)))(flat, self.y).double().nan_to_num()
        values, vectors = torch.linalg.eigh(bends)  # in double: sure samples have tiny eigenvalues close together
        root: Tensor = (vectors * values.clamp(min=0).sqrt()[..., None, :]).to(outputs.dtype)
        return root


def flat_loss(
    module: nn.Module,
    layout: Layout,
    x: Tensor,
    y: Tensor,
    loss: Loss = F.cross_entropy,
    vector: Tensor | None = None,
) -> Objective:
    """The objective on samples (x, y), with the buffers of `vector` [layout.size] or else of the module.

    A copy of the module runs in evaluation mode, so that norms and dropout are plain functions.
    """
    whole = layout.flatten(module) if vector is None else vector
    return Objective(deepcopy(module).eval(), layout, x, y, loss, whole[layout.parameters :])
