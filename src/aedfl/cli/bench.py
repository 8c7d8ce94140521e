"""`aedfl bench`: how fast it is here, beside what others do, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import UserError
from .outcome import console, tidy

if TYPE_CHECKING:
    from ..bench.table import Figures, Tell

app = typer.Typer(
    name="bench",
    help="Measure speed, growth and memory on this machine; every figure comes with machine, date and command.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there; `-` prints them instead.")
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


def engine(
    device: Device = "cpu",
    models: Annotated[str, typer.Option("--models", help="With commas between.")] = "lenet5,resnet8,vgg9,textcnn",
    jobs: Annotated[str, typer.Option("--jobs", help="Models trained at once in the bare step.")] = "1,20,100",
    bf16: Annotated[bool, typer.Option("--bf16", help="In bfloat16 instead of TF32, on a GPU.")] = False,
    trainer: Annotated[str, typer.Option("--trainer", help="auto, sequential or batched.")] = "auto",
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="Of each device; 0: as the real data set on a GPU, 200 on a CPU.")
    ] = 0,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Of a local update.")] = 4,
    exchange: Annotated[
        int, typer.Option("--exchange", min=0, help="Epochs between two exchanges of models; 0: a whole local update.")
    ] = 0,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="Of the bare training; 0: 400 on a GPU, 4 on a CPU.")
    ] = 0,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="About how long each simulation takes.")] = 20.0,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Seeds simulated together.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of the bare training; the median counts.")] = 3,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also say where the simulation's time goes; it runs slower then.")
    ] = False,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap", help="Simulate on while jobs are computed (engine.overlap). Default: on a GPU."
        ),
    ] = None,
    out: Json = None,
) -> None:
    """Samples per second of the training step alone and of a whole simulation of 100 devices.

    Their ratio is given for the whole simulation and, as steady, for its second half.

    [bold]Example[/]

      aedfl bench engine --device cuda --models lenet5,resnet8 --json engine.json
    """
    _one_of("--device", device, ("cpu", "cuda"))
    _one_of("--trainer", trainer, ("auto", "sequential", "batched"))
    from ..bench import engine as bench

    options = bench.Options(
        device, _names(models), _numbers("--jobs", jobs), bf16, trainer, samples, epochs, exchange, steps, seconds,
        runs, repeats, profile, overlap,
    )  # fmt: skip
    with _telling() as tell:
        found = bench.measure(options, tell)
    _show(found, bench.table(found), out, bench.profile(found))


def peers(
    names: Annotated[
        str, typer.Option("--peers", help="With commas between.")
    ] = "aedfl,pfl-1,pfl-2,flower,fluke,gossipy",
    clients: Annotated[int, typer.Option("--clients", min=1, help="All of them train in every round.")] = 100,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Of each client.")] = 600,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="That are counted; one more comes first.")] = 3,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns of every simulator.")] = 3,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of torch in a simulator that is one process.")] = 1,
    python: Annotated[
        str | None, typer.Option("--python", help="Interpreter for the environments; by default this one.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where they are made; the cache by default.")
    ] = None,
    out: Json = None,
) -> None:
    """The same work by other simulators, side by side: LeNet, batches of 50, an epoch of SGD in every round.

    Each is installed by pip into an environment of its own the first time, about 1.5 GB each.

    [bold]Example[/]

      aedfl bench peers --peers aedfl,pfl-2,flower --json peers.json
    """
    import sys

    from ..bench.peers import compare as bench

    options = bench.Options(
        _names(names), clients, samples, rounds=rounds, repeats=repeats, threads=threads,
        python=python or sys.executable, folder=folder,
    )  # fmt: skip
    with _telling() as tell:
        found = bench.measure(options, tell)
    _show(found, bench.table(found), out)


def scale(
    devices: Annotated[str, typer.Option("--devices", help="Fleets, with commas between.")] = "100,1000,10000",
    updates: Annotated[int, typer.Option("--updates", min=1, help="Of each whole fleet, about.")] = 50_000,
    method: Annotated[str, typer.Option("--method", "-m", help="A method of `aedfl methods`.")] = "aedfl-0",
    out: Json = None,
) -> None:
    """Cost of a local update, memory and where the time goes, with ever more devices."""
    counts = _numbers("--devices", devices)
    from ..algorithms import get
    from ..bench import scale as bench

    get(method)
    with _telling() as tell:
        found = bench.measure(bench.Options(counts, updates, method), tell)
    _show(found, bench.table(found), out)


def overhead(
    model: Annotated[str, typer.Option("--model", help="An image model.")] = "lenet5",
    updates: Annotated[int, typer.Option("--updates", min=1, help="Of the whole fleet of 20, in each turn.")] = 60,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns; the median counts.")] = 5,
    out: Json = None,
) -> None:
    """A simulation beside the bare PyTorch loop that does the same steps."""
    from ..bench import overhead as bench

    with _telling() as tell:
        found = bench.measure(bench.Options(model, updates, repeats), tell)
    _show(found, bench.table(found), out)


def pruning(
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of torch.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns; the median counts.")] = 7,
    out: Json = None,
) -> None:
    """What training with half of the units saves, and what a pruning step costs."""
    from ..bench import pruning as bench

    with _telling() as tell:
        found = bench.measure(bench.Options(threads, repeats), tell)
    _show(found, bench.table(found), out)


def wire(
    parameters: Annotated[int, typer.Option("--parameters", min=1, help="Of the models that are sent.")] = 5_000_000,
    messages: Annotated[int, typer.Option("--messages", min=1, help="Sent in each turn.")] = 20,
    small: Annotated[int, typer.Option("--small", min=1, help="Small messages sent in each turn.")] = 1000,
    large: Annotated[
        int, typer.Option("--large", min=0, help="Parameters of a model whose copies are counted; 0: none.")
    ] = 100_000_000,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns; rates are the best, ratios the median.")] = 5,
    out: Json = None,
) -> None:
    """Bytes and messages per second between two devices, beside bare gRPC and a bare socket."""
    try:
        from ..bench import wire as bench
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("grpc", "google", "cryptography"):
            raise
        raise UserError("aedfl bench wire needs what real machines need: pip install 'aedfl[deploy]'") from None
    with _telling() as tell:
        found = bench.measure(bench.Options(parameters, messages, small, large, repeats), tell)
    _show(found, bench.table(found), out)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    names = _names(text)
    if not names or not all(name.isdecimal() and int(name) for name in names):
        raise UserError(f"{option} is {text!r}; allowed are whole numbers from 1 on, with commas between")
    return tuple(int(name) for name in names)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option} is {value!r}; allowed are {', '.join(allowed)}")


@contextmanager
def _telling() -> Iterator[Tell]:
    """A bar on stderr, so that stdout holds figures only."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting …", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield tell


def _show(found: dict[str, Any], figures: Figures, out: Path | None, second: Figures | None = None) -> None:
    """The table, with the machine, and perhaps a second one; and JSON where it is wanted."""
    text = json.dumps(found, indent=2)
    if out is not None and str(out) == "-":
        print(text)
        return
    for each in (figures, second):
        if each is not None:
            _draw(each)
    console.print(f"[dim]{escape(_machine(found))}[/]", soft_wrap=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
        console.print(f"figures: {out}", soft_wrap=True)


def _draw(figures: Figures) -> None:
    drawn = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for place, column in enumerate(figures.columns):
        drawn.add_column(column, justify="left" if place < figures.names else "right")
    for row in figures.rows:
        drawn.add_row(f"[bold]{escape(row[0])}[/]", *(escape(cell) for cell in row[1:]))
    console.print(drawn)
    for note in figures.notes:
        console.print(f"[dim]{escape(note)}[/]", soft_wrap=True)


def _machine(found: dict[str, Any]) -> str:
    place, torch = found["machine"], found["versions"]["torch"]
    gpu = f"{place['gpu']}, " if "gpu" in place else ""
    size = f"{place['cores']} cores, {place['memory_gib']:g} GiB, load {place['load_average']:g}"
    return f"{gpu}{place['cpu']}, {size} · torch {torch} · {found['date']}"


def register(parent: typer.Typer) -> None:
    """Puts `bench` and its commands under the application."""
    for command in (engine, peers, scale, wire, overhead, pruning):
        app.command(command.__name__)(tidy(command))
    parent.add_typer(app)
