"""An independent selector for the tests: one device, one neighbour at a time, `nn.LSTMCell` and autograd."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aedfl.rules.network import DENSE, FEATURES, HIDDEN


class Oracle:
    """The priority network of one device, from a row of theta; all in float64."""

    def __init__(self, theta: Tensor) -> None:
        self.theta = theta.double().clone().requires_grad_()
        sizes = [4 * HIDDEN * (HIDDEN + 1 + FEATURES), 4 * HIDDEN, DENSE * HIDDEN, DENSE, DENSE, 1]
        gates, bias, dense, dense_bias, output, output_bias = self.theta.split(sizes)
        gates = self._torch_order(gates.view(4 * HIDDEN, -1))
        self.lstm = {
            "weight_ih": gates[:, HIDDEN:],
            "weight_hh": gates[:, :HIDDEN],
            "bias_ih": self._torch_order(bias),
            "bias_hh": torch.zeros(4 * HIDDEN, dtype=torch.float64),
        }
        self.dense = (dense.view(DENSE, HIDDEN), dense_bias)
        self.output = (output.view(1, DENSE), output_bias)

    @staticmethod
    def _torch_order(rows: Tensor) -> Tensor:
        enter, forget, leave, proposal = rows.chunk(4)
        return torch.cat([enter, forget, proposal, leave])

    def log_prob(self, features: Tensor, valid: Tensor, choices: Tensor, epsilon: float = 0.0) -> Tensor:
        """log P of choices [M]; invalid neighbours are skipped."""
        chances = self.chances(features, valid, choices, epsilon)
        return sum((p.log() for p in chances), torch.zeros((), dtype=torch.float64))

    def chances(self, features: Tensor, valid: Tensor, choices: Tensor, epsilon: float = 0.0) -> list[Tensor]:
        """The probability of each choice that was made, given those before."""
        cell = nn.LSTMCell(FEATURES + 1, HIDDEN, dtype=torch.float64)
        state = (torch.zeros(1, HIDDEN, dtype=torch.float64), torch.zeros(1, HIDDEN, dtype=torch.float64))
        previous, chances = 0.0, []
        for m in range(len(valid)):
            if not valid[m]:
                continue
            column = torch.cat([torch.tensor([previous], dtype=torch.float64), features[m].double()])
            state = torch.func.functional_call(cell, self.lstm, (column.unsqueeze(0), state))
            hidden = torch.tanh(nn.functional.linear(state[0], *self.dense))
            yes = torch.sigmoid(nn.functional.linear(hidden, *self.output))[0, 0]
            taken = yes if choices[m] else 1 - yes
            chances.append((1 - epsilon) * taken + epsilon / 2)
            previous = 1.0 if choices[m] else -1.0
        return chances

    def gradient(self, features: Tensor, valid: Tensor, choices: Tensor, epsilon: float = 0.0) -> Tensor:
        """The gradient of `log_prob` by theta [PARAMETERS]."""
        log_prob = self.log_prob(features, valid, choices, epsilon)
        if not log_prob.requires_grad:
            return torch.zeros_like(self.theta)
        (gradient,) = torch.autograd.grad(log_prob, self.theta)
        return gradient
