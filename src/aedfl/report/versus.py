"""The page that compares several runs: a table, and curves averaged over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import charts, page
from .charts import Series
from .comparison import by_method, comparison_table
from .panels import Card, bytes_axis
from .record import Floats, Run, number
from .scale import fitted, short
from .tables import to_html

LISTED = {
    "accuracy": "accuracy",
    "best_accuracy": "best",
    "time_to_target": "time to target",
    "virtual_seconds": "virtual s",
    "updates": "updates",
    "bytes_sent": "sent",
}


@dataclass(frozen=True)
class Curve:
    """One chart of the page: a metric over another, a line per method."""

    x: str
    y: str
    title: str
    label: str
    wide: bool = False

    @property
    def log_from(self) -> float | None:
        return 100.0 if self.y in ("loss", "consensus") else None


def several(runs: Sequence[Run]) -> str:
    """The page; methods are told apart by name, and by preset and devices where these differ."""
    rows = comparison_table([run.summary for run in runs])
    presets = sorted({str(run.summary.get("preset") or "custom") for run in runs})
    title = f"Comparison on {', '.join(presets)}"
    head = page.heading(title, _counted(len(rows), len(runs)), all(run.finished for run in runs))
    note = "Mean ± standard deviation over seeds; the best of each column is bold."
    table = Card("Results", note, to_html(rows), wide=True)
    curves = [_chart(runs, curve) for curve in _curves(runs[0].metric)]
    config = page.folded("Config of the first run", page.config_table(runs[0].config))
    return page.page(title, head, page.cards([table, *curves, page.folded("Runs", _runs(runs)), config]))


def _counted(methods: int, runs: int) -> str:
    return f"{methods} method{'s' if methods != 1 else ''} · {runs} runs"


def _curves(metric: str) -> list[Curve]:
    name = metric.capitalize()
    return [
        Curve("time", "accuracy", f"{name} over virtual time", f"{name}, mean model", wide=True),
        Curve("bytes_sent", "accuracy", f"{name} over communication", f"{name}, mean model"),
        Curve("time", "local_accuracy", f"{name} of the local models", f"{name}, mean of devices"),
        Curve("time", "loss", "Loss of the mean model", "Loss"),
        Curve("time", "consensus", "Consensus distance", "Distance"),
    ]


def _chart(runs: Sequence[Run], curve: Curve) -> Card | None:
    series = [_averaged(name, group, curve) for name, group in _groups(runs).items()]
    if not any(len(one.x) for one in series):
        return None
    xs = np.concatenate([one.x for one in series])
    values = np.concatenate([part for one in series for part in (one.y, one.low, one.high) if part is not None])
    x = bytes_axis(xs) if curve.x == "bytes_sent" else charts.time_axis(float(xs.max()))
    y = fitted(values, curve.label, zero=True, log_from=curve.log_from)
    target = number(runs[0].summary.get("target_accuracy")) if curve.wide else None
    size = (1140, 400) if curve.wide else (560, 320)
    note = "Mean over seeds; the band goes from the lowest to the highest." if curve.wide else ""
    return Card(curve.title, note, charts.lines(series, x, y, curve.title, *size, target=target), curve.wide)


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    owner = {id(run.summary): run for run in runs}
    grouped = by_method([run.summary for run in runs])
    return {name: [owner[id(summary)] for summary in group] for name, group in grouped.items()}


def _averaged(name: str, runs: Sequence[Run], curve: Curve) -> Series:
    """Mean, lowest and highest of the runs' curves on a common grid, as far as all of them go."""
    curves = [_finite(run.column(curve.x), run.column(curve.y)) for run in runs]
    curves = [(x, y) for x, y in curves if len(x)]
    if len(curves) < 2:
        return Series(name, *(curves[0] if curves else (np.empty(0), np.empty(0))))
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(first, max(last, first), 200)
    values = np.array([np.interp(grid, x, y) for x, y in curves])
    return Series(name, grid, values.mean(0), values.min(0), values.max(0))


def _finite(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    good = np.isfinite(x) & np.isfinite(y)
    return x[good], y[good]


def _runs(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        figures = [short(number(run.summary.get(key)), digits=4) for key in LISTED]
        rows.append([run.path.name, str(run.summary.get("seed", "?")), *figures])
    return page.plain_table(["run", "seed", *LISTED.values()], rows)
