"""A pruning step as queued work: look at the loss, decide the rate, score the units, take the lowest out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..graph import Job, Op
from ..randomness import Key, torch_seed
from ..task import Task
from ..training.plan import Indices
from .curvature import Curvature, curvature, rademacher
from .lanczos import lanczos
from .loss_change import Form
from .objective import Objective, flat_loss
from .rate import gap_rate, lipschitz, merge_rates
from .saliency import draw, saliency
from .select import prune

Rate = Literal["gap", "schedule"]


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
    """Lanczos steps behind the gap rule."""
    points: int = 4
    """Gradients on the way to the initial model, for the Lipschitz constant."""

    def macs(self, forward: float) -> float:
        """Multiply-accumulates of one look, `forward` being those of one sample's forward pass.

        In forward passes per sample: a gradient costs 3 and a Hessian product 6 more, a slope 2.
        """
        products = self.probes + self.steps + 1
        return forward * self.samples * (3 + 6 * products + 3 * self.points + 2 + 2 * self.draws)


@dataclass(frozen=True)
class Prune(Op):
    """Algorithm pruning: scores every unit of the full vector and removes the lowest.

    Jobs are (vector [P], initial [P], rows, key, largest [], weights [M+1], rates [M], cap); results are
    (mask bool [P], kept bool [units], rate [], raw rate [], largest [], kept entries [], MACs []).
    """

    task: Task
    budget: Budget = field(default_factory=Budget)
    form: Form = "gauss_newton"
    control: float = 1.5
    rate: Rate = "gap"
    """The own rate: the gap rule's, bounded by the cap, or the cap itself."""
    outputs: ClassVar[int] = 7

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [self._one(*job) for job in jobs]

    def _one(
        self,
        vector: Tensor,
        initial: Tensor,
        rows: Indices,
        key: tuple[Key, ...],
        largest: Tensor,
        weights: Tensor,
        rates: Sequence[float],
        cap: float,
    ) -> tuple[Tensor, ...]:
        task, groups = self.task, self.task.groups
        x, y = task.gather(torch.as_tensor(rows, device=vector.device))
        objective = flat_loss(task.module, task.layout, x, y, task.loss, vector)
        m, origin = (v[: task.layout.parameters] for v in (vector, initial))
        at = curvature(objective, m, chunk=8)
        budget = self.budget
        signs = draw(torch_seed(*key, "signs"), groups, len(rows), task.output_size, budget.probes, budget.draws)
        worth = saliency(objective, m, groups, signs, largest, self.form, self.control, 8, at)
        raw = self._gap(objective, m, origin, at, torch_seed(*key, "start"))
        own = raw.clamp(max=cap) if self.rate == "gap" else raw.new_tensor(cap)
        share = merge_rates(weights, own.to(weights.device), rates).clamp(max=cap)
        kept = prune(worth.score, groups, share)
        peak = torch.maximum(largest, worth.gradient_norm)
        return groups.expand(kept), kept, share, raw, peak, groups.kept_entries(kept), groups.macs(kept)

    def _gap(self, objective: Objective, m: Tensor, origin: Tensor, at: Curvature, seed: int) -> Tensor:
        """The raw p* of the gap rule."""
        spectrum = lanczos(at.hessian, rademacher(seed, m.shape, m.device), self.budget.steps)
        return gap_rate(spectrum, lipschitz(objective, m, origin, self.budget.points, at))

    def flops(self, macs: float) -> float:
        """The cost of one step on a full model of so many multiply-accumulates."""
        return 2.0 * self.budget.macs(macs)
