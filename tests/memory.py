"""Bytes that tensors take, counted as they are made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Memory(TorchDispatchMode):
    """While it lasts, follows the storages of all new tensors; the most bytes that were alive at once are its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        result = function(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
