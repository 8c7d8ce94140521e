"""A module over flat vectors."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from ..layout import Layout


class FlatModule:
    """A module whose parameters and gradients are views of two flat vectors: loading, stepping and reading
    back are then single operations, whatever the number of layers."""

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.module = deepcopy(module)
        self.vector = torch.zeros(layout.size, device=device)
        self.gradient = torch.zeros(layout.parameters, device=device)
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor, Tensor]] = []
        parameters = dict(self.module.named_parameters())
        for e in layout.entries:
            view = self.vector[e.offset : e.end].view(e.shape)
            if e.name not in parameters:
                self._bind_buffer(e.name, view)
                continue
            parameters[e.name].data = view
            if e.trainable:
                parameters[e.name].grad = self.gradient[e.offset : e.end].view(e.shape)

    def _bind_buffer(self, name: str, view: Tensor) -> None:
        """A float32 buffer becomes a view too; `data` because autograd must not take a write to one of them
        for a write to all."""
        path, _, leaf = name.rpartition(".")
        registry = self.module.get_submodule(path)._buffers
        buffer = registry[leaf]
        assert buffer is not None
        self._buffers.append((registry, leaf, view.data if buffer.dtype == torch.float32 else buffer, view))

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        self.vector.copy_(vector)
        for registry, leaf, buffer, view in self._buffers:
            registry[leaf] = buffer
            if buffer.dtype != torch.float32:
                buffer.copy_(view)

    @torch.no_grad()
    def sync(self) -> None:
        """Brings buffers back into the vector: counters, and those that the module has replaced."""
        for registry, leaf, buffer, view in self._buffers:
            now = registry[leaf]
            if now is not None and (now is not buffer or buffer.dtype != torch.float32):
                view.copy_(now)
