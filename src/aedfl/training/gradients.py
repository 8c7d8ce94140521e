"""Loss and gradient of one model on one mini-batch, as a function that can be batched over models."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..task import Task
from .dropout import Dropout

Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, tuple[Tensor, Tensor]]]
"""(weights [N, P], buffers, x, y, present [N, batch], keys [N]) to (gradients, (losses [N], buffers))."""


def batched_gradients(task: Task, module: nn.Module) -> Gradients:
    """For a stack of models at once; samples whose `present` is 0 are padding and do not count.

    `module` decides between training and evaluation mode; its own weights are not used.
    """
    dropouts = [layer for layer in module.modules() if isinstance(layer, Dropout)]

    def loss(
        weights: Tensor, buffers: Tensor, x: Tensor, y: Tensor, present: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        named = task.layout.views(weights, buffers)
        for layer in dropouts:
            layer.key = key
        output = functional_call(module, named, (x,))
        if task.example_loss is None or task.whole_batches:
            value = task.loss(output, y)
        else:
            value = (task.example_loss(output, y) * present).sum() / present.sum().clamp(min=1.0)
        return value, task.layout.collect(named, buffers)

    return vmap(grad_and_value(loss, has_aux=True))
