"""A pruning step as queued work: look at the loss, decide the rate, score the units, take the lowest out."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from ..graph import Job, Op
from ..placement import parts
from ..randomness import torch_seed
from ..task import Task
from ..training.plan import Indices
from ..transfer import sent
from .curvature import curvature, rademacher
from .lanczos import lanczos
from .loss_change import Form, Probes
from .objective import Objective
from .rate import gap_rate, lipschitz, merge_rates
from .saliency import blend, draw, saliency
from .select import prune

Rate = Literal["gap", "schedule"]
Measure = Literal["parameters", "macs"]

MASK_BYTES = 64
"""Room for an entry of a mask while it is made, in float64 and more than once."""
AT_ONCE = 16
"""Most devices whose curvature is looked at together on a GPU."""
CHUNK = 8
"""Hessian products of a device that are made together."""


@dataclass(frozen=True)
class Budget:
    """How much a pruning step looks at. The defaults cost less than two local updates of 500 samples x 4 epochs."""

    samples: int = 50
    """Samples that the curvature is estimated on."""
    probes: int = 10
    """Hessian products behind the change of the gradient."""
    draws: int = 4
    """Slopes per sample behind the Gauss-Newton form of the change of the loss."""
    steps: int = 16
    """Lanczos steps behind the gap rule; 0 without it."""
    points: int = 4
    """Gradients on the way to the initial model, for the Lipschitz constant."""

    def macs(self, forward: float) -> float:
        """Multiply-accumulates of one look, `forward` being those of one sample's forward pass.

        In forward passes per sample: a gradient costs 3 and a Hessian product 6 more, a slope 2. Beside the
        scores, the gap rule wants Lanczos' products, one for the Lipschitz constant, and the gradients on the way.
        """
        scores = 3 + 6 * self.probes + 2 + 2 * self.draws
        gap = 6 * (self.steps + 1) + 3 * self.points if self.steps else 0
        return forward * self.samples * (scores + gap)


def left(task: Task, share_of: Measure, worths: Sequence[Tensor], shares: Tensor) -> list[tuple[Tensor, ...]]:
    """What stays of each model when its share [jobs] of what is worth least goes.

    Of every job (mask bool [P], kept bool [units], entries [], MACs []).
    """
    groups, found = task.filters, list[tuple[Tensor, ...]]()
    for part in parts(len(worths), MASK_BYTES * task.layout.size):
        amounts = groups.entry_macs if share_of == "macs" else None
        kept = prune(torch.stack(list(worths[part])), groups, shares[part], amounts=amounts)
        masks = [row.clone() for row in groups.expand(kept)]
        found += zip(masks, kept, groups.kept_entries(kept), groups.macs(kept), strict=True)
    return found


@dataclass(frozen=True)
class Regroup(Op):
    """Jobs are (worth [units], share); results as of `left`: nothing is scored anew, but devices go on agreeing."""

    task: Task
    share_of: Measure = "parameters"
    outputs: ClassVar[int] = 4

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        worths, shares = zip(*jobs, strict=True)
        return left(self.task, self.share_of, worths, sent(torch.tensor(shares, dtype=torch.float64), worths[0].device))


@dataclass(frozen=True)
class Prune(Op):
    """Algorithm pruning: scores every unit of the full vector and removes the lowest.

    Jobs are (vector [P], initial [P], rows, key, largest [], weights [M+1], rates M, cap, worth [units], kept bool
    [units]); results are (mask bool [P], kept, rate [], raw rate [], largest [], worth, kept entries [], MACs []).
    What goes is decided by the worth that came in, agreed on with others; the present scores become a share of it for
    the next time, when others have heard of them. Where nothing is known yet, and without agreement, they decide.
    """

    task: Task
    budget: Budget = field(default_factory=Budget)
    form: Form = "gauss_newton"
    control: float = 1.5
    rate: Rate = "gap"
    """The own rate: the gap rule's, bounded by the cap, or the cap itself; the raw rate is 0 then."""
    share_of: Measure = "parameters"
    """What the rate is a share of. Of the MACs: units go by what they are worth per MAC."""
    view: float = 1.0
    """Share of the present scores in the worth; the first ones are all of it. 1: no agreement."""
    comeback: float = 1.0
    """A unit that is out counts this many times less than it scores."""
    outputs: ClassVar[int] = 8

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        found = [self._decided(job, *look) for job, look in zip(jobs, self._looks(jobs), strict=True)]
        bases, shares, *_ = zip(*found, strict=True)
        rest = left(self.task, self.share_of, bases, torch.stack(shares))
        return [
            (mask, kept, share, *others, *size)
            for (_, share, *others), (mask, kept, *size) in zip(found, rest, strict=True)
        ]

    def _decided(self, job: Job, score: Tensor, raw: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        """By what units go, the share that goes, the raw rate, the largest norm, and what units are worth now."""
        largest, weights, rates, cap, worth, before = job[4:]
        own = raw.clamp(max=cap) if self.rate == "gap" else raw.new_tensor(cap)
        share = merge_rates(weights, own.to(weights.device), rates).clamp(max=cap)
        now = blend(worth, torch.where(before, score, score / self.comeback), self.view)
        basis = torch.where((worth.sum() > 0) & (self.view < 1), worth, now)
        return basis, share, raw, torch.maximum(largest, norm), now

    def _looks(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        """Scores, raw rate and gradient norm of every job: on a GPU many at once, else one after the other."""
        module = deepcopy(self.task.module).eval()
        if not self.together:
            return [self._look(module, *self._inputs(*job[:5])) for job in jobs]
        split = parts(len(jobs), self.room(), AT_ONCE)
        return [look for part in split for look in self._together(module, jobs[part])]

    @property
    def together(self) -> bool:
        return self.task.device.type == "cuda" and self.form != "full"

    def room(self) -> int:
        """Bytes that a look takes, at most: so many times what layers say to the samples, and what probes take.

        Measured on networks with and without norms; a GPU's libraries may want some more.
        """
        task, budget = self.task, self.budget
        layers = budget.samples * task.spread * (5 + 2 * min(CHUNK, max(budget.probes, budget.draws)))
        vectors = task.layout.size * (12 + 2 * budget.probes + 2 * budget.steps)
        return 4 * (layers + vectors)

    def _together(self, module: nn.Module, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        inputs = list(zip(*[self._inputs(*job[:5]) for job in jobs], strict=True))
        if any(len({one.shape for one in column}) > 1 for column in inputs):
            return [self._look(module, *given) for given in zip(*inputs, strict=True)]
        stacked = [torch.stack(inputs.pop(0)) for _ in range(len(inputs))]
        found = vmap(lambda *given: self._look(module, *given))(*stacked)
        return list(zip(*found, strict=True))

    def _inputs(self, vector: Tensor, initial: Tensor, rows: Indices, key: int, largest: Tensor) -> tuple[Tensor, ...]:
        task, budget = self.task, self.budget
        x, y = task.gather(sent(torch.as_tensor(rows), vector.device))
        seed = torch_seed(key, "signs")
        signs = draw(seed, task.filters, len(rows), task.output_size, budget.probes, budget.draws)
        wanted = task.layout.parameters if self.rate == "gap" else 0  # where Lanczos' iteration begins
        start = rademacher(torch_seed(key, "start"), (wanted,), vector.device)
        return vector, initial, x, y, signs.entries, signs.outputs, start, largest

    def _look(
        self,
        module: nn.Module,
        vector: Tensor,
        initial: Tensor,
        x: Tensor,
        y: Tensor,
        entries: Tensor,
        outputs: Tensor,
        start: Tensor,
        largest: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One device's scores, raw rate p* of the gap rule, and gradient norm."""
        count = self.task.layout.parameters
        m, origin = vector[:count], initial[:count]
        objective = Objective(module, self.task.layout, x, y, self.task.loss, vector[count:])
        at = curvature(objective, m, CHUNK)
        probes = Probes(entries, outputs)
        worth = saliency(objective, m, self.task.filters, probes, largest, self.form, self.control, CHUNK, at)
        if self.rate == "schedule":
            return worth.score, torch.zeros_like(worth.loss), worth.gradient_norm
        spectrum = lanczos(at.hessian, start, self.budget.steps)
        raw = gap_rate(spectrum, lipschitz(objective, m, origin, self.budget.points, at))
        return worth.score, raw, worth.gradient_norm

    def flops(self, macs: float) -> float:
        """The cost of one step on a full model of so many multiply-accumulates."""
        return 2.0 * self.budget.macs(macs)
