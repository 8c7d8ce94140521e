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
from .traced import halves, is_line_max, is_relu, name_of, only_user, plain, slides, trace

Named = dict[str, Tensor]
"""Parameters by name, each with a leading N."""
COLOURS = 4
"""Most channels of an image that is not made by a network."""


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


def pixels() -> Any:
    """The module of kernels for images whose channels lie side by side."""
    return kernels().pixels


def has_kernels(device: torch.device) -> bool:
    """Whether layers of a stack on the device may use the kernels."""
    return device.type == "cuda" and kernels() is not None


class Stacked:
    """Call it with named parameters [N, ...], inputs as an activation, and dropout keys [N]; gives rows [N, B, …]."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.layers = dict(module.named_modules())
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.start = next(node for node in graph.nodes if node.op == "placeholder")
        self.result = next(node for node in graph.nodes if node.op == "output").args[0]
        last = {need: node for node in self.nodes for need in node.all_input_nodes if need is not self.result}
        self.spent = {node: [need for need in node.all_input_nodes if last.get(need) is node] for node in self.nodes}
        """What no node after this one needs."""
        first = next(iter(self.start.users))
        self.wants_images = first.op == "call_module" and isinstance(self.layers[str(first.target)], nn.Conv2d)
        relus = [node for node in self.nodes if is_relu(node, self.layers)]
        before = {relu: user for relu in relus if (user := only_user(relu)) and halves(user, self.layers)}
        after = {relu: node for relu in relus if only_user(node := relu.all_input_nodes[0])}
        self.pools = {*before.values(), *(node for node in after.values() if halves(node, self.layers))}
        self.norms = {node for node in after.values() if self._normed(node)}
        """Poolings and norms that take the ReLU before or after them along."""
        self.relus = {*before, *(relu for relu, node in after.items() if node in self.pools | self.norms)}
        found = {user: relu for relu in after if (user := only_user(relu)) and is_line_max(user)}
        lines = {most: after[relu] for most, relu in found.items() if slides(after[relu], self.layers)}
        self.lines = {most: str(conv.target) for most, conv in lines.items()}
        """Maxima over a line, after a ReLU after a convolution, with the name of that: all three are one kernel."""
        self.passed = self.relus | set(lines.values()) | {found[most] for most in lines}
        """What leaves its work to a node after it, or has left it to one before."""
        found_here = {node: self.layers[str(node.target)] for node in self.nodes if node.op == "call_module"}
        convolutions = {node: layer for node, layer in found_here.items() if isinstance(layer, nn.Conv1d | nn.Conv2d)}
        self.pixels = set(convolutions) if all(map(in_sixteens, convolutions.values())) else set()
        """Convolutions of images whose channels lie side by side: all there are, or none."""

    @classmethod
    def of(cls, module: nn.Module) -> Stacked | None:
        """The stacked form of a module, or None if some part of it is not known here."""
        graph, layers = trace(module), dict(module.named_modules())
        return cls(module, graph) if graph and all(known(node, layers) for node in graph.nodes) else None

    def _normed(self, node: fx.Node) -> bool:
        layer = self.layers.get(str(node.target))
        return type(layer) is nn.GroupNorm and layer.affine

    def __call__(self, named: Named, x: Act, keys: Tensor) -> Tensor:
        values: dict[fx.Node, Any] = {self.start: x}

        def at(argument: Any) -> Any:
            return fx.node.map_arg(argument, lambda node: values[node])

        for node in self.nodes:
            args, kwargs = at(node.args), dict(at(node.kwargs))
            if x.fast and node in self.passed:
                values[node] = args[0]
            elif x.fast and node in self.lines:
                name = self.lines[node]
                values[node] = _kernel_line(named[f"{name}.weight"], named.get(f"{name}.bias"), args[0])
            elif x.fast and node in self.pools:
                values[node] = _kernel_pool(args[0])
            elif x.fast and node in self.norms:
                name = str(node.target)
                weight, bias = named[f"{name}.weight"], named[f"{name}.bias"]
                values[node] = _kernel_norm(self.layers[name], weight, bias, args[0], relu=True)
            elif x.fast and node in self.pixels:
                values[node] = _pixel_conv(self.layers[str(node.target)], str(node.target), named, args[0])
            elif node.op == "call_module":
                layer = self.layers[str(node.target)]
                values[node] = _layer(layer, str(node.target), named, args[0], keys)
            else:
                values[node] = FUNCTIONS[name_of(node)](*args, **kwargs)
            for need in self.spent[node]:
                del values[need]
        result: Tensor = values[self.result].as_rows()
        return result


def known(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        layer = layers[str(node.target)]
        framed = not isinstance(layer, nn.Conv1d | nn.Conv2d) or layer.padding_mode == "zeros"
        return type(layer) in LAYERS and framed
    if node.op in ("call_function", "call_method"):
        return name_of(node) in FUNCTIONS
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


def in_sixteens(layer: nn.Module) -> bool:
    """True for a small kernel over images that makes multiples of 16 channels out of such, or out of a few colours."""
    if not isinstance(layer, nn.Conv2d) or not plain(layer) or max(layer.kernel_size) > 3:
        return False
    return layer.out_channels % 16 == 0 and (layer.in_channels % 16 == 0 or layer.in_channels <= COLOURS)


def _pixel_conv(layer: Any, name: str, named: Named, x: Act) -> Act:
    images, weight, bias = _cast(x.as_pixels()), named[f"{name}.weight"], named.get(f"{name}.bias")
    sizes = layer.in_channels, *images.shape[2:4], layer.out_channels, layer.kernel_size, layer.stride, layer.padding
    return x.to("pixels", pixels().conv(images, weight, bias, kernels().Shape(x.count, images.shape[1], *sizes)))


def _kernel_pool(x: Act) -> Act:
    if x.form == "pixels":
        return x.like(pixels().relu_pool(x.data))
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


def _kernel_norm(layer: Any, weight: Tensor, bias: Tensor, x: Act, relu: bool) -> Act:
    if x.form == "pixels":
        return x.like(pixels().group_norm(x.data, weight, bias, layer.num_groups, layer.eps, relu))
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
    "add": _binary(operator.add),
    "sub": _binary(operator.sub),
    "mul": _binary(operator.mul),
    "cat": _cat,
    "transpose": _transpose,
}
