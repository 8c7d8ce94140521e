"""Functions whose GPU kernels are captured once and replayed: many small launches become one.

Launching a kernel takes a CPU as long as a small kernel runs; a selector of a few thousand numbers is hundreds of them.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
"""Numbers of rows that graphs are captured for; a batch is padded to the next one."""
FEW_SIZES = (2, 8, 32, 128)
"""Those for what is small beside its launches: a capture costs more than the rows that are added."""

Tensors = tuple[Tensor, ...]


def padded_size(count: int, sizes: Sequence[int] = SIZES) -> int:
    """The next of the sizes; beyond them, multiples of 64."""
    return next((size for size in sizes if size >= count), -(-count // 64) * 64)


def most_models(macs: float) -> int:
    """Models in a batch: enough to keep a large GPU busy; more would only take memory, for each size that comes up."""
    wanted = max(24.0, 96e6 / max(1.0, macs))
    return max(size for size in SIZES if size <= wanted)


@dataclass
class Captures:
    """Graphs that were captured in this process so far, and what that took, compiling their kernels included."""

    count: int = 0
    seconds: float = 0.0

    def now(self) -> Captures:
        """As it stands, to be compared with later."""
        return replace(self)

    def since(self, earlier: Captures) -> Captures:
        return Captures(self.count - earlier.count, self.seconds - earlier.seconds)


CAPTURES = Captures()


def capture(call: Callable[[], object], pool: Any = None) -> Callable[[], None]:
    """A CUDA graph of the call, after two runs that let libraries choose their kernels.

    Captured by hand: `torch.cuda.graph` would collect garbage first, which takes long beside a large simulation.
    Nothing may be collected meanwhile either: a graph that goes away during a capture breaks it. What the runs before
    left in PyTorch's memory is given back first, since it cannot be in the middle of a capture.
    """
    torch.cuda.synchronize()
    begin = time.perf_counter()
    stream = _stream(torch.cuda.current_device())
    with torch.cuda.stream(stream), _uncollected():
        for _ in range(2):
            call()
        stream.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool, capture_error_mode=_mode())
        try:
            call()
        except BaseException:
            _abandon(graph)
            raise
        graph.capture_end()
    torch.cuda.synchronize()
    CAPTURES.count += 1
    CAPTURES.seconds += time.perf_counter() - begin
    return graph.replay


def _mode() -> str:
    """In a thread beside the main one, only what that thread does must fit into a capture."""
    return "global" if threading.current_thread() is threading.main_thread() else "thread_local"


@cache
def _stream(device: int) -> Any:
    """The stream on which all graphs of a GPU are captured: PyTorch gives memory of a pool again only to the stream
    that had it before, and cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _uncollected() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _abandon(graph: Any) -> None:
    """Ends a capture that failed; else all that comes after it in this process would fail too."""
    with suppress(RuntimeError):
        graph.capture_end()


def copies(rows: Sequence[Tensor]) -> list[Tensor]:
    """Rows of a table as tensors of their own, so that none keeps the table alive; on a GPU in one launch."""
    own = list(rows)
    fast = own[0].is_cuda and own[0].is_floating_point()
    return list(torch._foreach_mul(own, 1.0)) if fast else [row.clone() for row in own]


@dataclass(eq=False)
class _Recorded:
    inputs: Tensors
    outputs: Tensors
    replay: Callable[[], None]


_RECORDED: dict[Hashable, _Recorded] = {}


def replayed(name: Hashable, function: Callable[..., Tensors], *tensors: Tensor) -> Tensors:
    """`function(*tensors)` for a function that treats the rows of its tensors one by one.

    On a GPU, its kernels are captured once for each name and (padded) number of rows; a CPU just calls it.
    """
    if not tensors[0].is_cuda:
        return function(*tensors)
    count = len(tensors[0])
    size = padded_size(count, FEW_SIZES)
    key = (name, size, tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors), tensors[0].device)
    if key not in _RECORDED:
        _RECORDED[key] = _record(function, [_padded(tensor, size) for tensor in tensors])
    found = _RECORDED[key]
    torch._foreach_copy_([place[:count] for place in found.inputs], tensors)
    found.replay()
    return tuple(output[:count].clone() for output in found.outputs)


def _padded(tensor: Tensor, size: int) -> Tensor:
    """Rows of its own memory; what is added repeats the first."""
    return torch.cat([tensor, tensor[:1].expand(size - len(tensor), *tensor.shape[1:])]).contiguous()


def _record(function: Callable[..., Tensors], inputs: list[Tensor]) -> _Recorded:
    outputs: list[Tensors] = []
    replay = capture(lambda: outputs.append(function(*inputs)))
    return _Recorded(tuple(inputs), outputs[-1], replay)
