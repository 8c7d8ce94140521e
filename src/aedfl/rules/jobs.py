"""Model aggregation as queued work: the rules applied to the jobs of many devices at once.

A device has M neighbour slots in a fixed order. Jobs of devices with fewer slots are padded with empty ones, and
a slot from which nothing has come yet is empty too: it has version 0 and cannot be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..graph import Job, Op
from ..placement import parts
from ..replay import copies, replayed
from ..transfer import sent
from . import direct
from .baseline import advantage, remember
from .features import selector_features
from .merge import merge
from .selector import reinforce_step, select
from .weights import Derivative, Step, control_gradient, control_step, importance, normalise, own_staleness

STACKS = 4
"""Memory of merging, and of learning from it, in stacks of the models that go in."""


@dataclass(frozen=True)
class Select(Op):
    """Which cached models take part in the merge.

    Jobs are (theta, seen [M], since [], versions [M], ages [M], losses M, own loss, uniforms [M]); results are
    (choices bool [M], probabilities [M], features [M, F], seen, since) where `seen` holds the version of each slot
    that was merged last, and `since` the local updates since anything was merged.
    """

    learned: bool
    """By the selector network; otherwise everything that is new."""
    reuse: bool = False
    """Also what was merged before."""
    greedy: bool = False
    epsilon: float = 0.05
    count_since: bool = True
    """Let the network see how long nothing was merged."""
    outputs: ClassVar[int] = 5

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        theta, seen, since, versions, ages, losses, own_loss, uniforms = zip(*jobs, strict=True)
        device = seen[0].device
        tables = (
            torch.stack(theta), _rows(seen), torch.stack(since), _sent(device, versions, ages, uniforms),
            _losses(losses, device), torch.stack(own_loss),
        )  # fmt: skip
        *found, since_now = replayed(self, self._decide, *tables)
        slots = [len(v) for v in versions]
        return list(zip(*(_cut(slots, table) for table in found), since_now.unbind(), strict=True))

    def _decide(
        self, theta: Tensor, seen: Tensor, since: Tensor, numbers: Tensor, losses: Tensor, own_loss: Tensor
    ) -> tuple[Tensor, ...]:
        versions, ages, uniforms = numbers.unbind(1)
        given = versions.long()
        there, used = given > 0, given == seen
        counted = since if self.count_since else None
        features = selector_features(used, ages, losses, own_loss, there, counted)
        open_to_choice = there if self.reuse else there & ~used
        if self.learned:
            picked = select(theta, features, open_to_choice, uniforms, self.epsilon, self.greedy)
            choices, probabilities = picked.choices, picked.probabilities
        else:
            choices, probabilities = open_to_choice, open_to_choice.float()
        seen_now = torch.where(choices, given, seen)
        since_now = torch.where(choices.any(1), 0, since + 1)
        return choices, probabilities, features, seen_now, since_now


@dataclass(frozen=True)
class Merge(Op):
    """The weights of the chosen models and their masked mean.

    Jobs are (vectors M+1, masks M+1, samples [M+1], ages [M], losses M+1, control [M+1], choices [M], since []),
    slot 0 being the device itself and None standing for an empty slot or for a mask that keeps everything.
    Results are (merged [P], weights [M+1]).
    """

    dynamic: bool
    """Weights by samples, control parameter, staleness and loss; otherwise by samples alone."""
    count_own: bool = False
    """The own model ages with every local update in which nothing was merged."""
    loss_power: float = 1.0
    """Exponent of the loss in the importance; the paper's is 1."""
    own_power: float = 0.5
    """Exponent of the own model's age; a neighbour's is the paper's 1/2."""
    outputs: ClassVar[int] = 2

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        vectors, masks, samples, ages, losses, control, choices, since = zip(*jobs, strict=True)
        device = vectors[0][0].device
        tables = [_sent(device, samples, ages), _rows(choices)]
        if self.dynamic:
            tables += torch.stack(since), _losses(losses, device), _rows(control, 1.0)
        (weights,) = replayed(self, self._weigh, *tables)
        shares = _cut([len(job) for job in vectors], weights.float())
        if direct.possible(vectors, masks):
            return list(zip(direct.merge_each(vectors, masks, weights), shares, strict=True))
        results: list[Tensor] = []
        for part in _chunks(vectors):
            slots = weights.shape[1]
            merged = merge(_stack(vectors[part], slots), _held(masks[part], vectors[part], slots), weights[part])
            results += copies(merged.unbind())
        return list(zip(results, shares, strict=True))

    def _weigh(
        self, numbers: Tensor, chosen: Tensor, since: Tensor | None = None, losses: Tensor | None = None,
        control: Tensor | None = None,
    ) -> tuple[Tensor]:  # fmt: skip
        counts, ages = numbers.unbind(1)
        if since is None or losses is None or control is None:
            return (normalise(counts, chosen),)
        own = own_staleness(since, self.count_own) ** (2 * self.own_power)
        age = torch.cat([own[:, None], ages[:, : chosen.shape[1]]], 1)
        return (normalise(importance(counts, control, age, losses, power=self.loss_power), chosen),)


@dataclass(frozen=True)
class Agree(Op):
    """What each unit is worth to those whose models were merged: the mean by the weights of the merge.

    Jobs are (worths M+1, weights [M+1]); the result is (worth [units],). None and zeros stand for one that has not
    measured; where nobody has, the own one stays.
    """

    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        worths, weights = zip(*jobs, strict=True)
        shares = _rows(weights)
        none = torch.zeros_like(worths[0][0])
        stack = _stack([[none if worth is None else worth for worth in job] for job in worths], shares.shape[1])
        (means,) = replayed(self, self._mean, stack, shares)
        return [(row,) for row in copies(means.unbind())]

    @staticmethod
    def _mean(worths: Tensor, shares: Tensor) -> tuple[Tensor]:
        return (merge(worths, None, shares * (worths.sum(-1) > 0)),)


@dataclass(frozen=True)
class Learn(Op):
    """What the loss and gradient of the last merge's result teach: control parameters, selector, baseline.

    Jobs are (control [M+1], theta, window [K], vectors, masks, weights [M+1], merged [P],
    features [M, F], versions [M], choices [M], loss [], reference [] or None, gradient [P]); results are
    (control, theta, window). The reward is the loss, or what it is above the reference.
    """

    control: bool
    selector: bool
    rate: float = 0.05
    derivative: Derivative = "paper"
    step: Step = "exponentiated"
    selector_lr: float = 1e-3
    epsilon: float = 0.05
    standardise: bool = True
    reuse: bool = False
    """Whether models that were merged before could be chosen."""
    outputs: ClassVar[int] = 3

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        control, theta, window, *last, loss, reference, gradient = zip(*jobs, strict=True)
        reward = torch.stack(loss)
        if any(one is not None for one in reference):
            none = torch.zeros_like(loss[0])
            reward = reward - torch.stack([none if one is None else one for one in reference])
        new_control = self._control(control, last, gradient) if self.control else control
        before = torch.stack(window)
        if not self.selector:
            return list(zip(new_control, theta, remember(before, reward).unbind(), strict=True))
        versions, chosen = _sent(reward.device, last[5])[:, 0], _rows(last[6])
        tables = torch.stack(theta), before, _rows(last[4]), versions, chosen, reward
        moved, remembered = replayed(self, self._reinforced, *tables)
        return list(zip(new_control, copies(moved.unbind()), remembered.unbind(), strict=True))

    def _control(self, control: Any, last: list[Any], gradient: Any) -> Sequence[Tensor]:
        now = _rows(control, 1.0)
        (found,) = replayed((self, "control"), self._stepped, now, self._slopes(now, last, gradient))
        return _cut([old.shape[0] for old in control], found)

    def _slopes(self, control: Tensor, last: list[Any], gradient: Any) -> Tensor:
        """The derivative by every control parameter [B, M+1]."""
        vectors, masks, weights, merged = last[:4]
        width = max(len(job) for job in vectors)
        if self.derivative == "exact" and direct.possible(vectors, masks):
            shares = _rows(weights, width=width)
            return direct.slopes_each(gradient, vectors, masks, shares, merged) / control.double()
        slopes: list[Tensor] = []
        for part in _chunks(vectors):
            stack, held = _stack(vectors[part], width), _held(masks[part], vectors[part], width)
            shares, result = _rows(weights[part], width=width), torch.stack(merged[part])
            slope = torch.stack(gradient[part])
            slopes.append(control_gradient(slope, stack, shares, control[part], held, result, self.derivative))
        return torch.cat(slopes)

    def _stepped(self, control: Tensor, slopes: Tensor) -> tuple[Tensor]:
        return (control_step(control, slopes, self.rate, self.step),)

    def _reinforced(
        self, theta: Tensor, window: Tensor, features: Tensor, versions: Tensor, choices: Tensor, reward: Tensor
    ) -> tuple[Tensor, Tensor]:
        gain = advantage(reward, window, self.standardise)
        used = features[..., 0] > 0.5
        valid = (versions > 0) & (~used | self.reuse)
        moved = reinforce_step(theta, features, valid, choices, gain, self.selector_lr, self.epsilon)
        return moved, remember(window, reward)


def _rows(parts: Sequence[Tensor], fill: float = 0.0, width: int = 0) -> Tensor:
    """Vectors (or [M, F] tables) of several lengths as one tensor, padded at the end (at least to `width`)."""
    lengths = [part.shape[0] for part in parts]
    width = max(width, *lengths)
    if min(lengths) == width:
        return torch.stack(list(parts))
    padding = parts[0].new_full((width, *parts[0].shape[1:]), fill)
    padded = [piece for part, length in zip(parts, lengths, strict=True) for piece in (part, padding[length:])]
    return torch.cat(padded).view(len(parts), *padding.shape)


def _sent(device: torch.device, *columns: Sequence[np.ndarray[Any, Any]]) -> Tensor:
    """Rows of numbers as one table [B, columns, M], padded with 0, that travels in one piece.

    In float64, which holds versions, ages and sample counts exactly.
    """
    table = np.zeros((len(columns[0]), len(columns), max(len(row) for rows in columns for row in rows)))
    for place, rows in enumerate(columns):
        for job, row in enumerate(rows):
            table[job, place, : len(row)] = row
    return sent(torch.from_numpy(table), device)


@cache
def _infinity(device: torch.device) -> Tensor:
    """Made once: it is needed for every batch, and never written to."""
    return torch.full((), torch.inf, device=device)


def _losses(jobs: Sequence[Sequence[Tensor | None]], device: torch.device) -> Tensor:
    """[B, M], infinite where there is none."""
    missing, width = _infinity(device), max(len(job) for job in jobs)
    flat = [missing if value is None else value for job in jobs for value in (*job, *[None] * (width - len(job)))]
    return torch.stack(flat).view(len(jobs), width) if flat else missing.new_empty(len(jobs), 0)


def _cut(slots: Sequence[int], table: Tensor) -> Sequence[Tensor]:
    """Each job's own slots of a small table: views will do."""
    rows = table.unbind()
    if min(slots) == table.shape[1]:
        return rows
    return [row[:count] for row, count in zip(rows, slots, strict=True)]


def _chunks(vectors: Sequence[Sequence[Tensor | None]]) -> list[slice]:
    """Parts of the jobs that are treated at once."""
    own = vectors[0][0]
    assert own is not None
    return parts(len(vectors), STACKS * own.nbytes * max(len(job) for job in vectors))


def _stack(vectors: Sequence[Sequence[Tensor | None]], width: int) -> Tensor:
    """[B, width, P]; empty slots repeat the own model, which is never looked at there."""
    flat: list[Tensor] = []
    for own, *others in vectors:
        assert own is not None
        row = [own, *(own if vector is None else vector for vector in others)]
        flat += row + [own] * (width - len(row))
    return torch.stack(flat).view(len(vectors), width, -1)


def _held(masks: Sequence[Sequence[Tensor | None]], vectors: Sequence[Any], width: int) -> Tensor | None:
    """bool [B, width, P], or None if nobody in the batch has a mask."""
    if all(mask is None for job in masks for mask in job):
        return None
    full = torch.ones_like(vectors[0][0], dtype=torch.bool)
    flat = [full if mask is None else mask for job in masks for mask in (*job, *[None] * (width - len(job)))]
    return torch.stack(flat).view(len(masks), width, -1)
