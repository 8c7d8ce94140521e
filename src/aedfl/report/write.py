"""`write_report`: run folders in, one page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError
from . import charts, fleet, page, panels
from .charts import Series
from .comparison import by_method, comparison_table, row_name
from .panels import Card, Panel
from .record import Floats, Run, read
from .scale import fitted, short
from .tables import key_figures, to_html
from .updates import read_updates

PANELS: tuple[Panel, ...] = (
    panels.quality,
    panels.quality_over_bytes,
    panels.loss,
    panels.staleness,
    panels.consensus,
    fleet.traffic,
    fleet.activity,
    panels.costs,
    panels.size,
    panels.prune_rate,
    fleet.channels,
    panels.chosen,
    panels.weights,
    panels.control,
    fleet.time_line,
)


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Writes the page `out`: of one run in detail, or of several in comparison.

    An unfinished run is shown as far as it went. Raises `UserError` where there is no run.
    """
    if not run_dirs:
        raise UserError("a report needs at least one run folder")
    runs = [read(Path(path)) for path in run_dirs]
    html = _one(runs[0]) if len(runs) == 1 else _several(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(html, encoding="utf-8")
    partial.replace(out)


def _one(run: Run) -> str:
    updates = read_updates(run.path)
    summary = run.summary
    name = row_name(summary, False)
    title = f"{name} on {summary['preset']}" if summary.get("preset") else name
    subtitle = f"{run.devices:,} devices · seed {summary.get('seed', '?')}"
    shown = [panel(run, updates) for panel in PANELS]
    details = [page.folded("Evaluations", _evaluations(run)), page.folded("Config", page.config_table(run.config))]
    head = page.heading(title, subtitle, run.finished)
    return page.page(title, head, page.tiles(key_figures(summary)), page.cards([*shown, *details]))


def _several(runs: Sequence[Run]) -> str:
    summaries = [run.summary for run in runs]
    rows = comparison_table(summaries)
    presets = sorted({str(summary.get("preset") or "custom") for summary in summaries})
    title = f"Comparison on {', '.join(presets)}"
    subtitle = f"{len(rows)} methods · {len(runs)} runs"
    note = "Mean ± standard deviation over seeds; the best of each column is bold."
    table = Card("Results", note, f"<div></div>{to_html(rows)}", wide=True)
    curves = _curves(runs)
    config = page.folded("Config of the first run", page.config_table(runs[0].config))
    head = page.heading(title, subtitle, all(run.finished for run in runs))
    return page.page(title, head, page.cards([table, *curves, page.folded("Runs", _runs(runs)), config]))


def _curves(runs: Sequence[Run]) -> list[Card | None]:
    metric = runs[0].metric
    title = metric.capitalize()
    band = "Mean over seeds; the band is from the lowest to the highest."
    target = runs[0].summary.get("target_accuracy")
    return [
        _curve(runs, "time", "accuracy", f"{title} over virtual time", f"{title}, mean model", band, target, True),
        _curve(runs, "bytes_sent", "accuracy", f"{title} over communication", f"{title}, mean model", ""),
        _curve(runs, "time", "local_accuracy", "Local models", f"{title}, mean of local models", ""),
        _curve(runs, "time", "loss", "Loss of the mean model", "Loss", ""),
        _curve(runs, "time", "consensus", "Consensus distance", "Distance", ""),
    ]


def _curve(
    runs: Sequence[Run], x: str, y: str, title: str, label: str, note: str, target: float | None = None, wide: bool = False
) -> Card | None:
    series = [_mean_curve(name, group, x, y) for name, group in _groups(runs).items()]
    series = [one for one in series if len(one.x)]
    if not series:
        return None
    xs = np.concatenate([one.x for one in series])
    values = np.concatenate([part for one in series for part in (one.y, one.low, one.high) if part is not None])
    axis = panels.bytes_axis(xs) if x == "bytes_sent" else charts.time_axis(xs)
    size = (1140, 400) if wide else (560, 320)
    fit = fitted(values, label, zero=True, log_from=100.0 if y in ("loss", "consensus") else None)
    return Card(title, note, charts.lines(series, axis, fit, title, *size, target=target), wide)


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    named = {id(run.summary): run for run in runs}
    grouped = by_method([run.summary for run in runs])
    return {name: [named[id(summary)] for summary in group] for name, group in grouped.items()}


def _mean_curve(name: str, runs: Sequence[Run], x: str, y: str) -> Series:
    """Mean, lowest and highest of the runs' curves on a common grid, as far as all of them go."""
    curves = [curve for run in runs if len((curve := _finite(run.column(x), run.column(y)))[0]) > 0]
    if not curves:
        return Series(name, np.empty(0), np.empty(0))
    if len(curves) == 1:
        return Series(name, *curves[0])
    first, last = max(c[0][0] for c in curves), min(c[0][-1] for c in curves)
    grid = np.linspace(first, max(last, first), 200)
    values = np.array([np.interp(grid, *curve) for curve in curves])
    return Series(name, grid, values.mean(0), values.min(0), values.max(0))


def _finite(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    good = np.isfinite(x) & np.isfinite(y)
    return x[good], y[good]


def _evaluations(run: Run) -> str:
    head = ("time", "accuracy", "local_accuracy", "worst_tenth", "loss", "updates", "bytes_sent", "mmacs", "consensus")
    columns = [run.column(name) for name in head]
    picked = np.unique(np.linspace(0, max(len(run.rows) - 1, 0), min(60, len(run.rows))).astype(int))
    rows = [[short(float(column[i]), digits=4) for column in columns] for i in picked]
    return page.plain_table([name.replace("_", " ") for name in head], rows)


def _runs(runs: Sequence[Run]) -> str:
    head = ("run", "seed", "accuracy", "best", "time to target", "virtual s", "updates", "sent")
    keys = ("accuracy", "best_accuracy", "time_to_target", "virtual_seconds", "updates", "bytes_sent")
    rows = []
    for run in runs:
        figures = [short(_float(run.summary.get(key)), digits=4) for key in keys]
        rows.append([run.path.name, str(run.summary.get("seed", "?")), *figures])
    return page.plain_table(head, rows)


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
