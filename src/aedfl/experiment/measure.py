"""What is measured at an evaluation: the mean model, the local models, and how far apart they are."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..context import Model
from ..graph import Chosen
from ..randomness import generator
from ..rules.merge import distance_by_squares, squares_to_mean, weighted_mean
from ..sim.simulation import Simulation
from ..sim.work import fetch, plain
from ..training.evaluate import Scorer
from ..transfer import Later, arriving, away
from .config import RunConfig
from .workshop import Rows

COLUMNS = (
    "time", "accuracy", "loss", "local_accuracy", "worst_tenth", "updates", "samples", "bytes_sent", "mmacs",
    "staleness", "consensus", "costs",
)  # fmt: skip
"""What is measured, in the order in which it is written."""


@dataclass(frozen=True)
class Moment:
    """What there is to measure at a moment. Its models may not be computed yet."""

    known: dict[str, Any]
    models: list[Model]
    """What each device stood for."""
    server: Model | None
    merged: list[Any]
    ages: array[int]


class Measure:
    """Measures a simulation."""

    def __init__(self, config: RunConfig, sim: Simulation, evaluator: Scorer, rows: Rows) -> None:
        self.sim, self.evaluator, self.rows = sim, evaluator, rows
        count = min(config.devices, config.evaluation.local_devices)
        chosen = generator(config.seed, "evaluated devices").permutation(config.devices)[:count]
        self.chosen = sorted(chosen.tolist())
        self._merged: deque[Any] = deque()
        self._ages = array("l")

    def staleness(self, merged: Any) -> None:
        """Notes sources and staleness of models that were merged since the last evaluation."""
        self._merged.append(merged)
        while self._merged and _at_hand(self._merged[0]):
            self._ages.extend(int(age) for _, age in plain(self._merged.popleft()))

    def forget(self) -> None:
        """Starts a new interval without measuring."""
        self._merged.clear()
        self._ages = array("l")

    def __call__(self) -> dict[str, Any]:
        return self.begin(self.take()).get()

    def take(self) -> Moment:
        """What holds now; starts a new interval."""
        sim, models = self.sim, self.models()
        known = {
            "time": sim.time,
            "updates": sim.updates,
            "samples": sim.samples,
            "bytes_sent": sim.network.bytes_sent,
            "mmacs": float(np.mean([model.size.macs for model in models])) / 1e6,
            "costs": {name: round(seconds, 6) for name, seconds in sorted(sim.costs.items())},
        }
        moment = Moment(known, models, self._server(), list(self._merged), self._ages)
        self.forget()
        return moment

    def begin(self, moment: Moment) -> Later[dict[str, Any]]:
        """What held then, once an accelerator has found out. All that was asked for until then must be computed."""
        rows, models = self.rows, moment.models
        vector = self._global_vector(models, moment.server)
        whole = self.evaluator.begin([vector], rows.evaluation, rows.test)
        local = self.evaluator.begin([_kept(models[i]) for i in self.chosen], rows.local, rows.test)
        squares = arriving([squares_to_mean(_Vectors(models))])
        merged = fetch(moment.merged)

        def row() -> dict[str, Any]:
            (accuracy,), (loss,) = whole.get()
            accuracies, _ = local.get()
            worst = sorted(accuracies)[: max(1, len(accuracies) // 10)]
            stale = [*moment.ages, *(age for sources in merged.get() for _, age in sources)]
            found = {
                **moment.known,
                "accuracy": accuracy,
                "loss": loss,
                "local_accuracy": float(np.mean(accuracies)),
                "worst_tenth": float(np.mean(worst)),
                "staleness": float(np.mean(stale)) if stale else 0.0,
                "consensus": float(distance_by_squares(squares.get()[0])),
            }
            return {name: found[name] for name in COLUMNS}

        return Later(row, [*whole.events, *local.events, *squares.events, *merged.events])

    def models(self) -> list[Model]:
        """What each device stands for now."""
        return [context.model or self.sim.start for context in self.sim.contexts]

    def _server(self) -> Model | None:
        server = self.sim.server
        return None if server is None else server.model or self.sim.start

    def global_vector(self) -> Tensor:
        """The server's model, or the mean of the local ones weighted by their samples.

        Each entry is the mean over those who hold it, and zero where nobody does.
        """
        return self._global_vector(self.models(), self._server())

    def _global_vector(self, models: list[Model], server: Model | None) -> Tensor:
        if server is not None:
            return _kept(server)
        weights = [float(context.samples) for context in self.sim.contexts]
        vectors = [model.vector.get() for model in models]
        if all(model.mask is None for model in models):
            return weighted_mean(vectors, weights)
        ones = torch.ones_like(vectors[0], dtype=torch.bool)
        masks = [ones if model.mask is None else model.mask.get() for model in models]
        return weighted_mean(vectors, weights, masks, torch.zeros_like(vectors[0]))


def _at_hand(merged: Any) -> bool:
    """True if it is computed and need not be fetched from an accelerator, which would wait for all its work."""
    return not isinstance(merged, Chosen) or (merged.flags.data is not None and not away(merged.flags.data))


class _Vectors:
    """The local models' vectors, walked through as often as asked."""

    def __init__(self, models: list[Model]) -> None:
        self.models = models

    def __iter__(self) -> Any:
        return (_kept(model) for model in self.models)


def _kept(model: Model) -> Tensor:
    vector = model.vector.get()
    return vector if model.mask is None else vector * model.mask.get()
