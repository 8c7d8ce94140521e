"""Sageflow: Park, Han, Choi, Moon, *Sageflow: Robust federated learning against both stragglers and adversaries*,
NeurIPS 2021.

Rounds have a fixed length. Models that arrive in round t join the group of the round i that they started in. Inside
a group, those whose entropy on the server's small public set is at least `threshold` are dropped, the others are
weighted by `n_k / loss^delta` (their loss on that set); groups are weighted by their samples times `(t - i + 1)^-lam`.
`w = gamma mean + (1 - gamma) w`, with gamma halved every 300 rounds. Models more than `staleness` rounds late are
left out.

The public set is 1000 samples (at most a twentieth) taken from the training data before they are shared out.
Adapted: the length of a round, if it is not given, is the slowest client's time in the first one, which waits for all,
over `staleness + 1`, so that the slowest are as late as in the paper's experiments. Where all models of a round
would be dropped (a young model of many classes is uncertain, not poisoned), none is. Without class
probabilities (regression) there is no entropy and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import costs
from ..context import Context, Method, option
from ..graph import Job, Op, Value
from ..ops import combination
from ..rules.merge import weighted_mean
from ..task import Task
from ..training.plan import Indices
from ._server import MARGIN, MESSAGES, Desk, Update, merging, training_client


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of Sageflow."""

    threshold: float = option(1.0, "entropy on the public set from which a model is dropped (the paper's E_th)")
    delta: float = option(1.0, "exponent of the public loss")
    lam: float = option(0.5, "exponent of the staleness")
    gamma: float = option(0.5, "factor of the global step, applied every gamma_rounds")
    gamma_rounds: int = option(300, "rounds after which the global step shrinks")
    staleness: int = option(2, "rounds that a model may be late")
    round_seconds: float = option(0.0, "length of a round; 0 = the slowest client's time over staleness + 1")


@dataclass(frozen=True)
class Score(Op):
    """Jobs are (vector, rows of public samples); results are the mean loss [] and the mean entropy [].

    Without public samples all models are equally good.
    """

    task: Task
    outputs: ClassVar[int] = 2

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [self._one(*job) for job in jobs]

    def _one(self, vector: Tensor, rows: Indices) -> tuple[Tensor, ...]:
        if not len(rows):
            return vector.new_ones(()), vector.new_zeros(())
        self.task.speaker.flat.load(vector)
        x, y = self.task.gather(torch.from_numpy(rows).to(self.task.device))
        output = self.task.speaker(x)
        logs = output.log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1).mean() if self.task.dataset.classes else output.new_zeros(())
        return self.task.loss(output, y), entropy


@dataclass(frozen=True)
class Group(Op):
    """Jobs are (w, vectors, losses, entropies, ages, samples, gamma); results are the next w and the weights."""

    hyper: Hyper
    outputs: ClassVar[int] = 2

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [self._one(*job) for job in jobs]

    def _one(
        self,
        w: Tensor,
        vectors: Sequence[Tensor],
        losses: Sequence[Tensor],
        entropies: Sequence[Tensor],
        ages: Sequence[int],
        samples: Sequence[int],
        gamma: float,
    ) -> tuple[Tensor, ...]:
        shares = weights(
            torch.stack([*losses]), torch.stack([*entropies]), torch.tensor(ages), torch.tensor(samples), self.hyper
        )
        mean = weighted_mean(vectors, shares.to(w))
        return combination((mean, w), (gamma, 1 - gamma)), shares.to(w)


def weights(losses: Tensor, entropies: Tensor, ages: Tensor, samples: Tensor, hyper: Hyper) -> Tensor:
    """Weights of a round's models, all [models] -> [models]; they sum to 1."""
    kept = entropies < hyper.threshold
    kept = kept | ~kept.any()
    losses = losses.double()
    samples, ages = samples.to(losses), ages.to(losses)
    inside = kept * samples / losses.clamp(min=1e-12) ** hyper.delta
    result = torch.zeros_like(losses)
    for late in range(hyper.staleness + 1):
        group = ages == late
        total = (inside * group).sum()
        size = (samples * kept * group).sum() * (late + 1) ** -hyper.lam
        result += torch.where(group & (total > 0), size * inside / total, 0.0)
    return result / result.sum()


async def server(ctx: Context, hyper: Hyper) -> None:
    desk = Desk.open(ctx)
    length = hyper.round_seconds or desk.saved.get("length", 0.0)
    while ctx.running:
        for client in sorted(desk.idle):
            desk.hand(client)
        updates = await collect(desk, length)
        length = length or MARGIN * desk.slowest / (hyper.staleness + 1)
        updates = [update for update in updates if desk.version - update.version <= hyper.staleness]
        vector, shares = (desk.model.vector, None) if not updates else await aggregate(desk, updates, hyper)
        desk.publish(replace(desk.model, vector=vector), updates, {"length": length}, weights=shares)


async def collect(desk: Desk, length: float) -> list[Update]:
    """What arrives within a round; the first one lasts until everybody has come."""
    updates: list[Update] = []
    end = desk.ctx.now + length
    while desk.ctx.running and (desk.ctx.now < end if length else desk.orders or not updates):
        until = end if length else desk.deadline()
        client, update = await desk.arrival(until) or (None, None)
        if update is not None:
            updates.append(update)
        elif client is not None and not updates:
            desk.hand(client)
        elif client is None and not length and desk.ctx.now >= until:
            desk.forget(tuple(desk.orders))
    return updates


async def aggregate(desk: Desk, updates: list[Update], hyper: Hyper) -> tuple[Value, Value]:
    """Scores the models on the public set and merges them; the next global vector, and the weights."""
    ctx, flops = desk.ctx, merging(desk.model, len(updates))
    rows = ctx.batch(ctx.samples, "public")
    scores = []
    for update in updates:
        scores.append(await ctx.compute(
            Score(ctx.task), update.model.vector, rows,
            flops=costs.forward(update.model.size.macs, len(rows)), purpose="scoring",
        ))  # fmt: skip
    vector, shares = await ctx.compute(
        Group(hyper),
        desk.model.vector,
        tuple(update.model.vector for update in updates),
        tuple(loss for loss, _ in scores),
        tuple(entropy for _, entropy in scores),
        tuple(desk.version - update.version for update in updates),
        tuple(update.samples for update in updates),
        hyper.gamma ** (desk.version // hyper.gamma_rounds),
        flops=flops,
        purpose="aggregation",
    )
    return vector, shares


METHOD = Method(
    "sageflow", "rounds of fixed length, late models in groups", Hyper(), training_client, server,
    "Park et al., NeurIPS 2021", public_samples=1000, messages=MESSAGES,
)  # fmt: skip
