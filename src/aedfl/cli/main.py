"""The application and what all commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import bench, deploy, listing, reporting, reproduce, running
from .outcome import console, tidy

EXAMPLES = """\
Simulate asynchronous decentralised federated learning: a fleet of heterogeneous devices on a virtual clock.

[bold]Start here[/]

[cyan]aedfl run[/]  [dim]embedded digits, 20 devices, a minute[/]

[cyan]aedfl run cifar10-lenet --data ~/data[/]  [dim]the paper's setting[/]

[cyan]aedfl run mine.toml --set training.lr=0.1[/]  [dim]your own config[/]

[cyan]aedfl compare digits --methods aedfl-0,mine.py --seeds 3[/]
"""

app = typer.Typer(
    name="aedfl",
    help=EXAMPLES,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        console.print(f"aedfl {__version__}")
        raise typer.Exit


@app.callback()
def _shared(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None: ...


app.command("run")(tidy(running.run))
app.command("compare")(tidy(running.compare))
app.command("report")(tidy(reporting.report))
app.command("presets")(tidy(listing.presets))
app.command("methods")(tidy(listing.methods))
app.command("datasets")(tidy(listing.datasets))
app.command("topology")(tidy(listing.topology))
deploy.register(app)
reproduce.register(app)
bench.register(app)


def main() -> None:
    """Entry point of the `aedfl` script."""
    app()
