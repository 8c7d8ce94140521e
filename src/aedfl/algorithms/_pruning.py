"""What the pruning baselines share: they run on AEDFL-0 and cut their model once, at a certain local update.

They take filters and neurons out, as their papers do; an embedding keeps its columns. Ranked together with filters,
whose weights are a tenth as large, all filters of a TextCNN would go before the first column.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, ClassVar

from torch import Tensor

from ..context import Context
from ..graph import Job, Op, Value
from ..sparsity import ChannelGroups
from ..task import Task
from ._options import Hyper
from ._state import State
from .aedfl import local_updates, take_out

GROUND = Hyper(selection=False, weighting=False, pruning=False)
"""AEDFL-0."""


Cutter = Callable[[Context, State], Coroutine[Any, Any, dict[str, Any]]]
"""Gives the state a pruned model; metrics for the record."""


async def prune_once(ctx: Context, update: int, cutter: Cutter) -> None:
    """AEDFL-0 with one cut, after so many local updates."""

    async def prune(ctx: Context, _: Any, state: State, weights: Value) -> dict[str, Any]:
        if ctx.update != update or not ctx.task.filters.count:
            return {"prune_rate": state.rate}
        return await cutter(ctx, state)

    await local_updates(ctx, GROUND, prune)


@dataclass(frozen=True)
class Cut(Op):
    """Prunes one model after the other; jobs begin with its vector, results are as `outcome`."""

    task: Task
    outputs: ClassVar[int] = 5

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [self.one(*job) for job in jobs]

    @abstractmethod
    def one(self, vector: Tensor, *args: Any) -> tuple[Tensor, ...]: ...


async def cut(ctx: Context, state: State, op: Op, *args: Any, flops: float) -> dict[str, Any]:
    """Prunes the device's model by an op that gives `outcome`; metrics for the record."""
    mask, kept, rate, *size = await ctx.compute(op, state.model.vector, *args, flops=flops, purpose="pruning")
    take_out(state, mask, rate, size)
    return {"prune_rate": rate, "kept": kept}


def outcome(groups: ChannelGroups, kept: Tensor) -> tuple[Tensor, ...]:
    """What kept units [count] come to: mask [size], kept units, removed share of the prunable parameters, kept
    entries, MACs."""
    removed = groups.layout.parameters - groups.kept_parameters(kept)
    rate = removed.double() / groups.prunable.sum().clamp(min=1)
    return groups.expand(kept), kept, rate, groups.kept_entries(kept), groups.macs(kept)


def lowest_go(scores: Tensor, groups: ChannelGroups, shares: Mapping[str, float]) -> Tensor:
    """Kept units [count] when every layer loses that share of its units, those of lowest score; one stays at least."""
    kept = groups.full()
    for name, units in groups.layers.items():
        width = units.stop - units.start
        count = min(floor(shares[name] * width + 1e-9), width - 1)
        order = scores[units].sort(stable=True).indices
        kept[units] = kept[units].index_fill(0, order[:count], False)
    return kept
