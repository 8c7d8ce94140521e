"""The learning problem: a model, its loss and metric, and where the data lie."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import Dataset, Split
from .errors import UserError
from .layout import Layout
from .training.dropout import Dropout, keyed

if TYPE_CHECKING:
    from .sparsity import ChannelGroups

Loss = Callable[[Tensor, Tensor], Tensor]
_EXAMPLE_LOSSES: dict[Any, Callable[..., Tensor]] = {
    F.cross_entropy: F.cross_entropy,
    F.mse_loss: F.mse_loss,
    F.l1_loss: F.l1_loss,
    F.smooth_l1_loss: F.smooth_l1_loss,
}


class Task:
    """A module with its data, loss and metric, ready for any back end. Never changes after it was made."""

    def __init__(
        self,
        module: nn.Module,
        dataset: Dataset,
        loss: Loss | None = None,
        metric: Loss | None = None,
        device: str = "cpu",
    ) -> None:
        self.module = keyed(deepcopy(module)).to(device)
        self.dataset = dataset
        self.device = torch.device(device)
        self.layout = Layout.of(self.module)
        self.start = self.layout.flatten(self.module)
        self.loss = loss or (F.cross_entropy if dataset.classes else F.mse_loss)
        self.metric = metric or (_hits if dataset.classes else _negative_error)
        self.metric_name = _name(metric) if metric else "accuracy" if dataset.classes else "negative_squared_error"
        self.dropouts = [m for m in self.module.modules() if isinstance(m, Dropout)]
        self._check()

    def _check(self) -> None:
        """One forward pass and one loss on the first samples: a misfit is said now, in one sentence."""
        x, y = self.gather(torch.arange(min(2, len(self.dataset.train))))
        try:
            with torch.no_grad():
                self.loss(deepcopy(self.module).eval()(x), y)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shape, text = tuple(x.shape[1:]), str(error).splitlines()[0]
            raise UserError(
                f"model {type(self.module).__name__} does not fit data set {self.dataset.name} "
                f"with inputs of shape {shape}: {text}"
            ) from error

    @cached_property
    def example_loss(self) -> Loss | None:
        """The loss of each sample, where the loss is known to be their mean; None for a user's own."""
        if isinstance(self.loss, nn.CrossEntropyLoss | nn.MSELoss | nn.L1Loss) and self.loss.reduction == "mean":
            module = deepcopy(self.loss)
            module.reduction = "none"
            return lambda output, target: _per_sample(module(output, target))
        function = _EXAMPLE_LOSSES.get(self.loss)
        return function and (lambda output, target: _per_sample(function(output, target, reduction="none")))

    @cached_property
    def whole_batches(self) -> bool:
        """True where padding rows would be seen: batch statistics, or a loss that is not a known mean."""
        norms = (nn.modules.batchnorm._BatchNorm,)
        return self.example_loss is None or any(isinstance(m, norms) for m in self.module.modules())

    @cached_property
    def draws_randomness(self) -> bool:
        """True if the module draws numbers from torch's global generator (a functional dropout, say)."""
        x, _ = self.gather(torch.arange(min(2, len(self.dataset.train))))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.random.get_rng_state()
            deepcopy(self.module).train()(x)
            return not torch.equal(before, torch.random.get_rng_state())

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
        return self.dataset.inputs(split.x[rows]), split.y[rows]

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
        return ChannelGroups.of(self.module, x)


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
