"""A module run for N sets of weights at once, without `vmap`: its layers, known ones, take all N in a single call.

The module is traced once. Convolutions become one grouped convolution over N*C channels, fully connected layers one
batched matrix product; what acts element by element stays as it is. An activation is held in one of three forms:

- images [B, N*C, ...], as grouped convolutions, norms and pooling want it;
- rows [N, B, ...], as matrix products want it;
- pixels [N, B, H, W, C], as kernels of our own want it where channels come in sixteens.

A layer that is not known here makes `Stacked.of` return None, and the caller falls back to `vmap`. On a GPU with
Triton, convolutions, norms, and pooling after a ReLU, run as kernels of our own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .dropout import Dropout, keep
from .together import Together
from .traced import in_place, name_of, only_user, plain, trace

Named = dict[str, Tensor]
"""Parameters by name, each with a leading N."""

Form = Literal["images", "rows", "pixels"]


@dataclass(frozen=True)
class Act:
    """An activation of N models."""

    data: Tensor
    count: int
    form: Form
    fast: bool = False
    """Layers that have a kernel of their own use it."""

    def as_images(self) -> Tensor:
        return self.data if self.form == "images" else self.as_rows().transpose(0, 1).flatten(1, 2)

    def as_rows(self) -> Tensor:
        if self.form == "pixels":
            return self.data.permute(0, 1, 4, 2, 3)
        if self.form == "rows":
            return self.data
        return self.data.reshape(len(self.data), self.count, -1, *self.data.shape[2:]).transpose(0, 1)

    def as_pixels(self) -> Tensor:
        return self.data if self.form == "pixels" else self.as_rows().permute(0, 1, 3, 4, 2)

    def like(self, data: Tensor) -> Act:
        return self.to(self.form, data)

    def to(self, form: Form, data: Tensor) -> Act:
        return Act(data, self.count, form, self.fast)

    def to_images(self, data: Tensor) -> Act:
        return self.to("images", data)

    def to_rows(self, data: Tensor) -> Act:
        return self.to("rows", data)


@cache
def kernels() -> Any:
    """The module of GPU kernels, or None where Triton is not installed."""
    try:
        from . import kernels as found
    except ImportError:
        return None
    return found


def has_kernels(device: torch.device) -> bool:
    """Whether layers of a stack on the device may use the kernels."""
    return device.type == "cuda" and kernels() is not None


class Stacked:
    """Call it with named parameters [N, ...], inputs as an activation, and dropout keys [N]; gives rows [N, B, …]."""

    def __init__(self, module: nn.Module, graph: fx.Graph, side_by_side: bool = True) -> None:
        self.layers = dict(module.named_modules())
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.start = next(node for node in graph.nodes if node.op == "placeholder")
        self.result = next(node for node in graph.nodes if node.op == "output").args[0]
        last = {need: node for node in self.nodes for need in node.all_input_nodes if need is not self.result}
        self.spent = {node: [need for need in node.all_input_nodes if last.get(need) is node] for node in self.nodes}
        """What no node after this one needs."""
        first = next(iter(self.start.users))
        self.wants_images = first.op == "call_module" and isinstance(self.layers[str(first.target)], nn.Conv2d)
        self.together = Together(self.nodes, self.layers, side_by_side)

    @classmethod
    def of(cls, module: nn.Module, side_by_side: bool = True) -> Stacked | None:
        """The stacked form of a module, or None if some part of it is not known here; with channels side by side on
        a GPU where that can be."""
        graph, layers = trace(module), dict(module.named_modules())
        shared = len(dict(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))
        fit = graph is not None and not shared and all(known(node, layers) for node in graph.nodes)
        return cls(module, graph, side_by_side) if graph and fit else None

    def __call__(self, named: Named, x: Act, keys: Tensor) -> Tensor:
        values: dict[fx.Node, Any] = {self.start: x}

        def at(argument: Any) -> Any:
            return fx.node.map_arg(argument, lambda node: values[node])

        for node in self.nodes:
            args, kwargs = at(node.args), dict(at(node.kwargs))
            values[node] = self._fast(node, named, args, values) if x.fast else None
            if values[node] is None and node.op == "call_module":
                layer = self.layers[str(node.target)]
                values[node] = _layer(layer, str(node.target), named, args[0], keys)
            elif values[node] is None:
                values[node] = FUNCTIONS[name_of(node)](*args, **kwargs)
            for need in self.spent[node]:
                del values[need]
        result: Tensor = values[self.result].as_rows()
        return result

    def _fast(self, node: fx.Node, named: Named, args: Any, values: dict[fx.Node, Any]) -> Act | None:
        """What a kernel that does several things at once, or one for channels side by side, makes of a node."""
        name, together = str(node.target), self.together
        if node in together.passed:
            return args[0]  # type: ignore[no-any-return]
        if node in together.lines:
            name = together.lines[node]
            return _kernel_line(named[f"{name}.weight"], named.get(f"{name}.bias"), args[0])
        if node in together.pools:
            return _kernel_pool(args[0])
        if node in together.joins:
            norm = together.joins[node]
            own, other = args if node.args[0] is norm else args[::-1]
            return _kernel_join(self.layers[str(norm.target)], str(norm.target), named, own, other)
        if node in together.norms:
            return _kernel_norm(self.layers[name], named[f"{name}.weight"], named[f"{name}.bias"], args[0], relu=True)
        if node in together.pixels:
            how = node in together.rectified, node in together.gated
            found, images = _pixel_conv(self.layers[name], name, named, args[0], *how)
            if node in together.relays:
                values[together.relays[node]] = images
            return found
        return None


def known(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        layer = layers[str(node.target)]
        framed = not isinstance(layer, nn.Conv1d | nn.Conv2d) or layer.padding_mode == "zeros"
        return type(layer) in LAYERS and framed
    if node.op in ("call_function", "call_method"):
        if in_place(node, layers) and not only_user(node.all_input_nodes[0]):
            return False
        return name_of(node) in FUNCTIONS and not (name_of(node) in BINARY and node.kwargs)
    return node.op in ("placeholder", "output")


def _layer(layer: nn.Module, name: str, named: Named, x: Act, keys: Tensor) -> Act:
    return LAYERS[type(layer)](layer, named.get(f"{name}.weight"), named.get(f"{name}.bias"), x, keys)


def _conv(layer: Any, weight: Tensor, bias: Tensor | None, x: Act, _: Tensor) -> Act:
    if x.fast and plain(layer):
        return _kernel_conv(layer, weight, bias, x)
    run = F.conv2d if isinstance(layer, nn.Conv2d) else F.conv1d
    flat = None if bias is None else bias.flatten()
    groups = x.count * layer.groups
    data = run(x.as_images(), weight.flatten(0, 1), flat, layer.stride, layer.padding, layer.dilation, groups)
    return x.to_images(data)


def _kernel_conv(layer: Any, weight: Tensor, bias: Tensor | None, x: Act) -> Act:
    """A convolution over a line is one over an image of height 1."""
    images = _cast(x.as_images())
    line = isinstance(layer, nn.Conv1d)
    if line:
        images = images.unsqueeze(2)
    kernel, stride, padding = (
        (first, *given) if line else given
        for first, given in ((1, layer.kernel_size), (1, layer.stride), (0, layer.padding))
    )
    shape = kernels().Shape(
        x.count, len(images), layer.in_channels, *images.shape[2:], layer.out_channels, kernel, stride, padding
    )
    found = kernels().conv(images, weight, bias, shape)
    return x.to_images(found.squeeze(2) if line else found)


def _pixel_conv(layer: Any, name: str, named: Named, x: Act, relu: bool, gated: bool) -> tuple[Act, Act]:
    images, weight, bias = _cast(x.as_pixels()), named[f"{name}.weight"], named.get(f"{name}.bias")
    sizes = layer.in_channels, *images.shape[2:4], layer.out_channels, layer.kernel_size, layer.stride, layer.padding
    shape = kernels().Shape(x.count, images.shape[1], *sizes)
    found, images = kernels().pixels.conv(images, weight, bias, shape, relu, gated)
    return x.to("pixels", found), x.to("pixels", images)


def _kernel_pool(x: Act) -> Act:
    if x.form == "pixels":
        return x.like(kernels().pixel_layers.relu_pool(x.data))
    return x.to_images(kernels().relu_pool(x.as_images()))


def _kernel_line(weight: Tensor, bias: Tensor | None, x: Act) -> Act:
    return x.to_rows(kernels().line_max(_cast(x.as_rows()), weight, bias))


def _cast(data: Tensor) -> Tensor:
    """As autocast, which knows nothing of our kernels, would have it."""
    kind = data.device.type
    return data.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else data


def _linear(layer: Any, weight: Tensor, bias: Tensor | None, x: Act, _: Tensor) -> Act:
    rows = x.as_rows()
    columns = rows.flatten(1, -2).transpose(1, 2)
    # Weights on the left: their gradient then lies in memory as they do, and all are updated by one kernel.
    product = torch.bmm(weight, columns) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, columns)
    return x.to_rows(product.transpose(1, 2).view(*rows.shape[:-1], -1))


def _kernel_join(layer: Any, name: str, named: Named, x: Act, beside: Act) -> Act:
    """A norm, plus what is beside it, and a ReLU after that."""
    weight, bias = named[f"{name}.weight"], named[f"{name}.bias"]
    alike = x.data.shape == beside.data.shape and x.data.dtype == beside.data.dtype
    if _normed_by_pixels(layer, x) and beside.form == "pixels" and alike:
        norm = kernels().pixel_layers.group_norm
        return x.like(norm(x.data, weight, bias, layer.num_groups, layer.eps, True, beside.data))
    total: Act = FUNCTIONS["add"](_kernel_norm(layer, weight, bias, x, relu=False), beside)
    return total.like(torch.relu(total.data))


def _normed_by_pixels(layer: Any, x: Act) -> bool:
    if x.form != "pixels":
        return False
    return kernels().pixel_layers.channels_at_once(x.data.shape[-1], layer.num_groups) is not None


def _kernel_norm(layer: Any, weight: Tensor, bias: Tensor, x: Act, relu: bool) -> Act:
    if _normed_by_pixels(layer, x):
        norm = kernels().pixel_layers.group_norm
        return x.like(norm(x.data, weight, bias, layer.num_groups, layer.eps, relu))
    groups = x.count * layer.num_groups
    return x.to_images(kernels().group_norm(x.as_images(), weight, bias, groups, layer.eps, relu))


def _group_norm(layer: Any, weight: Tensor | None, bias: Tensor | None, x: Act, _: Tensor) -> Act:
    if x.fast and weight is not None and bias is not None:
        return _kernel_norm(layer, weight, bias, x, relu=False)
    scale, shift = (None if part is None else part.flatten() for part in (weight, bias))
    return x.to_images(F.group_norm(x.as_images(), x.count * layer.num_groups, scale, shift, layer.eps))


def _embedding(layer: Any, weight: Tensor, bias: None, x: Act, _: Tensor) -> Act:
    offset = torch.arange(x.count, device=weight.device) * layer.num_embeddings
    ids = x.as_rows() + offset.view(-1, *[1] * (x.as_rows().dim() - 1))
    return x.to_rows(F.embedding(ids, weight.flatten(0, 1)))


def _dropout(layer: Any, weight: None, bias: None, x: Act, keys: Tensor) -> Act:
    rows = x.as_rows()
    masks = [keep(layer, rows.shape[1:], key) for key in keys.unbind()]
    return x.to_rows(rows * torch.stack(masks).to(rows.dtype) / (1 - layer.p))


def _spatial(layer: Any, weight: None, bias: None, x: Act, _: Tensor) -> Act:
    """Layers without weights that act on each channel's map alone."""
    return x.to_images(layer(x.as_images()))


def _pointwise(layer: Any, weight: None, bias: None, x: Act, _: Tensor) -> Act:
    return x.like(layer(x.data))


def _flat(layer: Any, weight: None, bias: None, x: Act, _: Tensor) -> Act:
    return flatten(x, layer.start_dim, layer.end_dim)


LAYERS: dict[type[nn.Module], Callable[..., Act]] = {
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
    Dropout: _dropout,
    nn.Flatten: _flat,
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d), _spatial),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), _spatial),
    **dict.fromkeys((nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Identity), _pointwise),
}


def flatten(x: Act, start_dim: int = 0, end_dim: int = -1) -> Act:
    rows = x.as_rows()
    end = end_dim if end_dim < 0 else end_dim + 1
    return x.to_rows(rows.flatten(start_dim + 1, end))


def _reduced(run: Callable[..., Tensor]) -> Callable[..., Act]:
    """A reduction over dimensions of the single model's activation, whose dimension 0 is the batch."""

    def apply(x: Act, dim: int | tuple[int, ...], keepdim: bool = False) -> Act:
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        if x.form == "images" and all(d >= 2 for d in dims):
            kept = x.to_images(run(x.data, dims, keepdim))
            return kept if keepdim or x.data.dim() - len(dims) > 2 else x.to_rows(kept.as_rows())
        return x.to_rows(run(x.as_rows(), tuple(d + 1 if d >= 0 else d for d in dims), keepdim))

    return apply


def _elementwise(run: Callable[..., Tensor]) -> Callable[..., Act]:
    return lambda x, *_, **__: x.like(run(x.data))


def _pool(run: Callable[..., Tensor]) -> Callable[..., Act]:
    return lambda x, *args, **kwargs: x.to_images(run(x.as_images(), *args, **kwargs))


def _binary(run: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Act]:
    def apply(left: Any, right: Any) -> Act:
        if not isinstance(right, Act):
            return left.like(run(left.data, right))  # type: ignore[no-any-return]
        if not isinstance(left, Act):
            return right.like(run(left, right.data))
        if left.form == right.form:
            return left.like(run(left.data, right.data))
        return left.to_rows(run(left.as_rows(), right.as_rows()))

    return apply


def _cat(parts: list[Act], dim: int = 0) -> Act:
    return parts[0].to_rows(torch.cat([part.as_rows() for part in parts], dim + 1 if dim >= 0 else dim))


def _transpose(x: Act, first: int, second: int) -> Act:
    first, second = (dim + 1 if dim >= 0 else dim for dim in (first, second))
    return x.to_rows(x.as_rows().transpose(first, second))


BINARY = {name: _binary(getattr(operator, name)) for name in ("add", "sub", "mul")}

FUNCTIONS: dict[str, Callable[..., Act]] = {
    "relu": _elementwise(torch.relu),
    "tanh": _elementwise(torch.tanh),
    "sigmoid": _elementwise(torch.sigmoid),
    "gelu": _elementwise(F.gelu),
    "silu": _elementwise(F.silu),
    "max_pool2d": _pool(F.max_pool2d),
    "boolean_dispatch": _pool(F.max_pool2d),
    "avg_pool2d": _pool(F.avg_pool2d),
    "adaptive_avg_pool2d": _pool(F.adaptive_avg_pool2d),
    "flatten": flatten,
    "mean": _reduced(torch.mean),
    "sum": _reduced(torch.sum),
    "amax": _reduced(torch.amax),
    **BINARY,
    "cat": _cat,
    "transpose": _transpose,
}
