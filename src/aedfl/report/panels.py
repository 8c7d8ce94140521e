"""The charts of one run: each makes a card from the record, or nothing when the record has nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import charts
from .charts import Series
from .record import Floats, Run
from .scale import Axis, exact, fitted, prefix
from .thin import banded
from .updates import Samples, Updates


@dataclass(frozen=True)
class Card:
    """A titled chart with a sentence on how to read it."""

    title: str
    note: str
    body: str
    wide: bool = False


Panel = Callable[[Run, Updates], Card | None]


def quality(run: Run, updates: Updates) -> Card | None:
    time = run.column("time")
    series = [
        Series("mean model", time, run.column("accuracy")),
        Series("local models, mean", time, run.column("local_accuracy")),
        Series("local models, worst tenth", time, run.column("worst_tenth")),
    ]
    axis = fitted(np.concatenate([one.y for one in series]), run.metric.capitalize(), zero=True)
    target = run.summary.get("target_accuracy")
    name = f"{run.metric} over virtual time"
    body = charts.lines(series, charts.time_axis(run.end), axis, name, 1140, 360, target)
    note = "On the test data. The mean model averages all devices; local models are as each device has them."
    return _card(f"{run.metric.capitalize()} over virtual time", note, body, wide=True)


def quality_over_bytes(run: Run, updates: Updates) -> Card | None:
    sent = run.column("bytes_sent")
    series = [
        Series("mean model", sent, run.column("accuracy")),
        Series("local models, mean", sent, run.column("local_accuracy")),
    ]
    if not np.isfinite(sent).any():
        return None
    x = bytes_axis(sent)
    y = fitted(np.concatenate([one.y for one in series]), run.metric.capitalize(), zero=True)
    body = charts.lines(series, x, y, f"{run.metric} over bytes sent")
    return _card(f"{run.metric.capitalize()} over communication", "Sent by all devices together.", body)


def loss(run: Run, updates: Updates) -> Card | None:
    series = [Series("mean model, test data", run.column("time"), run.column("loss"))]
    if len(updates.loss):
        series.append(_spread("training, mean and middle 80 %", updates.loss))
    body = charts.over_time(series, run.end, "Loss", "Loss over virtual time", log_from=100.0)
    return _card("Loss", "Training loss is what each local update saw on its own device.", body)


def staleness(run: Run, updates: Updates) -> Card | None:
    counts = dict(updates.staleness)
    if not counts:
        series = [Series("staleness", run.column("time"), run.column("staleness"))]
        body = charts.over_time(series, run.end, "Local updates", "Mean staleness over time")
        return _card("Staleness", "Mean age of the merged models, in the receiver's local updates.", body)
    ages, share = np.array(sorted(counts)), np.cumsum([counts[age] for age in sorted(counts)])
    middle = ages[np.searchsorted(share, share[-1] / 2)]
    mean = sum(age * count for age, count in counts.items()) / share[-1]
    note = (
        f"Age of every merged model, in the receiver's local updates: "
        f"mean {mean:.2f}, median {middle}, oldest {max(counts)}."
    )
    return _card("Staleness", note, charts.histogram(counts, "Local updates", "Models merged", "Staleness"))


def consensus(run: Run, updates: Updates) -> Card | None:
    series = [Series("consensus distance", run.column("time"), run.column("consensus"))]
    body = charts.over_time(series, run.end, "Distance", "Consensus distance over time", log_from=100.0)
    return _card("Consensus distance", "Root of the mean squared distance between two local models.", body)


def costs(run: Run, updates: Updates) -> Card | None:
    body = charts.bars(run.costs, "Cost by purpose") if run.costs else ""
    return _card("Where the devices' time goes", "Virtual seconds of all devices together, by purpose.", body)


def size(run: Run, updates: Updates) -> Card | None:
    macs = run.column("mmacs")
    if np.isfinite(macs).sum() < 2 or np.nanmax(macs) - np.nanmin(macs) < 1e-9:
        return None
    series = [Series("MMACs", run.column("time"), macs)]
    body = charts.over_time(series, run.end, "MMACs per sample", "Cost of the model over time")
    return _card("Cost of the model", "Multiply-accumulates of one forward pass, mean of devices.", body)


def prune_rate(run: Run, updates: Updates) -> Card | None:
    note = "Share of the prunable MACs or parameters that was to go"
    return _method(run, updates, "prune_rate", "Pruning rate", "Share", note)


def merged(run: Run, updates: Updates) -> Card | None:
    note = "How many models of neighbours went into a merge"
    return _method(run, updates, "merged", "Merged models", "Models per local update", note)


def priorities(run: Run, updates: Updates) -> Card | None:
    note = "Probability with which the selector takes a neighbour's model"
    return _method(run, updates, "priorities", "Selection", "Probability", note)


def weights(run: Run, updates: Updates) -> Card | None:
    return _method(run, updates, "weights", "Merging weights", "Weight", "Weight of each model in a merge")


def control(run: Run, updates: Updates) -> Card | None:
    note = "Learned factor of each model's weight"
    return _method(run, updates, "control", "Control parameters", "Control parameter", note)


def bytes_axis(sent: Floats) -> Axis:
    most = float(np.nanmax(sent))
    divide, letter = prefix(most)
    return exact(0.0, most or 1.0, f"Sent ({letter}B)", count=7, divide=divide)


def _method(run: Run, updates: Updates, name: str, title: str, label: str, note: str) -> Card | None:
    found = [(line, samples) for line, samples in updates.spreads.get(name, {}).items() if len(samples) > 1]
    if not found:
        return None
    series = [_spread(line, samples) for line, samples in found]
    body = charts.over_time(series, run.end, label, title)
    return _card(title, f"{note}: mean, and the middle 80 %.", body)


def _spread(name: str, samples: Samples) -> Series:
    middle, mean, low, high = banded(samples.times, samples.values)
    return Series(name, middle, mean, low, high)


def _card(title: str, note: str, body: str, wide: bool = False) -> Card | None:
    return Card(title, note, body, wide) if body else None
