"""The learning problem: a model, its loss and metric, and where the data lie."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from .data import Dataset, Split
from .errors import UserError
from .layout import Layout
from .training import traits
from .training.dropout import keyed
from .training.flat import FlatModule

if TYPE_CHECKING:
    from .sparsity import ChannelGroups
    from .training.chain import Chain, Recipe
    from .training.evaluate import Speaker
    from .training.fused import Fusion

FEW = 2
"""Samples on which it is tried out what a module does."""
Loss = Callable[[Tensor, Tensor], Tensor]
_EXAMPLE_LOSSES: dict[Any, Callable[..., Tensor]] = {
    F.cross_entropy: F.cross_entropy,
    F.mse_loss: F.mse_loss,
    F.l1_loss: F.l1_loss,
    F.smooth_l1_loss: F.smooth_l1_loss,
}
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss)


class Task:
    """A module with its data, loss and metric, ready for any back end. Never changes after it was made."""

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        loss: Loss | None = None,
        metric: Loss | None = None,
        device: str = "cpu",
        kernels: bool = True,
    ) -> None:
        _check_module(module)
        _check_function("loss", loss)
        _check_function("metric", metric)
        self._given = deepcopy(module).cpu()
        self.module = keyed(deepcopy(module)).to(device)
        self.dataset = dataset
        self.device = torch.device(device)
        self.kernels = kernels
        """Whether those who train and score it use kernels of our own, unless they are told otherwise."""
        self.layout = Layout.of(self.module)
        self.start = self.layout.flatten(self.module)
        self.loss = loss or (F.cross_entropy if dataset.classes else squared_error)
        self.metric = metric or (_hits if dataset.classes else _negative_error)
        self._units: MutableMapping[Tensor, Tensor | None] = WeakIdKeyDictionary()
        self.metric_name = _name(metric) if metric else "accuracy" if dataset.classes else "negative_squared_error"
        self._check()

    def _check(self) -> None:
        """One forward pass and one loss on the first samples: a misfit is said now, in one sentence."""
        x, y = self.gather(torch.arange(min(2, len(self.dataset.train))))
        try:
            with torch.no_grad():
                output = deepcopy(self.module).eval()(x)
                if not isinstance(output, Tensor):
                    raise TypeError(f"its forward must give one tensor, not a {type(output).__name__}")
                self._check_shapes(output, y)
                self.loss(output, y)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shape, text = tuple(x.shape[1:]), (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"model {type(self.module).__name__} does not fit data set {self.dataset.name} "
                f"with inputs of shape {shape}: {text}"
            ) from error

    def _check_shapes(self, output: Tensor, target: Tensor) -> None:
        """Misfits that the loss of two samples may not show: too few outputs, or shapes that it would broadcast."""
        crossed = self.loss is F.cross_entropy or isinstance(self.loss, nn.CrossEntropyLoss)
        classes = self.dataset.classes or 0
        if crossed and output.dim() > 1 and output.shape[1] < classes:
            raise ValueError(f"it has {output.shape[1]} outputs for {classes} classes")
        functions = (F.mse_loss, F.l1_loss, F.smooth_l1_loss)
        elementwise = isinstance(self.loss, _ELEMENTWISE) or self.loss in functions
        if elementwise and output.shape != target.shape:
            shapes = f"shape {tuple(output.shape[1:])}, targets {tuple(target.shape[1:])}"
            raise ValueError(f"each output has {shapes}")

    @cached_property
    def example_loss(self) -> Loss | None:
        """The loss of each sample, where the loss is known to be their mean; None for a user's own."""
        if _is_mean(self.loss):
            module: Any = deepcopy(self.loss)
            module.reduction = "none"
            return lambda output, target: _per_sample(module(output, target))
        function = _EXAMPLE_LOSSES.get(self.loss)
        return function and (lambda output, target: _per_sample(function(output, target, reduction="none")))

    @cached_property
    def whole_batches(self) -> bool:
        """True where padding rows would be seen: batch statistics, or a loss that is not a known mean."""
        return self.example_loss is None or traits.mixes_samples(self.module, self._few())

    @cached_property
    def least_batch(self) -> int:
        """Samples that a mini-batch needs: 2 where batch statistics of one would not be defined."""
        return 2 if traits.refuses_one_sample(self.module, self._few()) else 1

    @cached_property
    def draws_randomness(self) -> bool:
        """True if the module draws numbers from torch's global generator (a functional dropout, say)."""
        return traits.draws_randomness(self.module, self._few())

    @cached_property
    def replaces_buffers(self) -> bool:
        """True if the module assigns new tensors to its buffers, which `vmap` would not see."""
        return traits.replaces_buffers(self.module, self._few())

    @cached_property
    def channels_last(self) -> bool:
        """True where a CPU trains faster with the channels of a pixel side by side, and the module allows it."""
        return self.device.type == "cpu" and traits.likes_channels_last(self.module, self._few())

    def fusion(self, module: nn.Module, kernels: bool) -> Fusion | None:
        """What kernels can do in a module with this task's layers, in the mode that it is in.

        Not where chance plays a part: a trace would keep what was drawn while it was made.
        """
        from .training.fused import Fusion

        return Fusion.of(module) if self._for_kernels(kernels) else None

    def recipe(self, module: nn.Module, kernels: bool, slopes: bool) -> Recipe | None:
        """How kernels run a module with this task's layers from its inputs to its outputs, if they know them all, and,
        with `slopes`, its loss."""
        from .training.chain import Recipe

        recipe = Recipe.of(module) if self._for_kernels(kernels) and (self.crossed or not slopes) else None
        if recipe is None:
            return None
        x, y = self.gather(torch.arange(min(FEW, len(self.dataset.train))))
        return recipe if recipe.holds(module, self.start, x, y if slopes else None) else None

    def _for_kernels(self, kernels: bool) -> bool:
        return kernels and self.device.type == "cpu" and not self.draws_randomness

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self._few().shape[1:])

    @property
    def crossed(self) -> bool:
        """True where the loss is the mean cross entropy, without weights or smoothing."""
        if type(self.loss) is nn.CrossEntropyLoss:
            return _is_mean(self.loss) and not self.loss.label_smoothing
        return self.loss is F.cross_entropy

    def forward(self, module: nn.Module, fusion: Fusion | None) -> Callable[[Tensor], Tensor]:
        """How a module with this task's layers is run: with its layers fused where they can be."""
        if fusion is not None or not self.channels_last:
            return module if fusion is None else fusion.apply(module)
        return lambda x: module(traits.channels_last(x))

    def _few(self) -> Tensor:
        return self.gather(torch.arange(min(FEW, len(self.dataset.train))))[0]

    @cached_property
    def train_data(self) -> Split:
        return self._resident(self.dataset.train)

    @cached_property
    def test_data(self) -> Split:
        return self._resident(self.dataset.test)

    def _resident(self, split: Split) -> Split:
        """On a GPU the whole set lies in its memory and batches are gathered by index."""
        if self.device.type == "cpu":
            return split
        return Split(split.x.to(self.device), split.y.to(self.device))

    def gather(self, rows: Tensor, test: bool = False) -> tuple[Tensor, Tensor]:
        """Model inputs and targets of these sample numbers (any shape of `rows`)."""
        split = self.test_data if test else self.train_data
        x = _rows_of(split.x, rows) if self.device.type == "cpu" else split.x[rows]
        return self.dataset.inputs(x), split.y[rows]

    def module_with(self, vector: Tensor) -> nn.Module:
        """A copy of the module as it was given, with these weights, in evaluation mode on the CPU."""
        module = deepcopy(self._given)
        self.layout.load(module, vector.cpu())
        return module.eval()

    @cached_property
    def stacks(self) -> bool:
        """Whether many models of this kind can be treated as one: known layers only, and a mean over samples."""
        from .training.grouped import supports

        return supports(self)

    @cached_property
    def evaluation_module(self) -> FlatModule:
        """The one that ops use where they need gradients; by one thread only."""
        return self.make_evaluation_module()

    @cached_property
    def speaker(self) -> Speaker:
        """The one that ops use where they need none; by one thread only."""
        from .training.evaluate import Speaker

        return Speaker(self, self.kernels)

    @cached_property
    def chain(self) -> Chain | None:
        """Kernels for loss and gradient of the module in evaluation mode, where they know all of it."""
        module = self.evaluation_module.module
        recipe = self.recipe(module, self.kernels, slopes=True)
        return None if recipe is None else recipe.chain(module, self.input_shape)

    def make_evaluation_module(self) -> FlatModule:
        """A module in evaluation mode, to be loaded with one vector after the other; by one thread only."""
        flat = FlatModule(self.module, self.layout, self.device)
        flat.module.eval()
        return flat

    def units_of(self, mask: Tensor) -> Tensor | None:
        """The kept units of a structured mask [layout.size]; None if the mask cuts through units.

        Masks never change, and a device keeps its own for many updates: what was found is remembered while they live.
        """
        if mask not in self._units:
            self._units[mask] = self._find_units(mask)
        return self._units[mask]

    def _find_units(self, mask: Tensor) -> Tensor | None:
        groups = self.groups
        if not groups.count:
            return None
        kept = groups.sums(mask[: self.layout.parameters].to(torch.float32)) > 0
        return kept if torch.equal(groups.expand(kept), mask) else None

    @cached_property
    def spread(self) -> int:
        """Numbers that stand for one sample between the layers, all together."""
        x, _ = self.gather(torch.arange(1))
        return traits.spread(self.module, x)

    @cached_property
    def output_size(self) -> int:
        """Numbers that the model says about one sample."""
        x, _ = self.gather(torch.arange(1))
        with torch.no_grad():
            return int(self.evaluation_module.module(x)[0].numel())

    @cached_property
    def macs(self) -> float:
        """Multiply-accumulates of one sample's forward pass through the unpruned model."""
        from .models import count_macs

        x, _ = self.gather(torch.arange(1))
        return float(count_macs(self.module, x))

    @cached_property
    def groups(self) -> ChannelGroups:
        """The channels that can be pruned, with everything coupled to them."""
        from .sparsity import ChannelGroups

        x, _ = self.gather(torch.arange(1))
        with torch.enable_grad():  # the dependencies are traced by autograd, also in the middle of a flush
            return ChannelGroups.of(self.module, x)

    @cached_property
    def filters(self) -> ChannelGroups:
        """Those of them that are filters or neurons; the columns of an embedding, a table to look up, are neither."""
        tables = {name for name, layer in self.module.named_modules() if isinstance(layer, nn.Embedding)}
        return self.groups.without(*(name for name in self.groups.layers if tables & set(name.split("+"))))


def _check_module(module: nn.Module) -> None:
    """There must be something to train, in numbers that a flat vector keeps as they are."""
    if not isinstance(module, nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise UserError(f"model: must be a torch.nn.Module, not {what}")
    name = type(module).__name__
    trained = {key: value.dtype for key, value in module.named_parameters() if value.requires_grad}
    if not trained:
        raise UserError(f"model {name} has no parameters to train; at least one must require gradients")
    for key, dtype in trained.items():
        if dtype != torch.float32:
            raise UserError(f"model {name}: its parameter {key!r} is of type {dtype}; parameters must be float32")


def _check_function(name: str, given: Loss | None) -> None:
    if given is not None and not callable(given):
        raise UserError(f"{name} = {given!r}: must be a function of outputs and targets")


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]` without negative numbers, row by row: on a CPU up to 40 times as fast as number by number."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])


def squared_error(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """For outputs [B] and [B, 1] alike: targets [B] are never broadcast to [B, B]."""
    return F.mse_loss(output.reshape(target.shape), target, reduction=reduction)


_EXAMPLE_LOSSES[squared_error] = squared_error


def _is_mean(loss: Loss) -> bool:
    """True for PyTorch's loss modules that are the plain mean over samples; class weights make it another."""
    if type(loss) is nn.CrossEntropyLoss:
        return loss.reduction == "mean" and loss.weight is None and loss.ignore_index < 0
    return type(loss) in _ELEMENTWISE and loss.reduction == "mean"  # type: ignore[attr-defined]


def _per_sample(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def _hits(output: Tensor, target: Tensor) -> Tensor:
    """Accuracy, sample by sample."""
    return (output.argmax(-1) == target).float()


def _negative_error(output: Tensor, target: Tensor) -> Tensor:
    """Minus the squared error, so that more is better as with accuracy."""
    return -_per_sample((output.reshape(target.shape) - target) ** 2)


def _name(function: Loss) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
