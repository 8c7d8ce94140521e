"""`aedfl presets`, `methods`, `datasets` and `topology`: what there is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .outcome import console

if TYPE_CHECKING:
    from ..context import Method


def presets(
    name: Annotated[str | None, typer.Argument(help="Show this one in full, ready to be a config file.")] = None,
) -> None:
    """List the presets, or print one as TOML: [bold]aedfl presets digits > mine.toml[/]"""
    from ..experiment.config import load, to_toml
    from ..experiment.config import presets as known

    if name is not None:
        print(to_toml(load(name)), end="")
        return
    table = _table("preset", "what it is")
    for preset, description in known().items():
        table.add_row(f"[bold]{escape(preset)}[/]", escape(description))
    console.print(table)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show this one's hyper-parameters.")] = None,
) -> None:
    """List the methods, or one method's hyper-parameters (set them with [bold]--set hyper.NAME=VALUE[/])."""
    from ..algorithms import METHODS, get

    if name is not None:
        _method(get(name))
        return
    table = _table("method", "what it does", "paper")
    for method in METHODS.values():
        table.add_row(f"[bold]{escape(method.name)}[/]", escape(method.summary), escape(method.paper))
    console.print(table)


def datasets(
    data: Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Where to look.")] = None,
) -> None:
    """List the data sets and whether they were found. Nothing is downloaded."""
    from ..data import describe

    table = _table("data set", "task", "train", "test", "place")
    for row in describe(data):
        sizes = [f"{count:,}" if count else "–" for count in (row.train, row.test)]
        place = row.place if row.found else f"not found: {row.place}"
        table.add_row(f"[bold]{escape(row.name)}[/]", escape(row.task), *sizes, escape(place))
    console.print(table)


def topology(
    kind: Annotated[str, typer.Argument(help="exponential, ring, star, torus, full, random or file.")],
    devices: Annotated[int, typer.Option("--devices", "-n", help="How many devices.")] = 16,
    degree: Annotated[int | None, typer.Option("--degree", help="Neighbours of each, for random.")] = None,
    path: Annotated[Path | None, typer.Option("--path", help="Edge list, for file.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="For random.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE.svg", help="Draw it.")] = None,
) -> None:
    """Describe who may send to whom, and draw it.

    [bold]Example[/]

      aedfl topology exponential --devices 16 --out exponential.svg
    """
    from ..topology import describe, draw_svg, make

    given: dict[str, Any] = {"degree": degree, "path": path}
    options = {key: value for key, value in given.items() if value is not None}
    graph = make(kind, devices, seed=seed, **options)
    print(describe(graph))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(draw_svg(graph), encoding="utf-8")
        console.print(f"drawn: {out}", soft_wrap=True)


def _method(method: Method) -> None:
    console.print(f"[bold]{escape(method.name)}[/] – {escape(method.summary)}")
    if method.paper:
        console.print(escape(method.paper))
    fields = dataclasses.fields(method.hyper) if dataclasses.is_dataclass(method.hyper) else ()
    if not fields:
        console.print("It has no hyper-parameters.")
        return
    table = _table("hyper-parameter", "default", "meaning")
    for field in fields:
        default = str(getattr(method.hyper, field.name))
        table.add_row(f"[bold]{field.name}[/]", escape(default), escape(field.metadata.get("help", "")))
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
