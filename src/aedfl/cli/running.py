"""`aedfl run` and `aedfl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..errors import UserError
from .outcome import Interrupted, console

if TYPE_CHECKING:
    from ..experiment.progress import Progress

Source = Annotated[
    str | None,
    typer.Argument(metavar="[PRESET|FILE.toml]", help="A preset of `aedfl presets`, or a config file."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a key: `training.lr=0.1`. May be repeated."),
]
Data = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Where the data sets lie.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Folder to write; a new one in runs/ by default."),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Share the work with a Ray cluster; `local` starts one here."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table; print the folder only.")]


def run(
    source: Source = None,
    overrides: Overrides = None,
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help="A method of `aedfl methods`, or the path of a Python file."),
    ] = None,
    out: Out = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same record, bit for bit.")] = None,
    data: Data = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with an interrupted run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that is in the folder.")] = False,
    ray: Ray = None,
    quiet: Quiet = False,
) -> None:
    """Simulate one run; writes a folder with its record, summary and [bold]report.html[/].

    [bold]Examples[/]

      aedfl run

      aedfl run digits --seed 1 --set devices=50 --set topology.kind=ring

      aedfl run cifar10-lenet --data ~/data --method mine.py --out runs/mine

      aedfl run --resume runs/mine
    """
    if resume is not None:
        _alone(source=source, set=overrides, method=method, out=out, seed=seed, data=data, force=force or None)
        folder, summary = resume, _resumed(resume, ray, quiet)
    else:
        folder, summary = _fresh(source or "digits", overrides or [], method, out, seed, data, force, ray, quiet)
    _tell(folder, summary, quiet)


def compare(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help="What all methods are compared on.")],
    methods: Annotated[str, typer.Option("--methods", "-m", help="Names or Python files, with commas between.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds each method runs with.")] = 1,
    overrides: Overrides = None,
    out: Out = None,
    data: Data = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted comparison in --out.")] = False,
    ray: Ray = None,
    quiet: Quiet = False,
) -> None:
    """Run several methods with several seeds, and put them side by side.

    [bold]Example[/]

      aedfl compare digits --methods aedfl-0,mine.py --seeds 3 --out runs/mine-vs-aedfl-0
    """
    if resume and out is None:
        raise UserError("--resume needs --out, the folder of the comparison to go on with")
    configs = _configs(source, _names(methods), seeds, overrides or [], data, ray)
    folder = out or _free(f"compare-{Path(source).stem}")
    from ..experiment.compare import compare as start

    try:
        summaries = start(configs, folder, resume=resume, progress=_progress(quiet))
    except KeyboardInterrupt as error:
        raise Interrupted(str(error) or f"go on by the same command with --resume --out {folder}") from None
    _tell_all(folder, summaries, quiet)


def _fresh(
    source: str,
    overrides: list[str],
    method: str | None,
    out: Path | None,
    seed: int | None,
    data: Path | None,
    force: bool,
    ray: str | None,
    quiet: bool,
) -> tuple[Path, dict[str, Any]]:
    from ..experiment.config import load

    config = load(source, overrides, method=method, seed=seed, data=_directory(data), **_cluster(ray))
    folder = out or _free(f"{Path(source).stem}-{Path(config.method).stem}-seed{config.seed}")
    from ..experiment.run import run as start

    try:
        return folder, start(config, folder, force=force, progress=_progress(quiet))
    except KeyboardInterrupt as error:
        raise Interrupted(str(error) or f"go on with: aedfl run --resume {folder}") from None


def _resumed(folder: Path, ray: str | None, quiet: bool) -> dict[str, Any]:
    from ..experiment.run import resume as go_on

    try:
        return go_on(folder, progress=_progress(quiet), ray=ray)
    except KeyboardInterrupt:
        raise Interrupted(f"go on with: aedfl run --resume {folder}") from None


def _configs(
    source: str, methods: list[str], seeds: int, overrides: list[str], data: Path | None, ray: str | None
) -> list[Any]:
    from ..experiment.config import load

    first = load(source, overrides).seed
    return [
        load(source, overrides, method=method, seed=first + seed, data=_directory(data), **_cluster(ray))
        for method in methods
        for seed in range(seeds)
    ]


def _names(methods: str) -> list[str]:
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise UserError("--methods is empty; name at least one, such as --methods aedfl-0")
    if len(set(names)) < len(names):
        raise UserError(f"--methods names a method twice: {methods}")
    return names


def _alone(**given: object) -> None:
    extra = [name for name, value in given.items() if value not in (None, [])]
    if extra:
        name = "PRESET" if extra[0] == "source" else f"--{extra[0]}"
        raise UserError(f"--resume takes everything from the run folder, so {name} cannot be given with it")


def _directory(data: Path | None) -> dict[str, str] | None:
    return None if data is None else {"directory": str(data)}


def _cluster(ray: str | None) -> dict[str, str]:
    return {} if ray is None else {"engine.ray": ray}


def _free(name: str) -> Path:
    """A folder in `runs/` that does not exist yet."""
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def _progress(quiet: bool) -> Progress:
    from ..experiment.progress import Live, Silent

    return Silent() if quiet else Live()


def _tell(folder: Path, summary: dict[str, Any], quiet: bool) -> None:
    if quiet:
        print(folder)
        return
    from ..report.tables import key_figures

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value, more in key_figures(summary):
        table.add_row(name, f"[bold]{value}[/]", f"[dim]{more}[/]")
    console.print(table)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)


def _tell_all(folder: Path, summaries: list[dict[str, Any]], quiet: bool) -> None:
    if quiet:
        print(folder)
        return
    from ..report import comparison_table
    from ..report.tables import to_rich

    console.print(to_rich(comparison_table(summaries)))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
