"""On a CPU: a convolution, its ReLU and the maximum beside it in one kernel, so that slopes are gathered where the
largest answers were instead of convolved. The maximum is a pooling of images by 2, or that over a whole line.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..native import Line, Shape, library, pointer
from .stacked import known
from .traced import Layers, halves, is_line_max, is_relu, layer_of, only_user, plain, slides, trace

PREFIX = "_aedfl_fused_"
"""Of the names of fused layers in a graph."""
MOST = 1 << 28
"""Numbers of a sample that are too many for the kernel."""
_COMPILING = threading.Lock()
"""Held while a graph becomes code: `torch.fx` writes into its nodes meanwhile."""


class _Largest(torch.autograd.Function):
    """A kernel that keeps the largest answers of filters and where they were, and one for the slopes there.

    All tensors are contiguous; `y` and `where`, numbers of the type `codes`, have the given sizes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernel: str,
        shape: ctypes.Structure,
        sizes: tuple[int, ...],
        codes: torch.dtype,
    ) -> Tensor:
        y, where = x.new_empty(sizes), torch.empty(sizes, dtype=codes)
        shift = weight.new_zeros(len(weight)) if bias is None else bias.contiguous()
        _call(kernel, shape, x, weight, shift, y, where)
        ctx.save_for_backward(x, weight, where)
        ctx.kernel, ctx.shape = kernel, shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, where = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw, db = torch.empty_like(weight), weight.new_empty(len(weight))
        _call(f"{ctx.kernel}_slopes", ctx.shape, x, weight, g.contiguous(), where, dw, db, dx)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None, None, None, None


def _call(kernel: str, shape: ctypes.Structure, *tensors: Tensor | None) -> None:
    kernels = library()
    assert kernels is not None, "ask `Fusion.of` first"
    if not getattr(kernels, kernel)(ctypes.byref(shape), *map(pointer, tensors)):
        raise MemoryError("no memory for a convolution")


def conv_pool(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """`F.relu(F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2))`, in the kernel where that can do it."""
    if not _fits(x, weight) or min(_pooled(x, weight, padding)) < 1:
        return F.relu(F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2))  # which says what is wrong, if it is
    x, weight = x.contiguous(), weight.contiguous()
    shape = Shape(*x.shape, len(weight), *weight.shape[2:], *padding)
    sizes = len(x), len(weight), *_pooled(x, weight, padding)
    return _Largest.apply(x, weight, bias, "conv_pool", shape, sizes, torch.uint8)  # type: ignore[no-any-return, no-untyped-call]


def line_max(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.relu(F.conv1d(x, weight, bias)).amax(2)`, in the kernel where that can do it.

    Of equal answers the first gets the slope, where PyTorch shares it out.
    """
    if not _fits(x, weight) or x.shape[2] < weight.shape[2]:
        return F.relu(F.conv1d(x, weight, bias)).amax(2)
    x, weight = x.transpose(1, 2).contiguous(), weight.contiguous()
    shape = Line(len(x), x.shape[2], x.shape[1], len(weight), weight.shape[2])
    sizes = len(x), len(weight)
    return _Largest.apply(x, weight, bias, "line_max", shape, sizes, torch.int32)  # type: ignore[no-any-return, no-untyped-call]


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether these can be given to a kernel: numbers of one kind, in the right dimensions, and not too many."""
    known = x.dim() == weight.dim() and x.dtype == weight.dtype == torch.float32 and x.shape[1] == weight.shape[1]
    return known and x[:1].numel() < MOST and not torch.is_autocast_enabled("cpu")


def _pooled(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> list[int]:
    """Rows and columns of the result."""
    sizes = zip(x.shape[2:], padding, weight.shape[2:], strict=True)
    return [(size + 2 * gap - side + 1) // 2 for size, gap, side in sizes]


class Fused(nn.Module):
    """A convolution with what follows it; the parameters are those of the layer it is made from."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        if isinstance(layer, nn.Conv1d):
            return line_max(x, layer.weight, layer.bias)
        return conv_pool(x, layer.weight, layer.bias, layer.padding)


class Fusion:
    """What is fused in a network: found once, and done to any module of the same layers, also to a shrunk one."""

    def __init__(self, graph: fx.Graph, ends: dict[fx.Node, fx.Node]) -> None:
        """`ends` has, for each convolution, the last node of what follows it."""
        self.names = [str(node.target) for node in ends]
        self.graph = graph
        for number, (node, end) in enumerate(ends.items()):
            with graph.inserting_after(end):
                end.replace_all_uses_with(graph.call_module(f"{PREFIX}{number}", tuple(node.all_input_nodes)))
            for spent in dict.fromkeys((end, end.all_input_nodes[0], node)):
                graph.erase_node(spent)

    @classmethod
    def of(cls, module: nn.Module) -> Fusion | None:
        """None unless all convolutions of the module can be fused: beside others PyTorch's order of memory is better.

        What the module does may depend on its mode, which is that of now.
        """
        layers = dict(module.named_modules())
        plain_numbers = all(p.dtype == torch.float32 for p in module.parameters()) and not list(module.buffers())
        some = any(isinstance(layer, nn.Conv1d | nn.Conv2d) for layer in layers.values())
        graph = trace(module) if plain_numbers and some and library() is not None else None
        if graph is None or not all(known(node, layers) for node in graph.nodes):
            return None
        convolutions = [node for node in graph.nodes if isinstance(layer_of(node, layers), nn.modules.conv._ConvNd)]
        ends = {node: end for node in convolutions if (end := last_of_three(node, layers)) is not None}
        return cls(graph, ends) if convolutions and len(ends) == len(convolutions) else None

    def apply(self, module: nn.Module) -> nn.Module:
        """The fused network, over the module's own parameters."""
        layers = dict(module.named_modules())
        parts = {f"{PREFIX}{number}": Fused(layers[name]) for number, name in enumerate(self.names)}
        with _COMPILING:
            return fx.GraphModule({**layers, **parts}, self.graph)


def last_of_three(node: fx.Node, layers: Layers) -> fx.Node | None:
    """The last of the three that are one kernel, if the convolution is followed so: a ReLU and a pooling by 2, in any
    order, or a ReLU and the maximum over a line."""
    second = only_user(node)
    third = second and only_user(second)
    if second is None or third is None:
        return None
    if slides(node, layers):
        return third if is_relu(second, layers) and is_line_max(third) else None
    layer: Any = layer_of(node, layers)
    if type(layer) is not nn.Conv2d or not plain(layer) or layer.stride != (1, 1):
        return None
    either = (halves(second, layers) and is_relu(third, layers)) or (is_relu(second, layers) and halves(third, layers))
    return third if either else None
