"""Pre-training of the selector on synthetic choices made by heuristics, as the paper suggests.

The heuristics: a model that was merged before is not chosen again, and a very stale one rarely. An *open* selector
takes everything else. A *wary* one also leaves out models whose loss is much worse than the own: right where some
devices do harm, wrong where none does. For the losses are those of training, lowest on fast devices that have
fitted their own data, and these would leave out just the models that they can learn from. A lower loss than the own
earns nothing.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Literal, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from .features import AGE_CAP, LOSS_CAP, selector_features
from .network import DENSE, FEATURES, HIDDEN

Start = Literal["open", "wary"]
FILE = "selector.safetensors"
NEIGHBOURS = 10


class Synthetic(NamedTuple):
    """Made-up caches of B devices: features [B, M, FEATURES], and the chance of each [B, M]."""

    features: Tensor
    chances: Tensor


def pretrained(start: Start = "open") -> Tensor:
    """A selector shipped with the package: theta, float32 [PARAMETERS]."""
    stored = safetensors.torch.load(files("aedfl.rules").joinpath(FILE).read_bytes())
    return stored[start]


def heuristic(features: Tensor, start: Start = "open") -> Tensor:
    """The chance [B, M] that a model with these features should be chosen."""
    used, age, loss = features[..., 0], features[..., 1], features[..., 2]
    logit = (3 if start == "wary" else 5) - 8 * (age - 0.6).clamp(min=0)
    if start == "wary":
        logit = logit - 4 * (loss - 0.35).clamp(min=0)
    return torch.where(used > 0.5, 0.01, torch.sigmoid(logit.clamp(min=-4)))


def synthetic(
    devices: int, generator: torch.Generator, neighbours: int = NEIGHBOURS, start: Start = "open"
) -> Synthetic:
    """Half of the models used; ages (mostly young) and losses spread over all that features can say."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    shape = (devices, neighbours)
    own_loss = torch.exp(2 * uniform(devices) - 1)
    features = selector_features(
        used=uniform(*shape) < 0.5,
        staleness=2 ** (5 * AGE_CAP * uniform(*shape) ** 2),
        loss=own_loss[:, None] * torch.exp(LOSS_CAP * (2 * uniform(*shape) - 1)),
        own_loss=own_loss,
        valid=torch.ones(shape, dtype=torch.bool),
        since_merge=2 ** (5 * uniform(devices)) - 1,
    ).double()
    return Synthetic(features, heuristic(features, start))


def pretrain(start: Start = "open", seed: int = 0, steps: int = 300, devices: int = 64, lr: float = 2e-2) -> Tensor:
    """Theta float32 [PARAMETERS], fitted to the heuristics; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    model = _Shared(generator)
    optimiser = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps)
    for _ in range(steps):
        examples = synthetic(devices, generator, start=start)
        draws = torch.rand(examples.chances.shape, generator=generator, dtype=torch.float64)
        logits = model(examples.features, draws < examples.chances)
        optimiser.zero_grad()
        torch.autograd.backward(binary_cross_entropy_with_logits(logits, examples.chances))
        optimiser.step()
        schedule.step()
    return model.theta().float()


class _Shared(nn.Module):
    """The priority network with one set of parameters for a whole batch and all choices known beforehand."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES + 1, HIDDEN, batch_first=True, dtype=torch.float64)
        self.dense = nn.Linear(HIDDEN, DENSE, dtype=torch.float64)
        self.output = nn.Linear(DENSE, 1, dtype=torch.float64)
        bound = HIDDEN**-0.5
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, features: Tensor, choices: Tensor) -> Tensor:
        """features [B, M, FEATURES], choices [B, M] -> logits [B, M], each given the choices before it."""
        signs = torch.where(choices, 1.0, -1.0).to(features.dtype)
        previous = pad(signs[:, :-1], (1, 0)).unsqueeze(-1)
        hidden, _ = self.lstm(torch.cat([previous, features], -1))
        logits: Tensor = self.output(self.dense(hidden).tanh()).squeeze(-1)
        return logits

    @torch.no_grad()
    def theta(self) -> Tensor:
        """The parameters in the order of `network.SHAPES`, whose gates are input, forget, output, cell."""
        by_input, by_hidden, input_bias, hidden_bias = self.lstm.parameters()
        gates = _reorder(torch.cat([by_hidden, by_input], 1))
        bias = _reorder(input_bias + hidden_bias)
        layers = [self.dense.weight, self.dense.bias, self.output.weight, self.output.bias]
        return torch.cat([part.flatten() for part in (gates, bias, *layers)])


def _reorder(gates: Tensor) -> Tensor:
    """From the order of `nn.LSTM` (input, forget, cell, output) to that of the priority network."""
    enter, forget, proposal, leave = gates.chunk(4)
    return torch.cat([enter, forget, leave, proposal])
