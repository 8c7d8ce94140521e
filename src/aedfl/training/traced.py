"""Modules traced by `torch.fx`, and what is to be seen in a trace: which layers follow which."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from .dropout import Dropout

Layers = Mapping[str, nn.Module]
"""The modules of a network by their names in a trace."""

POOLING: dict[str, Any] = {
    "kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False,
}  # fmt: skip
"""Arguments of a pooling in their order, with their defaults."""


_ALONE = threading.Lock()
"""Held while a module is traced: `torch.fx` takes hold of all calls of modules meanwhile."""


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._modes = _modes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Gradients that are switched off for a part, or another precision there, would leave no sign in the graph."""
        if _modes() != self._modes:
            raise ValueError("a trace would not show this")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return isinstance(m, Dropout) or super().is_leaf_module(m, name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What other threads do with their modules is none of this trace's business."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def trace(module: nn.Module) -> fx.Graph | None:
    """What a module does to its one input, or None if that depends on more than its layers, or somebody listens in."""
    if any(map(_touched, module.modules())):
        return None
    try:
        with _ALONE, torch.enable_grad():
            graph = _Tracer().trace(module)
    except Exception:  # a forward may do anything with what is no tensor
        return None
    return graph if sum(node.op == "placeholder" for node in graph.nodes) == 1 else None


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _touched(layer: nn.Module) -> bool:
    """True where a call of the layer does more than its class says: hooks, or a `forward` of its own."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer)


def name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def layer_of(node: fx.Node, layers: Layers) -> nn.Module | None:
    return layers.get(str(node.target)) if node.op == "call_module" else None


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_relu(node: fx.Node, layers: Layers) -> bool:
    if node.op == "call_module":
        return type(layer_of(node, layers)) is nn.ReLU
    return node.op in ("call_function", "call_method") and name_of(node) == "relu"


def in_place(node: fx.Node, layers: Layers) -> bool:
    """True for a ReLU that changes what all others who use its input see."""
    if not is_relu(node, layers):
        return False
    if node.op == "call_module":
        return bool(getattr(layer_of(node, layers), "inplace", False))
    return bool(node.kwargs.get("inplace", len(node.args) > 1 and node.args[1]))


def is_flatten(node: fx.Node, layers: Layers) -> bool:
    """True where all dimensions of a sample become one."""
    if node.op == "call_module":
        layer: Any = layer_of(node, layers)
        return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
    asked = {"start_dim": 0, "end_dim": -1} | dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False))
    return name_of(node) == "flatten" and asked | dict(node.kwargs) == {"start_dim": 1, "end_dim": -1}


def halves(node: fx.Node, layers: Layers) -> bool:
    """True for a pooling of 2 by 2 without more."""
    layer = layer_of(node, layers)
    if type(layer) is nn.MaxPool2d:
        asked = {name: getattr(layer, name) for name in POOLING}
    elif node.op == "call_function" and name_of(node) in ("max_pool2d", "boolean_dispatch"):
        asked = POOLING | dict(zip(POOLING, node.args[1:], strict=False)) | dict(node.kwargs)
    else:
        return False
    asked["stride"] = asked["stride"] or asked["kernel_size"]
    pairs = {(size, size) if isinstance(size, int) else tuple(size) for size in (asked["kernel_size"], asked["stride"])}
    return pairs == {(2, 2)} and all(asked[name] == POOLING[name] for name in tuple(POOLING)[2:])


def is_line_max(node: fx.Node) -> bool:
    """True for a maximum over the last dimension of [batch, channels, places]."""
    dims = node.args[1:] if len(node.args) > 1 else (node.kwargs.get("dim"),)
    return name_of(node) == "amax" and dims in ((2,), (-1,)) and not node.kwargs.get("keepdim")


def slides(node: fx.Node, layers: Layers) -> bool:
    """True for a convolution over a line, step by step and without padding."""
    layer = layer_of(node, layers)
    return type(layer) is nn.Conv1d and plain(layer) and layer.stride == (1,) and layer.padding == (0,)


def plain(layer: Any) -> bool:
    """True for a convolution of all channels with all filters, without gaps, zeros around."""
    dense = layer.groups == 1 and set(layer.dilation) == {1}
    return dense and not isinstance(layer.padding, str) and layer.padding_mode == "zeros"
