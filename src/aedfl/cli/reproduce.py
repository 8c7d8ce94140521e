"""`aedfl reproduce`: the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from .outcome import Interrupted, console, errors, stoppable, tidy

if TYPE_CHECKING:
    from ..reproduce.plan import Wish
    from ..reproduce.records import Store

TARGETS = {
    "table1": "EMNIST & LeNet, CIFAR-10 & ResNet-8, Tiny-ImageNet & VGG-9 and ResNet-8, IMDb & TextCNN: 15 methods.",
    "table2": "CIFAR-10 & LeNet and VGG-9: 15 methods.",
    "fig-c": "What C, the weight of the gradient in pruning, does to AEDFL.",
    "fig-bandwidth": "Time to target with slow links.",
    "fig-heterogeneity": "Accuracy with more and less equal devices.",
    "fig-topology": "Exponential graph, ring and star.",
    "fig-200": "200 devices.",
    "fig-ablation": "AEDFL with some of its modules switched off.",
}

RESULTS, QUICK, OWN = Path("results"), Path("runs/reproduce-quick"), Path("runs/reproduce-own")

Settings = Annotated[str | None, typer.Option("--settings", metavar="A,B", help="Only these settings.")]
Methods = Annotated[str | None, typer.Option("--methods", "-m", metavar="A,B", help="Only these methods.")]
Seeds = Annotated[int | None, typer.Option("--seeds", min=1, help="How many seeds; each target has its own default.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few devices, samples, seconds and methods: minutes on a CPU.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Where records, tables and plots lie; results by default (runs/reproduce-own for pages of a changed run).",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option("--minutes", metavar="M", help="Stop after so many minutes; unfinished runs leave what they have."),
]
Until = Annotated[
    float | None,
    typer.Option("--until", metavar="T", help="Run to, and compare at, this virtual time instead of the setting's."),
]
Data = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="Where the data sets lie.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a key of all runs. May be repeated."),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or auto.")]
AtOnce = Annotated[int | None, typer.Option("--at-once", min=1, help="Runs that share one batch.")]
Processes = Annotated[
    int,
    typer.Option("--processes", "-p", min=1, metavar="N", help="Run N at once, each in a process with its own cores."),
]
Tuning = Annotated[
    Path | None,
    typer.Option("--tuning", metavar="DIR", help="Where tables find what tuning chose; results/tuning by default."),
]
Checkpoints = Annotated[
    Path | None,
    typer.Option("--checkpoints", metavar="DIR", help="Keep unfinished runs here, and go on with those that are."),
]
Share = Annotated[
    str | None,
    typer.Option(
        "--share", metavar="K/N", help="Run the K-th of N shares; N processes or machines with an --out each do it all."
    ),
]
RecordsOnly = Annotated[bool, typer.Option("--records-only", help="Write records, but no tables, plots or overview.")]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="The paper's tables and figures.")


def register(main: typer.Typer) -> None:
    """Puts `reproduce` and all its targets into the application."""
    for name, summary in TARGETS.items():
        app.command(name, help=summary)(tidy(_command(name)))
    app.command("tune")(tidy(tune))
    app.command("list")(tidy(status))
    app.command("tables")(tidy(tables))
    app.command("collect")(tidy(collect))
    main.add_typer(app, name="reproduce")


def _command(name: str) -> Callable[..., None]:
    def command(
        settings: Settings = None,
        methods: Methods = None,
        seeds: Seeds = None,
        quick: Quick = False,
        out: Out = None,
        minutes: Minutes = None,
        until: Until = None,
        data: Data = None,
        overrides: Overrides = None,
        device: Device = None,
        at_once: AtOnce = None,
        tuning: Tuning = None,
        checkpoints: Checkpoints = None,
        records_only: RecordsOnly = False,
        share: Share = None,
        processes: Processes = 1,
    ) -> None:
        from ..reproduce import plan
        from ..reproduce.pool import Clock
        from ..reproduce.records import Store
        from ..reproduce.sitting import Sitting
        from ..reproduce.tune import frozen

        clock = Clock(_positive("--minutes", minutes))
        wish = _wish(settings, methods, seeds, overrides, quick, until, data, device)
        folder = out or (QUICK if quick else RESULTS)
        wanted = plan.cells(plan.target(name), wish, frozen(_choices(tuning)))
        store, count = Store(folder / "records"), _processes(processes, at_once)
        sitting = Sitting(store, _say, clock, at_once, checkpoints, _share(share), count)
        try:
            with stoppable():
                sitting.run(wanted)
        except KeyboardInterrupt:
            raise Interrupted("finished cells are kept; go on by the same command") from None
        if not records_only:
            _publish(name, sitting.store, wish, folder if out or wish.quick else _own(name, wish, tuning))
        _verdict(sitting.failed)

    return command


def _share(given: str | None) -> tuple[int, int]:
    """Which of the runs are this process's, from `K/N`."""
    place, slash, count = (given or "1/1").partition("/")
    if not (slash and place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count)):
        raise UserError(f"--share is '{given}'; allowed is K/N with K from 1 to N, such as 2/8")
    return int(place), int(count)


def _choices(tuning: Path | None) -> Path:
    """Where tuning's choices lie; a folder that is named has to be there, so that no typing error is taken for none."""
    if tuning is not None and not tuning.is_dir():
        raise UserError(f"--tuning {tuning}: there is no such folder; an empty one stands for no choices")
    return tuning or RESULTS / "tuning"


def _processes(count: int, at_once: int | None) -> int:
    if count > 1 and at_once not in (None, 1):
        raise UserError(f"--at-once is {at_once}; with --processes {count}, 1 is allowed: each process has one run")
    return count


def _own(name: str, wish: Wish, tuning: Path | None) -> Path:
    """Where a table or figure goes: what is run to another end, with other keys or of other methods must not take the
    published one's place."""
    from ..reproduce.plan import target

    aim = target(name)
    known = set(wish.settings) <= set(aim.settings) and set(wish.methods) <= set(aim.methods)
    return RESULTS if known and wish.until is None and not wish.changes(()) and tuning is None else OWN


def _publish(name: str, store: Store, wish: Wish, folder: Path) -> None:
    """Writes the target's table or figure, and says where."""
    from ..reproduce import plan, publish
    from ..reproduce.overview import overview

    files = publish.of_target(plan.target(name), store, wish)
    if not wish.quick and not wish.overrides and wish.until is None:
        files["README.md"] = overview(store)
    publish.write(files, folder)
    page = next(path for path in files if path.endswith(f"{name}.md"))
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(files[page]))
    _say(f"written: {folder / page}")


def tables(
    out: Out = None,
    until: Until = None,
) -> None:
    """Write all tables, plots and the overview anew, from the records alone."""
    from ..reproduce.records import Store

    store = Store((out or RESULTS) / "records")
    if not len(store):
        raise UserError(f"{store.folder} holds no records, from which tables are written; --out names another folder")
    _write_all(store, out, _positive("--until", until))


def _write_all(store: Store, out: Path | None, end: float | None = None) -> None:
    """Tables, plots and overview, as far as there are records; compared at another end, in a folder of their own."""
    from ..reproduce import plan, publish

    folder = out or (RESULTS if end is None else OWN)
    if end is None:
        files = publish.everything(store)
    else:
        wish = plan.Wish(until=end)
        files = {k: v for base in plan.targets().values() for k, v in publish.of_target(base, store, wish).items()}
    publish.write(files, folder)
    _say(f"written: {len(files)} files in {folder}")


def collect(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders with records from other machines.")],
    out: Out = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also take records of another config in place of longer ones.")
    ] = False,
) -> None:
    """Take over records that were made elsewhere, then write all tables anew."""
    from ..reproduce.collect import collect as take
    from ..reproduce.records import Store

    outcome = take(sources, out or RESULTS, replace)
    _say(f"taken over: {outcome.taken} records; left: {outcome.left} that do not go as far as those here")
    _write_all(Store((out or RESULTS) / "records"), out)


def status(
    out: Out = None,
    tuning: Tuning = None,
) -> None:
    """Say which cells are done, which are out of date, and the command for each one that is missing."""
    from ..reproduce.overview import report
    from ..reproduce.records import Store
    from ..reproduce.tune import frozen

    folder = out or RESULTS
    for line in report(Store(folder / "records"), frozen(_choices(tuning))):
        _say(line)


def tune(
    setting: Annotated[str, typer.Argument(help="The setting, such as cifar10-lenet.")],
    methods: Methods = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="Trials of each method; 4 by default, 2 where runs are dear.")
    ] = None,
    out: Out = None,
    minutes: Minutes = None,
    until: Until = None,
    data: Data = None,
    overrides: Overrides = None,
    quick: Quick = False,
    device: Device = None,
    at_once: AtOnce = None,
    checkpoints: Checkpoints = None,
    share: Share = None,
    processes: Processes = 1,
) -> None:
    """Try a few hyper-parameters of each method on validation data, then the best with weight decay; freeze what wins.

    Where a setting has a last stage (tuning.toml), what won is run for longer on another seed, with and without decay.

    Validation data are a tenth of the training data, set aside; the test set is not looked at.
    """
    from ..reproduce import plan
    from ..reproduce import tune as tuning
    from ..reproduce.pool import Clock
    from ..reproduce.records import Store
    from ..reproduce.sitting import Sitting

    clock = Clock(_positive("--minutes", minutes))
    plan.setting(setting)
    wish = tuning.aim(setting, _wish(None, methods, None, overrides, quick, until, data, device))
    store = Store((out or (QUICK if quick else RESULTS)) / "tuning")
    sitting = Sitting(store, _say, clock, at_once, checkpoints, _share(share), _processes(processes, at_once))
    end, count = tuning.terms(setting, store.folder, wish, trials)

    def frozen() -> dict[str, Any]:
        return tuning.freeze(setting, store, end, count, wish)

    tried = wish.methods or tuning.methods()
    try:
        with stoppable():
            sitting.run(tuning.plan(setting, tried, count, wish))
            sitting.run(tuning.plan_further(setting, tried, frozen(), wish))
            sitting.run(tuning.plan_late(setting, tried, frozen(), wish))
    except KeyboardInterrupt:
        frozen()
        raise Interrupted("finished trials are kept; go on by the same command") from None
    for method, one in frozen()["methods"].items():
        found = one["chosen"]
        _say(f"{method}: {'undecided' if found is None else found or 'default'}")
    _verdict(sitting.failed)


def _wish(
    settings: str | None,
    methods: str | None,
    seeds: int | None,
    overrides: list[str] | None,
    quick: bool,
    until: float | None,
    data: Path | None,
    device: str | None,
) -> Wish:
    from ..reproduce.plan import Wish

    return Wish(
        settings=_names("--settings", settings),
        methods=_names("--methods", methods),
        seeds=seeds,
        overrides=tuple(overrides or ()),
        quick=quick,
        until=_positive("--until", until),
        data=None if data is None else str(data),
        device=device,
    )


def _names(option: str, given: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (given or "").split(",") if name.strip())
    if given is not None and not names:
        raise UserError(f"{option} is empty; name at least one")
    if len(set(names)) < len(names):
        raise UserError(f"{option} names one twice: {given}")
    return names


def _positive(option: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise UserError(f"{option} {value:g}: must be a number above 0")
    return value


def _say(line: str) -> None:
    print(line, flush=True)


def _verdict(failed: list[str]) -> None:
    """Ends with an error if anything could not be run, after all else was."""
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        errors.print(f"[bold red]failed:[/] {failed[0]}{more}", markup=True)
        raise typer.Exit(1)
