"""Jobs on their way to another process: who gets which, and tensors as arrays that need no copy to be read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = Sequence[tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Packed:
    """A tensor as an array; told apart from arrays that are arrays on both sides."""

    array: np.ndarray[Any, Any]


def split(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Numbers of the jobs of each part, at most `parts` of them, with sums of costs as even as is easily had.

    The costliest job goes first, each to the part that has least so far. Follows from the costs alone.
    """
    loads = [(0.0, 0, part) for part in range(min(parts, len(costs)))]
    shares: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        load, jobs, part = heappop(loads)
        shares[part].append(number)
        heappush(loads, (load + costs[number], jobs + 1, part))
    return [sorted(share) for share in shares]


def pack(thing: Any) -> Any:
    """Nested tuples and lists with arrays in the place of tensors; a tensor that occurs twice travels once."""
    known: dict[int, Packed] = {}

    def packed(part: Any) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in known:
                known[id(part)] = Packed(part.detach().numpy(force=True))
            return known[id(part)]
        return tuple(map(packed, part)) if isinstance(part, (tuple, list)) else part

    return packed(thing)


def unpack(thing: Any, device: torch.device, copy: bool = False) -> Any:
    """The reverse of `pack`. Without `copy`, a CPU's tensors lie in the arrays' memory: they must only be read."""
    known: dict[int, Tensor] = {}

    def unpacked(part: Any) -> Any:
        if isinstance(part, Packed):
            if id(part) not in known:
                known[id(part)] = as_tensor(part.array).to(device, copy=copy)
            return known[id(part)]
        return tuple(map(unpacked, part)) if isinstance(part, (tuple, list)) else part

    return unpacked(thing)


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """The array's memory as a tensor, also where it is shared memory that must only be read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def to_host(rows: Rows) -> Rows:
    """Results in the CPU's memory, by one copy per column where that is possible, not one per tensor."""
    if not rows or all(tensor.device.type == "cpu" for tensor in rows[0]):
        return rows
    return list(zip(*(_column(column) for column in zip(*rows, strict=True)), strict=True))


def _column(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
        return [tensor.cpu() for tensor in tensors]
    return torch.stack(list(tensors)).cpu().unbind()
