"""The charts of one run: each makes a card from the record, or nothing when the record has nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from . import charts
from .charts import Series
from .record import Floats, Run
from .scale import exact, fitted, prefix
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
    body = _lines(series, time, axis, f"{run.metric} over virtual time", target)
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
    return _card(f"{run.metric.capitalize()} over communication", "What all devices together have sent.", body)


def loss(run: Run, updates: Updates) -> Card | None:
    series = [Series("mean model, test data", run.column("time"), run.column("loss"))]
    if len(updates.loss):
        series.append(_spread("training, median and middle 80 %", updates.loss))
    body = charts.over_time(series, "Loss", "Loss over virtual time", log_from=100.0)
    return _card("Loss", "Training loss is what each local update saw on its own device.", body)


def staleness(run: Run, updates: Updates) -> Card | None:
    counts = dict(updates.staleness)
    if not counts:
        series = [Series("staleness", run.column("time"), run.column("staleness"))]
        body = charts.over_time(series, "Local updates", "Mean staleness over time")
        return _card("Staleness", "Mean age of the merged models, in the receiver's local updates.", body)
    ages = np.repeat(list(counts), np.minimum(list(counts.values()), 10**6))
    note = (
        f"Age of every merged model, in the receiver's local updates: "
        f"mean {mean(ages.tolist()):.2f}, median {median(ages.tolist()):g}, oldest {max(counts)}."
    )
    return _card("Staleness", note, charts.histogram(counts, "Local updates", "Models merged", "Staleness"))


def consensus(run: Run, updates: Updates) -> Card | None:
    series = [Series("consensus distance", run.column("time"), run.column("consensus"))]
    body = charts.over_time(series, "Distance", "Consensus distance over time", log_from=100.0)
    return _card("Consensus distance", "Root of the mean squared distance between two local models.", body)


def costs(run: Run, updates: Updates) -> Card | None:
    body = charts.bars(run.costs, "s", "Cost by purpose") if run.costs else ""
    return _card("Where the devices' time goes", "Virtual seconds of all devices together, by purpose.", body)


def size(run: Run, updates: Updates) -> Card | None:
    macs = run.column("mmacs")
    if np.isfinite(macs).sum() < 2 or np.nanmax(macs) - np.nanmin(macs) < 1e-9:
        return None
    body = charts.over_time([Series("MMACs", run.column("time"), macs)], "MMACs per sample", "Model size")
    return _card("Cost of the model", "Multiply-accumulates (millions) of one forward pass, mean of devices.", body)


def prune_rate(run: Run, updates: Updates) -> Card | None:
    return _method(updates, "prune_rate", "Pruning rate", "Share of parameters", "Share of the prunable parameters")


def weights(run: Run, updates: Updates) -> Card | None:
    return _method(updates, "weights", "Merging weights", "Weight", "Weight of each model that was merged")


def control(run: Run, updates: Updates) -> Card | None:
    return _method(updates, "control", "Control parameters", "Control parameter", "Learned factor of each neighbour")


def chosen(run: Run, updates: Updates) -> Card | None:
    return _method(updates, "chosen", "Chosen neighbours", "Neighbours", "How many models were chosen per update")


def bytes_axis(sent: Floats) -> charts.Axis:
    most = float(np.nanmax(sent))
    divide, letter = prefix(most)
    return exact(0.0, most or 1.0, f"Sent ({letter}B)", count=7, divide=divide)


def _method(updates: Updates, name: str, title: str, label: str, note: str) -> Card | None:
    samples = updates.spreads.get(name)
    if samples is None or len(samples) < 2:
        return None
    body = charts.over_time([_spread(title, samples)], label, title)
    return _card(title, f"{note}: median and middle 80 %.", body)


def _spread(name: str, samples: Samples) -> Series:
    middle, low, half, high = banded(samples.times, samples.values)
    return Series(name, middle, half, low, high)


def _lines(series: list[Series], time: Floats, y: charts.Axis, name: str, target: float | None) -> str:
    if not np.isfinite(time).any():
        return ""
    return charts.lines(series, charts.time_axis(time), y, name, width=1140, height=360, target=target)


def _card(title: str, note: str, body: str, wide: bool = False) -> Card | None:
    return Card(title, note, body, wide) if body else None
