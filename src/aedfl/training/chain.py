"""On a CPU: networks that are a chain of layers which our kernels know are trained in one call, all mini-batches of a
job, without Python between the steps, so that jobs on several threads do not wait for each other.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional as F

from ..layout import Layout
from ..native import Layer, Shape, Steps, library, pointer
from .fused import MOST, last_of_three
from .plan import Indices, Plan, TrainJob, TrainResult, batches
from .traced import Layers, is_flatten, is_relu, layer_of, name_of, only_user, trace

DENSE, IMAGE, WORDS = range(3)
"""Kinds of layers, as in chain.c."""
FEW = 100
"""Samples that are run at once, so that a cache holds what becomes of them. With words more are better: each is looked
up once."""
AT_ONCE = 1 << 24
"""Numbers of samples that a call gets at most, but for those of one mini-batch."""


@dataclass(frozen=True)
class Link:
    """One layer of a chain, by its name in the module."""

    kind: int
    name: str
    level: int
    relu: bool = True
    flat: bool = False
    """Whether all dimensions of a sample are made one before."""
    table: str = ""
    """Name of the embedding that a convolution over words looks up."""


class Recipe:
    """Which layers follow which: found once, and true of any module of the same layers, also of a shrunk one."""

    def __init__(self, links: list[Link]) -> None:
        self.links = links

    @classmethod
    def of(cls, module: nn.Module) -> Recipe | None:
        """None unless the module is such a chain, with weights that are all trained, and each used once."""
        if library() is None or not _plain(module):
            return None
        layers, graph = dict(module.named_modules()), trace(module)
        links = None if graph is None else _links(graph, layers)
        if not links:
            return None
        names = [link.name for link in links] + sorted({link.table for link in links if link.table})
        return cls(links) if len(set(names)) == len(names) else None

    def holds(self, module: nn.Module, start: Tensor, x: Tensor, y: Tensor | None) -> bool:
        """Whether some samples come out as by PyTorch, and, if there are labels, the gradient of their cross entropy:
        a trace does not show everything that a module may do.
        """
        chain = self.chain(module, tuple(x.shape[1:]))
        if chain is None or not chain.takes(x, y):
            return False
        leaf = start.clone().requires_grad_()
        with torch.enable_grad():
            said = functional_call(module, Layout.of(module).views(leaf), (x,))
            if not isinstance(said, Tensor) or not _near(chain.run(start, x), said):
                return False
            if y is None:
                return True
            loss = F.cross_entropy(said, y)
            (slopes,) = torch.autograd.grad(loss, leaf) if loss.requires_grad else (start * torch.nan,)
        return _near(chain.slopes(start, x, y)[1], slopes)

    def chain(self, module: nn.Module, inputs: tuple[int, ...]) -> Chain | None:
        """The chain of a module for samples of a shape; None where the kernels cannot do it."""
        layers, offsets = dict(module.named_modules()), {e.name: e.offset for e in Layout.of(module).entries}
        found: list[Layer] = []
        size, column, level = inputs, 0, 0
        for link in self.links:
            if link.level != level:
                size, column, level = (column,) if found[-1].kind == WORDS else size, 0, link.level
            made = _layer(link, layers, offsets, size)
            if made is None:
                return None
            made.column, made.level, made.relu = column, link.level, link.relu
            found.append(made)
            if link.kind == WORDS:
                column += made.outputs
            else:
                size = _after(made)
        return Chain(found, Layout.of(module).parameters, inputs)


class Chain:
    """A network whose layers are known, to be trained and run on flat vectors. Many threads may use one."""

    def __init__(self, layers: list[Layer], parameters: int, inputs: tuple[int, ...]) -> None:
        self.layers = (Layer * len(layers))(*layers)
        self.parameters = parameters
        self.inputs = inputs
        self.words = layers[0].words if layers[0].kind == WORDS else 0
        """Words that the embedding knows; 0 if the inputs are numbers."""
        self.classes = layers[-1].outputs

    def takes(self, x: Tensor, y: Tensor | None = None) -> bool:
        """Whether these samples and labels are such as the kernels trust them to be."""
        kind = torch.int64 if self.words else torch.float32
        if x.dtype != kind or tuple(x.shape[1:]) != self.inputs or not len(x) or torch.is_autocast_enabled("cpu"):
            return False
        if self.words and not _within(x, self.words):
            return False
        return y is None or (y.dtype == torch.int64 and y.dim() == 1 and _within(y, self.classes))

    def train(self, plan: Plan, job: TrainJob, gather: Any, least: int) -> TrainResult | None:
        """Local training of a job; None where its samples are not what they should be.

        `gather` gives inputs and targets of sample numbers, `least` is the smallest mini-batch.
        """
        count, each = len(job.samples), int(np.prod(self.inputs))
        if not count:
            return None
        order = batches(job, plan.batch_size, least)[:, :count]
        parts = [(job.samples, _places(job, order))] if count * each <= AT_ONCE else _stretches(order, each)
        mask = None if job.mask is None else job.mask.to(torch.float32).contiguous()
        vector = job.vector.clone() if mask is None else job.vector * mask
        anchor = (job.vector if job.anchor is None else job.anchor).contiguous()
        velocity = torch.zeros(self.parameters, dtype=torch.float32) if plan.momentum else None
        gradient = torch.zeros(self.parameters if plan.probe else 0, dtype=torch.float32)
        first, total, steps = 0.0, 0.0, int((order[:, 0] >= 0).sum())
        for number, (rows, places) in enumerate(parts):
            x, y = gather(torch.from_numpy(rows.copy()))  # numpy's may be read-only, or run backwards
            if not self.takes(x, y):
                return None
            x, y = x.contiguous(), y.contiguous()
            settings = self._settings(plan, job.lr, len(x), places)
            probe = gradient if plan.probe and not number else None
            losses = (ctypes.c_double * 2)()
            places = np.ascontiguousarray(places)
            tensors = (x, y, torch.from_numpy(places), vector, velocity, anchor, mask, probe)
            self._call("chain_train", settings, tensors, losses)
            first, total = first if number else losses[0], total + losses[1]
        if mask is not None:
            vector = torch.where(mask > 0, vector, job.vector)
        mean, begin = torch.tensor([total / max(1, steps), first], dtype=torch.float32)
        return TrainResult(vector, mean, begin, gradient)

    def slopes(self, vector: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy [] of samples that the chain takes, and its gradient [parameters]."""
        job = TrainJob(vector, np.arange(len(x)), (0,), 0.0, 1)
        found = self.train(Plan(batch_size=len(x), probe=True), job, lambda rows: (x[rows], y[rows]), 1)
        assert found is not None, "ask `takes` first"
        return found.first_loss, found.gradient

    def run(self, vector: Tensor, x: Tensor) -> Tensor:
        """What the network with these weights says to some samples."""
        said, vector = torch.empty(len(x), self.classes, dtype=torch.float32), vector.contiguous()
        few = len(x) if self.words else FEW
        for begin in range(0, len(x), few):
            part = x[begin : begin + few].contiguous()
            which = np.arange(len(part)).reshape(1, -1)
            settings = self._settings(Plan(), 0.0, len(part), which)
            self._call("chain_run", settings, (part, torch.from_numpy(which), vector, said[begin:]))
        return said

    def _settings(self, plan: Plan, lr: float, samples: int, order: Indices) -> Steps:
        clip = -1.0 if plan.clip_norm is None else plan.clip_norm
        sizes = len(self.layers), self.parameters, order.shape[1], samples, len(order)
        return Steps(*sizes, lr, plan.momentum, plan.weight_decay, plan.proximal, clip)

    def _call(self, kernel: str, settings: Steps, tensors: tuple[Tensor | None, ...], *more: Any) -> None:
        kernels = library()
        assert kernels is not None, "ask `Recipe.of` first"
        if not getattr(kernels, kernel)(self.layers, ctypes.byref(settings), *map(pointer, tensors), *more):
            raise MemoryError("no memory to train a model")


def _places(job: TrainJob, order: Indices) -> Indices:
    """Sample numbers as places in the job's own list of them; -1 stays."""
    sorting = np.argsort(job.samples, kind="stable")
    found = sorting[np.searchsorted(job.samples, np.maximum(order, job.samples.min()), sorter=sorting)]
    return np.where(order < 0, -1, found)


def _stretches(order: Indices, each: int) -> list[tuple[Indices, Indices]]:
    """Many steps in parts of a few: the samples of each part, and their places there."""
    steps = max(1, AT_ONCE // (each * order.shape[1]))
    found = []
    for begin in range(0, len(order), steps):
        part = order[begin : begin + steps]
        if (part >= 0).any():
            places = np.where(part < 0, -1, (np.cumsum(part >= 0) - 1).reshape(part.shape))
            found.append((part[part >= 0], places))
    return found


def _near(ours: Tensor, theirs: Tensor) -> bool:
    """Within what rounding leaves of the whole."""
    if ours.shape != theirs.shape:
        return False
    return bool((ours - theirs).norm() <= 1e-3 * theirs.norm() + 1e-6)


def _within(numbers: Tensor, count: int) -> bool:
    low, high = torch.aminmax(numbers)
    return bool(low >= 0) and bool(high < count)


def _plain(module: nn.Module) -> bool:
    """Trained numbers of one kind alone."""
    return not list(module.buffers()) and all(p.dtype == torch.float32 and p.requires_grad for p in module.parameters())


def _links(graph: fx.Graph, layers: Layers) -> list[Link] | None:
    """The chain from the input to the output, or None if there is more to it."""
    node = only_user(next(n for n in graph.nodes if n.op == "placeholder"))
    links: list[Link] = []
    if node is not None and _is_table(layer_of(node, layers)):
        node, links = _branches(node, layers)
    flat = False
    while node is not None and node.op != "output":
        layer, level = layer_of(node, layers), links[-1].level + 1 if links else 0
        if isinstance(layer, nn.Conv2d) and not flat:
            links.append(Link(IMAGE, str(node.target), level))
            node = last_of_three(node, layers)
        elif type(layer) is nn.Linear:
            after = only_user(node)
            relu = after is not None and is_relu(after, layers)
            links.append(Link(DENSE, str(node.target), level, relu, flat))
            node = after if relu else node
        elif is_flatten(node, layers):
            flat = True
        else:
            return None
        node = node and only_user(node)
    ends = node is not None and isinstance(node.args[0], fx.Node) and bool(links) and links[-1].kind == DENSE
    return links if ends else None


def _branches(node: fx.Node, layers: Layers) -> tuple[fx.Node | None, list[Link]]:
    """Convolutions over words side by side, up to the node that comes behind them."""
    table, turned = str(node.target), only_user(node)
    sides = set() if turned is None else {dim % 3 for dim in turned.args[1:] if isinstance(dim, int)}
    if turned is None or name_of(turned) != "transpose" or sides != {1, 2}:
        return None, []
    ends = {user: last_of_three(user, layers) for user in turned.users}
    users = {only_user(end) if end is not None else None for end in ends.values()}
    behind = users.pop()
    if behind is None or users or any(not isinstance(layer_of(n, layers), nn.Conv1d) for n in ends):
        return None, []
    names = {end: str(n.target) for n, end in ends.items()}
    together = list(names)
    if len(ends) > 1 or name_of(behind) == "cat":
        joined = behind.args[1:] in ((1,), (-1,)) or (len(behind.args) == 1 and behind.kwargs.get("dim") in (1, -1))
        if name_of(behind) != "cat" or not joined or set(behind.kwargs) - {"dim"}:
            return None, []
        together = list(behind.args[0])  # type: ignore[arg-type]
        behind = only_user(behind)
    if len(together) != len(ends):
        return None, []
    return behind, [Link(WORDS, names[end], 0, table=table) for end in together]


def _is_table(layer: nn.Module | None) -> bool:
    """An embedding that does nothing but look up."""
    plain = type(layer) is nn.Embedding and layer.padding_idx is None and layer.max_norm is None
    return plain and not layer.scale_grad_by_freq and not layer.sparse  # type: ignore[union-attr]


def _layer(link: Link, layers: Layers, offsets: dict[str, int], size: tuple[int, ...]) -> Layer | None:
    """What the kernels are told of a layer that gets samples of a size."""
    layer: Any = layers[link.name]
    weight, bias = offsets.get(f"{link.name}.weight", -1), offsets.get(f"{link.name}.bias", -1)
    shape = Shape()
    if weight < 0 or (bias < 0) != (layer.bias is None):
        return None  # shared with another layer
    if link.kind == WORDS:
        table: Any = layers[link.table]
        fits = len(size) == 1 and size[0] >= layer.kernel_size[0] and table.weight.shape[1] == layer.weight.shape[1]
        if not fits or f"{link.table}.weight" not in offsets:
            return None
        words = offsets[f"{link.table}.weight"], *table.weight.shape, layer.kernel_size[0]
        return Layer(WORDS, 0, 1, size[0], len(layer.weight), 0, weight, bias, shape, *words)
    count = int(np.prod(size))
    if link.kind == DENSE:
        fits = (link.flat or len(size) == 1) and count == layer.weight.shape[1]
        return Layer(DENSE, 0, 0, count, len(layer.weight), 0, weight, bias, shape) if fits else None
    if len(size) != 3 or size[0] != layer.weight.shape[1] or count >= MOST:
        return None
    shape = Shape(1, *size, len(layer.weight), *layer.weight.shape[2:], *layer.padding)
    pooled = _pooled(shape)
    outputs = shape.filters * pooled[0] * pooled[1]
    return Layer(IMAGE, 0, 1, count, outputs, 0, weight, bias, shape) if min(pooled) > 0 else None


def _pooled(shape: Shape) -> tuple[int, int]:
    rows = shape.height + 2 * shape.over - shape.rows + 1
    return rows // 2, (shape.width + 2 * shape.left - shape.columns + 1) // 2


def _after(layer: Layer) -> tuple[int, ...]:
    return (layer.image.filters, *_pooled(layer.image)) if layer.kind == IMAGE else (layer.outputs,)
