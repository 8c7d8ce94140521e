"""`aedfl report`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .outcome import console


class TableFormat(StrEnum):
    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    html = "html"
    json = "json"


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Run folders, or folders of run folders.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE.html", help="Page to write; report.html in the folder by default."),
    ] = None,
    table: Annotated[
        TableFormat, typer.Option("--table", "-t", help="How the table on the terminal is written.")
    ] = TableFormat.terminal,
) -> None:
    """Write the report of a run, or compare several; an unfinished run is shown as far as it went.

    [bold]Examples[/]

      aedfl report runs/mine

      aedfl report runs/mine runs/theirs --out comparison.html --table latex
    """
    from ..report import comparison_table, write_report
    from ..report.record import find, read
    from ..report.tables import FORMATS, to_rich

    runs = find(folders)
    page = out or (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
    write_report(runs, page)
    rows = comparison_table([read(path).summary for path in runs])
    if table is TableFormat.terminal:
        console.print(to_rich(rows))
        console.print(f"report: {page}", soft_wrap=True)
    else:
        print(FORMATS[table.value](rows), end="")
