"""`write_report`: run folders in, one page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import UserError
from . import fleet, page, panels
from .comparison import row_name
from .panels import Panel
from .record import Run, read
from .scale import short
from .tables import key_figures
from .updates import read_updates
from .versus import several

PANELS: tuple[Panel, ...] = (
    panels.quality,
    panels.quality_over_bytes,
    panels.loss,
    panels.staleness,
    panels.consensus,
    fleet.traffic,
    fleet.idle,
    panels.costs,
    panels.size,
    panels.prune_rate,
    fleet.channels,
    panels.merged,
    panels.priorities,
    panels.weights,
    panels.control,
    fleet.time_line,
)
EVALUATED = (
    "time",
    "accuracy",
    "local_accuracy",
    "worst_tenth",
    "loss",
    "updates",
    "bytes_sent",
    "consensus",
)


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Writes the page `out`: of one run in detail, or of several in comparison.

    An unfinished run is shown as far as it went. Raises `UserError` where there is no run.
    """
    if not run_dirs:
        raise UserError("a report needs at least one run folder")
    runs = [read(Path(path)) for path in run_dirs]
    html = one(runs[0]) if len(runs) == 1 else several(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(html, encoding="utf-8")
    partial.replace(out)


def one(run: Run) -> str:
    """The page of a single run."""
    updates = read_updates(run.path)
    name = row_name(run.summary, False)
    title = f"{name} on {run.summary['preset']}" if run.summary.get("preset") else name
    subtitle = f"{run.devices:,} devices · seed {run.summary.get('seed', '?')}"
    config = page.folded("Config", page.config_table(run.config))
    shown = [
        *(panel(run, updates) for panel in PANELS),
        page.folded("Evaluations", _evaluations(run)),
        config,
    ]
    head = page.heading(title, subtitle, run.finished)
    return page.page(title, head, page.tiles(key_figures(run.summary)), page.cards(shown))


def _evaluations(run: Run, most: int = 60) -> str:
    columns = [run.column(name) for name in EVALUATED]
    last = max(len(run.rows) - 1, 0)
    picked = np.unique(np.linspace(0, last, min(most, len(run.rows))).astype(int))
    rows = [[short(float(column[i]), digits=4) for column in columns] for i in picked]
    return page.plain_table([name.replace("_", " ") for name in EVALUATED], rows)
