"""`aedfl coordinator`, `status`, `leave` and `up`: runs on real machines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import UserError
from .certificates import certs
from .joining import Address, PlainText, Tls, Verbose, choose_security, on_signal
from .members import device, server
from .outcome import console, tidy
from .running import Overrides, Source

if TYPE_CHECKING:
    from ..experiment.config import RunConfig
    from ..net.protocol_pb2 import Status

Method = Annotated[str | None, typer.Option("--method", "-m", help="A method of `aedfl methods`, or a Python file.")]


def coordinator(
    source: Source = None,
    overrides: Overrides = None,
    method: Method = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where devices join.")
    ] = "127.0.0.1:7700",
    state: Annotated[
        Path, typer.Option("--state", metavar="DIR", help="Where the ledger is kept.")
    ] = Path("coordinator"),
    tls: Tls = None,
    plaintext: PlainText = False,
    watch: Annotated[
        str | None, typer.Option("--watch", metavar="HOST:PORT", help="Live page and Prometheus metrics.")
    ] = "127.0.0.1:7780",
    watch_anywhere: Annotated[bool, typer.Option(help="Let --watch be seen from other machines.")] = False,
    wait_for: Annotated[
        int | None, typer.Option(min=1, help="Devices to begin with; those of the config by default.")
    ] = None,
    beat: Annotated[float, typer.Option(min=0.05, help="Seconds between heartbeats.")] = 2.0,
    forget: Annotated[
        float, typer.Option(min=1.0, help="Seconds of silence after which a device has left for good.")
    ] = 3600.0,
    token_hours: Annotated[float, typer.Option(min=0.0, help="Life of the first join token.")] = 24.0,
    token_uses: Annotated[int, typer.Option(min=1, help="New names that the first join token lets in.")] = 1000,
    verbose: Verbose = False,
) -> None:
    """Start a run's coordinator: it hands out indices and watches heartbeats. It sees no model and no data.

    [bold]Example[/]

      aedfl coordinator digits --set devices=8 --tls tls/coordinator --listen 0.0.0.0:7700
    """
    from ..algorithms import get
    from ..net import logs
    from ..net.coordinator import Coordinator
    from ..net.watch import Watch

    security = choose_security(tls, plaintext, "coordinator")
    logs.configure(state, verbose)
    known = (state / "ledger.sqlite").exists()
    config = None if known and source is None and not overrides and not method else _config(source, overrides, method)
    made = Coordinator(config, state, security, beat, forget, wait_for)
    if not made.config.method.endswith(".py") or Path(made.config.method).is_file():
        made.with_server = get(made.config.method).server is not None
    if not made.ledger.has_tokens():
        (state / "token").touch(0o600)
        (state / "token").write_text(made.ledger.new_token(token_hours, token_uses))

    async def serve() -> None:
        port = await made.start(listen)
        page = Watch(made)
        if watch:
            await page.start(watch, watch_anywhere)
            console.print(f"live page: http://{watch.rpartition(':')[0]}:{page.port}", soft_wrap=True)
        console.print(f"coordinator of run {made.run} on port {port}; join token in {state / 'token'}", soft_wrap=True)
        await _until_signal()
        await page.close()
        await made.close()

    asyncio.run(serve())


def status(coordinator: Address, tls: Tls = None, plaintext: PlainText = False) -> None:
    """Show who takes part in a run and how far everybody is."""

    async def ask() -> Status:
        from ..net.link import Link

        link = Link(coordinator, choose_security(tls, plaintext, "guest"))
        try:
            return await link.status()
        finally:
            await link.close()

    _show(asyncio.run(ask()))


def leave(
    coordinator: Address,
    tls: Tls = None,
    plaintext: PlainText = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Who leaves; the owner of the certificate by default.")
    ] = None,
) -> None:
    """Take a device out of a run for good: neighbours are dealt out anew, and it ends with its model."""
    security = choose_security(tls, plaintext, name)

    async def say() -> None:
        from ..net.link import Link, NotAMember

        link = Link(coordinator, security)
        try:
            await link.leave(name or security.name)
        except NotAMember as error:
            raise UserError(str(error)) from None
        finally:
            await link.close()

    asyncio.run(say())
    console.print(f"{name or security.name} has left the run")


def up(
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="How many devices.")],
    source: Source = None,
    overrides: Overrides = None,
    method: Method = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="A new folder for everything.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Data, start values and draws.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="End after so many seconds.")] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="End after so many local updates of each device.")] = None,
    watch: Annotated[str, typer.Option("--watch", metavar="HOST:PORT", help="The live page.")] = "127.0.0.1:0",
    robust: Annotated[str, typer.Option(help="none, trimmed or median over the neighbours' newest models.")] = "none",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the folder only.")] = False,
) -> None:
    """Start a coordinator and N devices on this machine, each a process of its own, with certificates: a first try.

    [bold]Examples[/]

      aedfl up 8

      aedfl up 4 digits --method fedavg --seconds 60
    """
    from ..net import logs
    from ..net.local import Local
    from .running import _free

    config = _config(source, overrides, method, devices=count, seed=seed)
    config = _limits(config, seconds, updates)
    folder = out or _free(f"up-{Path(config.method).stem}")
    run = Local(config, folder, ["--robust", robust])
    logs.configure(folder / "coordinator")

    async def carry_out() -> None:
        await run.start(watch)
        assert run.watch is not None
        try:
            if quiet:
                await run.wait()
            else:
                await _watched(run.wait, f"http://127.0.0.1:{run.watch.port}")
        finally:
            await run.close()

    asyncio.run(carry_out())
    summary = run.summary()
    if quiet:
        print(folder)
        return
    for key in ("accuracy", "local_accuracy", "updates", "seconds", "bytes_sent"):
        value = summary[key]
        console.print(f"{key.replace('_', ' ')}: {value:,.4g}" if isinstance(value, float) else f"{key}: {value:,}")
    console.print(f"models and records: {folder}", soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Adds these commands to the application."""
    for command in (coordinator, device, server, status, leave, up):
        app.command(command.__name__, rich_help_panel="On real machines")(tidy(command))
    app.add_typer(certs, name="certs", rich_help_panel="On real machines")


def _config(source: str | None, overrides: list[str] | None, method: str | None, **top: Any) -> RunConfig:
    from ..experiment.config import load

    return load(source or "digits", overrides or [], method=method, **top)


def _limits(config: RunConfig, seconds: float | None, updates: int | None) -> RunConfig:
    """How long `up` runs: as said, or else a minute."""
    chosen = seconds if seconds is not None or updates is not None else 60.0
    stop = config.stop.model_copy(update={"virtual_seconds": chosen, "updates": updates})
    return config.model_copy(update={"stop": stop})


async def _until_signal() -> None:
    ended = asyncio.Event()
    on_signal(ended.set)
    await ended.wait()


async def _watched(wait: Any, page: str) -> None:
    def line(found: Status) -> str:
        members = [member for member in found.view.members if member.index >= 0]
        here = sum(member.state == "here" for member in members)
        done = sum(member.report.update for member in members)
        return f"{here} devices here · {done} local updates · {found.view.elapsed:.0f} s · {page}"

    with console.status("starting") as shown:
        work: Coroutine[Any, Any, None] = wait(lambda found: shown.update(line(found)))
        await work


def _show(found: Status) -> None:
    view = found.view
    phase = "over" if view.over else "running" if view.begun else "waiting for devices"
    console.print(f"run {found.run} · {escape(found.method)} · {phase} · {view.elapsed:.0f} s")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("device", "name", "state", "heartbeat", "updates", "loss", "sent", "lost", "refused", "trouble"):
        table.add_column(column)
    for member in sorted(view.members, key=lambda each: each.index):
        report = member.report
        table.add_row(
            "server" if member.index < 0 else str(member.index), escape(member.name), member.state,
            f"{member.silent:.0f} s ago", str(report.update), f"{report.loss:.4g}", f"{report.bytes_sent / 1e6:.1f} MB",
            str(report.messages_lost), str(report.refused), escape(report.trouble),
        )  # fmt: skip
    console.print(table)
