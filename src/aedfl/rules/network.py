"""The priority network: an LSTM over the neighbours in fixed order, then two fully connected layers.

Every device has its own parameters theta, one row of a [B, PARAMETERS] tensor, so that one pass over
M neighbours serves all devices of a batch. The previous choice is an input of the next step: the
probability of c_m is conditioned on c_{m-1}, …, c_1 as in formula rlupdate.

The backward pass is written out: with autograd, every step would add a gradient of the size of theta.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .reduce import slot_sum

FEATURES = 4
HIDDEN = 32
DENSE = 32

SHAPES = {
    "gates": (4 * HIDDEN, HIDDEN + 1 + FEATURES),
    "gates_bias": (1, 4 * HIDDEN),
    "dense": (DENSE, HIDDEN),
    "dense_bias": (1, DENSE),
    "output": (1, DENSE),
    "output_bias": (1, 1),
}
SIZES = [prod(shape) for shape in SHAPES.values()]
PARAMETERS = sum(SIZES)
STEP_FLOPS = 2 * PARAMETERS + 12 * HIDDEN

# Matrix kernels round by where in a cache line a row begins, so every row begins with one (8 float64).
_GAP = -SHAPES["gates"][1] % 8


class Network(NamedTuple):
    """Theta as matrices [B, out, in].

    Rows of `gates`: input, forget, output, cell; its columns: hidden state, previous choice, features.
    """

    gates: Tensor
    gates_bias: Tensor
    dense: Tensor
    dense_bias: Tensor
    output: Tensor
    output_bias: Tensor


class Step(NamedTuple):
    """The activations of one neighbour, all [B, width]."""

    column: Tensor
    squashed: Tensor
    proposal: Tensor
    cell_before: Tensor
    cell_tanh: Tensor
    hidden: Tensor
    dense: Tensor
    logit: Tensor
    choice: Tensor


def unpack(theta: Tensor) -> Network:
    """Theta [B, PARAMETERS] as matrices."""
    ends = accumulate(SIZES)
    parts = (theta[:, end - size : end] for end, size in zip(ends, SIZES, strict=True))
    return Network(*(part.view(-1, *shape) for part, shape in zip(parts, SHAPES.values(), strict=True)))


def align(network: Network) -> Network:
    """Copies whose rows all begin with a cache line; `gates` gets columns of zeros for that."""
    gates, *others = network
    return Network(pad(gates, (0, _GAP)), *(part.contiguous() for part in others))


def forward(network: Network, features: Tensor, thresholds: Tensor) -> list[Step]:
    """One pass of an aligned network over features [B, M, FEATURES]: c_m where logit_m > thresholds [B, M].

    An infinite threshold dictates the choice. The previous choice enters as +1 or -1, at the first step as 0.
    """
    inputs = pad(features, (0, _GAP))
    hidden = features.new_zeros(features.shape[0], HIDDEN)
    cell, previous, yes = torch.zeros_like(hidden), torch.zeros_like(hidden[:, :1]), features.new_ones(())
    steps = []
    for slot in range(features.shape[1]):
        column = torch.cat([hidden, previous, inputs[:, slot]], 1)
        squashed, proposal = _gates(network, column)
        enter, forget, leave = squashed.chunk(3, 1)
        before, cell = cell, forget * cell + enter * proposal
        cell_tanh = cell.tanh()
        hidden = leave * cell_tanh
        dense = _affine(network.dense, network.dense_bias, hidden).tanh()
        logit = _affine(network.output, network.output_bias, dense)
        choice = logit > thresholds[:, slot, None]
        previous = torch.where(choice, yes, -yes)
        steps.append(Step(column, squashed, proposal, before, cell_tanh, hidden, dense, logit, choice))
    return steps


def backward(network: Network, steps: list[Step], slopes: Tensor) -> Tensor:
    """The gradient by theta [B, PARAMETERS] of `sum_m slopes[:, m] * logit_m`, the choices held fixed."""
    dense = torch.stack([step.dense for step in steps], 1)
    hidden = torch.stack([step.hidden for step in steps], 1)
    slopes = slopes.unsqueeze(-1)
    into_dense = slopes * network.output * (1 - dense * dense)
    into_gates = _through_time(network, steps, into_dense)
    columns = torch.stack([step.column for step in steps], 1)
    parts = [
        _outer(into_gates, columns)[..., : SHAPES["gates"][1]],
        _summed(into_gates),
        _outer(into_dense, hidden),
        _summed(into_dense),
        _outer(slopes, dense),
        _summed(slopes),
    ]
    return torch.cat([part.flatten(1) for part in parts], 1)


def sigmoid(values: Tensor) -> Tensor:
    """By tanh: `torch.sigmoid` rounds differently at the end of a tensor than in its middle."""
    return torch.tanh(values * 0.5).mul_(0.5).add_(0.5)


def _affine(matrix: Tensor, bias: Tensor, row: Tensor) -> Tensor:
    """Rows times transposed matrices: several times faster on a CPU than matrices times columns."""
    return torch.baddbmm(bias, row.unsqueeze(1), matrix.mT).squeeze(1)


def _row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """[B, out] x [B, out, in] -> [B, in], row by row: for several rows the kernel depends on how many."""
    return (row.unsqueeze(1) @ matrix).squeeze(1)


def _summed(steps: Tensor) -> Tensor:
    """[B, M, n] -> [B, n]. On a CPU one step after the other: sums and matrix products round by how many there are, so
    that empty slots would matter."""
    return steps.sum(1) if steps.is_cuda else slot_sum(steps)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """[B, M, out] x [B, M, in] -> [B, out, in], the outer products of all steps summed, as `_summed` does it."""
    if left.is_cuda:
        return left.mT @ right
    pairs = zip(left.unsqueeze(-1).unbind(1), right.unsqueeze(-2).unbind(1), strict=True)
    return sum((a * b for a, b in pairs), left.new_zeros(()))


def _gates(network: Network, column: Tensor) -> tuple[Tensor, Tensor]:
    """Input, forget and output gate together, [B, 3 * HIDDEN], and the proposal for the cell, [B, HIDDEN]."""
    raw = _affine(network.gates, network.gates_bias, column)
    return sigmoid(raw[:, : 3 * HIDDEN]), raw[:, 3 * HIDDEN :].tanh()


def _through_time(network: Network, steps: list[Step], into_dense: Tensor) -> Tensor:
    """Back through the LSTM: slopes by raw dense layer [B, M, DENSE] -> by raw gate [B, M, 4 * HIDDEN]."""
    recurrent = network.gates[..., :HIDDEN]
    later_hidden, later_cell = (torch.zeros_like(steps[0].hidden) for _ in range(2))
    into_gates = []
    for slot in reversed(range(len(steps))):
        step = steps[slot]
        enter, forget, leave = step.squashed.chunk(3, 1)
        here = _row_times(into_dense[:, slot], network.dense) + later_hidden
        cell = here * leave * (1 - step.cell_tanh**2) + later_cell
        onto = torch.cat([cell * step.proposal, cell * step.cell_before, here * step.cell_tanh], 1)
        raw = torch.cat([onto * step.squashed * (1 - step.squashed), cell * enter * (1 - step.proposal**2)], 1)
        later_hidden = _row_times(raw, recurrent)
        later_cell = cell * forget
        into_gates.append(raw)
    return torch.stack(into_gates[::-1], 1)
