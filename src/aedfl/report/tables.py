"""The comparison as a terminal table, Markdown, LaTeX, HTML, or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from rich.markup import escape as plain
from rich.table import Table

from .comparison import Cell, Column, Row, used, written
from .record import metric_name, number
from .scale import seconds, short

LATEX = str.maketrans({**{c: f"\\{c}" for c in "&%$#_{}"}, "~": r"\textasciitilde{}", "^": r"\^{}", "\\": "/"})


def to_rich(rows: Sequence[Row], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", header_style="dim", box=None, padding=(0, 2, 0, 0))
    table.add_column("method")
    table.add_column("seeds", justify="right")
    for column in used(rows):
        table.add_column(column.brief, justify="right")
    for row in rows:
        table.add_row(plain(row.name), str(row.seeds), *_texts(row, used(rows), "[bold green]{}[/]"))
    return table


def to_markdown(rows: Sequence[Row]) -> str:
    columns = used(rows)
    head = ["method", "seeds", *(column.title for column in columns)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    lines += [[row.name.replace("|", "\\|"), str(row.seeds), *_texts(row, columns, "**{}**")] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_latex(rows: Sequence[Row]) -> str:
    """A `tabular` for the booktabs package."""
    columns = used(rows)
    head = " & ".join(["method", "seeds", *(column.title for column in columns)])
    body = "".join(
        " & ".join([row.name.translate(LATEX), str(row.seeds), *_texts(row, columns, r"\textbf{{{}}}")])
        .replace("±", r"$\pm$")
        .replace("–", "--")
        + " \\\\\n"
        for row in rows
    )
    shape = f"l{'r' * (len(columns) + 1)}"
    top = f"\\begin{{tabular}}{{{shape}}}\n\\toprule\n{head} \\\\\n\\midrule\n"
    return f"{top}{body}\\bottomrule\n\\end{{tabular}}\n"


def to_html(rows: Sequence[Row]) -> str:
    columns = used(rows)
    head = "".join(f"<th>{escape(title)}</th>" for title in ("method", "seeds", *(c.title for c in columns)))
    body = "".join(
        f"<tr><td>{escape(row.name)}</td><td>{row.seeds}</td>"
        f"{''.join(_html(row.cells[column.key], column) for column in columns)}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def to_json(rows: Sequence[Row]) -> str:
    table = [{"method": row.name, "seeds": row.seeds} | _plain(row) for row in rows]
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "markdown": to_markdown,
    "latex": to_latex,
    "html": to_html,
    "json": to_json,
}


def key_figures(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The figures of one run: name, value, and what to know about it."""
    get = {key: number(value) for key, value in summary.items()}.get
    metric = metric_name(summary)
    return [
        (metric.capitalize(), _figure(get("accuracy")), f"best {_figure(get('best_accuracy'))}"),
        (f"Local {metric}", _figure(get("local_accuracy")), f"worst tenth {_figure(get('worst_tenth'))}"),
        (
            "Time to target",
            seconds(get("time_to_target")),
            _goal(get("target_accuracy"), get("time_to_target")),
        ),
        ("Virtual time", seconds(get("virtual_seconds")), f"computed in {seconds(get('wall_seconds'))}"),
        ("Local updates", short(get("updates")), f"{short(get('samples'))} samples"),
        ("Sent", short(get("bytes_sent"), "B"), "all devices together"),
        ("MMACs per sample", short(get("mmacs")), "forward pass, mean of devices"),
    ]


def _goal(target: float | None, reached: float | None) -> str:
    if target is None:
        return "no target set"
    return f"target {target:g}" if reached is not None else f"target {target:g} not reached"


def _texts(row: Row, columns: Sequence[Column], bold: str) -> list[str]:
    found = []
    for column in columns:
        value, rest = written(row.cells[column.key], column)
        value = bold.format(value) if row.cells[column.key].best else value
        found.append(f"{value} {rest}".strip())
    return found


def _html(cell: Cell, column: Column) -> str:
    value, rest = written(cell, column)
    return f'<td{" class=best" if cell.best else ""}>{value} <span class="pm">{rest}</span></td>'


def _plain(row: Row) -> dict[str, Any]:
    return {
        key: {"mean": cell.mean, "std": cell.std, "seeds": cell.count, "best": cell.best}
        for key, cell in row.cells.items()
    }


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"
