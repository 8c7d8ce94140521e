"""Queued work that methods share: merging as a batch over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .graph import Job, Op
from .rules.merge import weighted_mean


@dataclass(frozen=True)
class WeightedMean(Op):
    """Jobs are (vectors, weights); the result is their weighted mean, weights normalised to sum 1."""

    outputs: ClassVar[int] = 1

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        return [(weighted_mean(list(vectors), [w / sum(weights) for w in weights]),) for vectors, weights in jobs]
