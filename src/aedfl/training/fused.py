"""On a CPU: a convolution, its ReLU and the pooling beside it in one kernel, so that slopes are gathered where the
largest answers were instead of convolved.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..native import Shape, library, pointer
from .stacked import known
from .traced import halves, is_relu, layer_of, only_user, plain, trace

PREFIX = "_aedfl_conv_pool_"
"""Of the names of fused layers in a graph."""
MOST = 1 << 28
"""Numbers of a sample that are too many for the kernel."""
_COMPILING = threading.Lock()
"""Held while a graph becomes code: `torch.fx` writes into its nodes meanwhile."""


class _ConvPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        kernels = library()
        assert kernels is not None, "ask `Fusion.of` first"
        x, weight = x.contiguous(), weight.contiguous()
        shape = Shape(*x.shape, len(weight), *weight.shape[2:], *padding)
        y = x.new_empty(len(x), len(weight), *_pooled(x, weight, padding))
        where = torch.empty_like(y, dtype=torch.uint8)
        shift = weight.new_zeros(len(weight)) if bias is None else bias.contiguous()
        _called(kernels.conv_pool, shape, x, weight, shift, y, where)
        ctx.save_for_backward(x, weight, where)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        kernels = library()
        assert kernels is not None
        x, weight, where = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw, db = torch.empty_like(weight), weight.new_empty(len(weight))
        _called(kernels.conv_pool_slopes, ctx.shape, x, weight, g.contiguous(), where, dw, db, dx)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None


def _called(kernel: Any, shape: Shape, *tensors: Tensor | None) -> None:
    if not kernel(ctypes.byref(shape), *map(pointer, tensors)):
        raise MemoryError("no memory for a convolution")


def conv_pool(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """`F.relu(F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2))`, in the kernel where that can do it."""
    fits = x.dim() == 4 and x.dtype == weight.dtype == torch.float32 and x.shape[1] == weight.shape[1]
    if not fits or min(_pooled(x, weight, padding)) < 1 or x[:1].numel() >= MOST or torch.is_autocast_enabled("cpu"):
        return F.relu(F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2))  # which says what is wrong, if it is
    return _ConvPool.apply(x, weight, bias, padding)  # type: ignore[no-any-return, no-untyped-call]


def _pooled(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> list[int]:
    """Rows and columns of the result."""
    sizes = zip(x.shape[2:], padding, weight.shape[2:], strict=True)
    return [(size + 2 * gap - side + 1) // 2 for size, gap, side in sizes]


class ConvPool(nn.Module):
    """A convolution with what follows it; the parameters are those of the layer it is made from."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
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
        images = any(isinstance(layer, nn.Conv2d) for layer in layers.values())
        graph = trace(module) if plain_numbers and images and library() is not None else None
        if graph is None or not all(known(node, layers) for node in graph.nodes):
            return None
        convolutions = [node for node in graph.nodes if isinstance(layer_of(node, layers), nn.modules.conv._ConvNd)]
        ends = {node: end for node in convolutions if (end := _end(node, layers)) is not None}
        return cls(graph, ends) if convolutions and len(ends) == len(convolutions) else None

    def apply(self, module: nn.Module) -> nn.Module:
        """The fused network, over the module's own parameters."""
        layers = dict(module.named_modules())
        parts = {f"{PREFIX}{number}": ConvPool(layers[name]) for number, name in enumerate(self.names)}
        with _COMPILING:
            return fx.GraphModule({**layers, **parts}, self.graph)


def _end(node: fx.Node, layers: dict[str, nn.Module]) -> fx.Node | None:
    """The last of a convolution, a pooling by 2 and a ReLU, these two in any order; None if it is not followed so."""
    layer: Any = layer_of(node, layers)
    if type(layer) is not nn.Conv2d or not plain(layer) or layer.stride != (1, 1):
        return None
    second = only_user(node)
    third = second and only_user(second)
    if second is None or third is None:
        return None
    either = (halves(second, layers) and is_relu(third, layers)) or (is_relu(second, layers) and halves(third, layers))
    return third if either else None
