"""The cost of a forward pass, counted layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


def example_input(module: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """One sample of zeros [1, *input_shape]; word numbers (int64) for a module with an embedding."""
    tokens = any(isinstance(layer, nn.Embedding) for layer in module.modules())
    return torch.zeros(1, *input_shape, dtype=torch.int64 if tokens else torch.float32)


def layer_macs(module: nn.Module, example: Tensor | Sequence[int]) -> dict[str, int]:
    """Multiply-accumulates per layer and sample, by the layer's name; all its calls together.

    `example` is an input with its batch dimension, or the shape of one sample. Counted are Conv1d, Conv2d,
    Conv3d and Linear; an embedding is a look-up and costs nothing, as do norms, activations and pooling.
    """
    x = example if isinstance(example, Tensor) else example_input(module, example)
    counts: dict[str, int] = {}

    def hook(name: str) -> Any:
        def count(layer: nn.Module, _: Any, output: Tensor) -> None:
            assert isinstance(layer.weight, Tensor)
            counts[name] = counts.get(name, 0) + output.numel() // len(x) * prod(layer.weight.shape[1:])

        return count

    twin = deepcopy(module).eval()
    for name, layer in twin.named_modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            layer.register_forward_hook(hook(name))
    with torch.no_grad():
        twin(x)
    return counts


def count_macs(module: nn.Module, example: Tensor | Sequence[int]) -> int:
    """Multiply-accumulates of one sample's forward pass; see `layer_macs`."""
    return sum(layer_macs(module, example).values())
