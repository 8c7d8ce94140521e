"""Model aggregation as queued work: the rules applied to the jobs of many devices at once.

A device has M neighbour slots in a fixed order. Jobs of devices with fewer slots are padded with empty ones, and
a slot from which nothing has come yet is empty too: it has version 0 and cannot be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..graph import Job, Op
from ..replay import copies, replayed
from .baseline import advantage, remember
from .features import selector_features
from .merge import merge
from .selector import reinforce_step, select
from .weights import Derivative, Step, control_gradient, control_step, importance, normalise, own_staleness

STACK_BYTES = 1 << 28
"""Largest stack of models that is merged at once."""


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
            torch.stack(theta), _rows(seen, device), torch.stack(since), _rows(versions, device), _rows(ages, device),
            _losses(losses, device), torch.stack(own_loss), _rows(uniforms, device),
        )  # fmt: skip
        *found, since_now = replayed(self, self._decide, *tables)
        return _cut([len(v) for v in versions], *found, each=since_now)

    def _decide(
        self, theta: Tensor, seen: Tensor, since: Tensor, given: Tensor, ages: Tensor, losses: Tensor,
        own_loss: Tensor, uniforms: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
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
        counts = _rows(samples, device)
        chosen = _rows(choices, device)
        if self.dynamic:
            own = own_staleness(torch.stack(since), self.count_own) ** (2 * self.own_power)
            age = torch.cat([own[:, None], _rows(ages, device)], 1)
            loss = _losses(losses, device) ** self.loss_power
            weights = normalise(importance(counts, _rows(control, device, 1.0), age, loss), chosen)
        else:
            weights = normalise(counts, chosen)
        results: list[tuple[Tensor, ...]] = []
        for part in _chunks(vectors):
            stack, held = (
                _stack(vectors[part], weights.shape[1]),
                _held(masks[part], vectors[part], weights.shape[1]),
            )
            merged = merge(stack, held, weights[part])
            width = [len(job) for job in vectors[part]]
            shares = [weight[:count] for weight, count in zip(weights[part].float(), width, strict=True)]
            results += zip(copies(merged.unbind()), copies(shares), strict=True)
        return results


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
        reward = torch.stack(
            [one if other is None else one - other for one, other in zip(loss, reference, strict=True)]
        )
        new_control = self._control(control, last, gradient) if self.control else control
        before = torch.stack(window)
        new_theta = self._theta(theta, before, last, reward) if self.selector else theta
        windows = remember(before, reward)
        return list(zip(new_control, new_theta, copies(windows.unbind()), strict=True))

    def _control(self, control: Any, last: list[Any], gradient: Any) -> list[Tensor]:
        vectors, masks, weights, merged = last[:4]
        device = merged[0].device
        found: list[Tensor] = []
        for part in _chunks(vectors):
            width = max(len(job) for job in vectors)
            stack, held = _stack(vectors[part], width), _held(masks[part], vectors[part], width)
            now = _rows(control[part], device, 1.0)
            slope = control_gradient(
                torch.stack(gradient[part]), stack, _rows(weights[part], device), now, held,
                torch.stack(merged[part]), self.derivative,
            )  # fmt: skip
            found += list(control_step(now, slope, self.rate, self.step))
        return copies([row[: len(old)] for row, old in zip(found, control, strict=True)])

    def _theta(self, theta: Any, window: Tensor, last: list[Any], reward: Tensor) -> list[Tensor]:
        features, versions, choices = (_rows(part, reward.device) for part in last[4:])
        (moved,) = replayed(self, self._reinforced, torch.stack(theta), window, features, versions, choices, reward)
        return copies(moved.unbind())

    def _reinforced(
        self, theta: Tensor, window: Tensor, features: Tensor, versions: Tensor, choices: Tensor, reward: Tensor
    ) -> tuple[Tensor]:
        gain = advantage(reward, window, self.standardise)
        used = features[..., 0] > 0.5
        valid = (versions > 0) & (~used | self.reuse)
        return (reinforce_step(theta, features, valid, choices, gain, self.selector_lr, self.epsilon),)


def _rows(parts: Sequence[Any], device: torch.device, fill: float = 0.0) -> Tensor:
    """Vectors (or [M, F] tables) of several lengths as one tensor, padded at the end; arrays travel in one piece."""
    if not isinstance(parts[0], Tensor):
        return torch.from_numpy(_padded(parts, fill)).to(device, non_blocking=True)
    width = max(len(part) for part in parts)
    if all(len(part) == width for part in parts):
        return torch.stack(list(parts))
    table: Tensor = parts[0].new_full((len(parts), width, *parts[0].shape[1:]), fill)
    for row, part in zip(table, parts, strict=True):
        row[: len(part)] = part
    return table


def _padded(arrays: Sequence[Any], fill: float) -> np.ndarray[Any, Any]:
    table = np.full((len(arrays), max(len(array) for array in arrays)), fill, dtype=arrays[0].dtype)
    for row, array in zip(table, arrays, strict=True):
        row[: len(array)] = array
    return table


def _losses(jobs: Sequence[Sequence[Tensor | None]], device: torch.device) -> Tensor:
    """[B, M], infinite where there is none."""
    missing, width = torch.full((), torch.inf, device=device), max(len(job) for job in jobs)
    flat = [missing if value is None else value for job in jobs for value in (*job, *[None] * (width - len(job)))]
    return torch.stack(flat).view(len(jobs), width) if flat else missing.new_empty(len(jobs), 0)


def _cut(slots: list[int], *tables: Tensor, each: Tensor) -> list[tuple[Tensor, ...]]:
    """One tuple per job: its own slots of every table, and its entry of `each`. The tables are small: views will do."""
    rows = zip(slots, *(table.unbind() for table in tables), each.unbind(), strict=True)
    return [(*(row[:count] for row in found[:-1]), found[-1]) for count, *found in rows]


def _chunks(vectors: Sequence[Sequence[Tensor | None]]) -> list[slice]:
    """Slices of the jobs whose stacks stay below `STACK_BYTES`."""
    own = vectors[0][0]
    assert own is not None
    width = max(len(job) for job in vectors)
    size = max(1, STACK_BYTES // (own.numel() * own.element_size() * width))
    return [slice(begin, begin + size) for begin in range(0, len(vectors), size)]


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
