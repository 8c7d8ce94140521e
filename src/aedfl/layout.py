"""Flat vectors: a model is one float vector plus this description of what lies where.

Trainable parameters come first, then what no gradient changes: frozen parameters and buffers (running
statistics and the like). So `vector[:layout.parameters]` is what a gradient has, and `vector` is what travels
and is merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """One tensor of the model inside the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: torch.dtype = torch.float32
    trainable: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """Names, shapes and offsets of a model's tensors: parameters first, then buffers."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        entries: list[Entry] = []
        offset = 0
        parameters = list(module.named_parameters())
        named: list[tuple[bool, Iterable[tuple[str, Tensor]]]] = [
            (True, [(name, tensor) for name, tensor in parameters if tensor.requires_grad]),
            (False, [(name, tensor) for name, tensor in parameters if not tensor.requires_grad]),
            (False, module.named_buffers()),
        ]
        for trainable, tensors in named:
            for name, tensor in tensors:
                entry = Entry(name, tuple(tensor.shape), offset, tensor.dtype, trainable)
                entries.append(entry)
                offset = entry.end
        return cls(tuple(entries))

    @cached_property
    def size(self) -> int:
        """Length of the whole vector, buffers included."""
        return self.entries[-1].end if self.entries else 0

    @cached_property
    def parameters(self) -> int:
        """Length of the trainable part, which comes first."""
        return max((e.end for e in self.entries if e.trainable), default=0)

    def flatten(self, module: nn.Module) -> Tensor:
        """A float32 copy of the module's tensors, in layout order."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        parts = [tensors[e.name].detach().reshape(-1).to(torch.float32) for e in self.entries]
        return torch.cat(parts) if parts else torch.empty(0)

    def views(self, vector: Tensor, buffers: Tensor | None = None) -> dict[str, Tensor]:
        """The vector as named tensors, views where they are float32.

        With `buffers`, `vector` is the trainable part; the rest are copies that a forward pass may write to.
        """
        named: dict[str, Tensor] = {}
        for e in self.entries:
            if e.trainable or buffers is None:
                view = vector[e.offset : e.end].view(e.shape)
            else:
                view = buffers[e.offset - self.parameters : e.end - self.parameters].view(e.shape).clone()
            named[e.name] = view if e.dtype == torch.float32 else view.to(e.dtype)
        return named

    def batched_views(self, stack: Tensor) -> dict[str, Tensor]:
        """The parameters of vectors [N, size] as named tensors [N, ...]."""
        return {e.name: stack[:, e.offset : e.end].reshape(-1, *e.shape) for e in self.entries if e.trainable}

    def collect(self, named: dict[str, Tensor], buffers: Tensor) -> Tensor:
        """The part of the vector behind the trainable one, after a forward pass that may have changed it."""
        parts = [named[e.name].reshape(-1).to(torch.float32) for e in self.entries if not e.trainable]
        return torch.cat(parts) if parts else buffers

    def load(self, module: nn.Module, vector: Tensor) -> None:
        """Copies the vector into the module's tensors."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, value in self.views(vector).items():
                tensors[name].copy_(value)
