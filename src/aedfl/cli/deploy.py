"""`aedfl coordinator`, `device`, `server`, `status`, `leave` and `up`: runs on real machines."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import UserError
from .certificates import certs
from .outcome import console, tidy
from .running import Overrides, Source

if TYPE_CHECKING:
    from ..experiment.config import RunConfig
    from ..net.credentials import Security
    from ..net.options import Prepare
    from ..net.protocol_pb2 import Status

Address = Annotated[str, typer.Option("--coordinator", "-c", metavar="HOST:PORT", help="Where the coordinator is.")]
Tls = Annotated[
    Path | None, typer.Option("--tls", metavar="DIR", help="Folder with ca.pem, cert.pem and key.pem.")
]
PlainText = Annotated[
    bool, typer.Option("--plaintext", help="No encryption, no identities; on 127.0.0.1 only.")
]
Name = Annotated[str | None, typer.Option("--name", help="With --plaintext: what the certificate would say.")]
Token = Annotated[str | None, typer.Option("--token", help="Join token; --token-file keeps it out of `ps`.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help="File with the join token.")]
Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where others' models arrive; port 0: any.")]
Advertise = Annotated[
    str, typer.Option("--advertise", metavar="HOST:PORT", help="Where others reach it, if not where it listens.")
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="MODULE:CLASS", help="The model; the run's own by default.")
]
Classes = Annotated[int | None, typer.Option("--classes", help="Number of labels, if the data do not show them all.")]
MethodFile = Annotated[
    str | None, typer.Option("--method", help="This machine's copy of the run's method, if it is a file.")
]
Method = Annotated[str | None, typer.Option("--method", "-m", help="A method of `aedfl methods`, or a Python file.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log everything of interest to stderr.")]


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
    wait_for: Annotated[int | None, typer.Option(help="Devices to begin with; those of the config by default.")] = None,
    beat: Annotated[float, typer.Option(min=0.05, help="Seconds between heartbeats.")] = 2.0,
    forget: Annotated[float, typer.Option(help="Seconds of silence after which a device has left for good.")] = 3600.0,
    token_hours: Annotated[float, typer.Option(help="Life of the first join token.")] = 24.0,
    token_uses: Annotated[int, typer.Option(help="New names that the first join token lets in.")] = 1000,
    verbose: Verbose = False,
) -> None:
    """Start a run's coordinator: it hands out indices and watches heartbeats. It sees no model and no data.

    [bold]Example[/]

      aedfl coordinator digits --set devices=8 --tls tls/coordinator --listen 0.0.0.0:7700
    """
    from ..algorithms import METHODS
    from ..net import logs
    from ..net.coordinator import Coordinator
    from ..net.watch import Watch

    security = _security(tls, plaintext, "coordinator")
    logs.configure(state, verbose)
    known = (state / "ledger.sqlite").exists()
    config = None if known and source is None and not overrides and not method else _config(source, overrides, method)
    made = Coordinator(config, state, security, beat, forget, wait_for)
    made.with_server = made.config.method in METHODS and METHODS[made.config.method].server is not None
    if not known:
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


def device(
    coordinator: Address,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Own data as a Parquet file; or a public set, dealt out by index."),
    ] = None,
    model: Model = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="State, record and model.")] = Path("device"),
    tls: Tls = None,
    plaintext: PlainText = False,
    name: Name = None,
    token: Token = None,
    token_file: TokenFile = None,
    listen: Listen = "127.0.0.1:0",
    advertise: Advertise = "",
    test: Annotated[Path | None, typer.Option("--test", metavar="FILE", help="Own test data.")] = None,
    classes: Classes = None,
    target: Annotated[str | None, typer.Option("--target", help="Column of the labels.")] = None,
    features: Annotated[list[str] | None, typer.Option("--feature", help="Column of inputs; may be repeated.")] = None,
    method: MethodFile = None,
    index: Annotated[int | None, typer.Option("--index", help="The index to ask for, if it is free.")] = None,
    cosine: Annotated[
        float | None, typer.Option(help="Keep out models that moved in another direction than the own: least cosine.")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Pull models nearer than this many times the own norm.")] = None,
    robust: Annotated[str, typer.Option(help="none, trimmed or median over the neighbours' newest models.")] = "none",
    trim: Annotated[float, typer.Option(help="With trimmed: the share left out at either end.")] = 0.34,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one training.")] = 1,
    verbose: Verbose = False,
) -> None:
    """Take part in a run with this machine's data; leaves [bold]model.safetensors[/] and a record in --out.

    [bold]Example[/]

      aedfl device --coordinator 192.0.2.7:7700 --tls tls/device-3 --token-file token --data mine.parquet
      --model models/net.py:Net --listen 0.0.0.0:7701 --advertise 192.0.2.13:7701
    """
    from ..net.gate import Robust
    from ..net.kit import gather

    if robust not in ("none", "trimmed", "median"):
        raise UserError(f"--robust is {robust!r}; allowed are none, trimmed, median")
    if not 0.0 <= trim < 0.5:
        raise UserError(f"--trim is {trim:g}; allowed is a share from 0 to below 0.5")
    gate = Robust(cosine, clip, robust, trim)  # type: ignore[arg-type]
    _take_part(
        lambda config: gather(config, data, test, model, classes, features, target, threads),
        _security(tls, plaintext, name), coordinator, out, _token(token, token_file), listen, advertise, verbose,
        method=method, wish=index, robust=gate,
    )  # fmt: skip


def server(
    coordinator: Address,
    model: Model = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="State, record and model.")] = Path("server"),
    tls: Tls = None,
    plaintext: PlainText = False,
    name: Name = None,
    token: Token = None,
    token_file: TokenFile = None,
    listen: Listen = "127.0.0.1:0",
    advertise: Advertise = "",
    shape: Annotated[str, typer.Option("--shape", help="Shape of one sample, such as 1,8,8.")] = "",
    classes: Classes = None,
    method: MethodFile = None,
    verbose: Verbose = False,
) -> None:
    """Play the server's part in a run whose method has one. It has no data, but it sees the models.

    [bold]Example[/]

      aedfl server --coordinator 192.0.2.7:7700 --tls tls/server --token-file token --shape 1,8,8 --classes 10
    """
    from ..net.kit import blank

    sides = _shape(shape)
    _take_part(
        lambda config: blank(config, model, sides, classes),
        _security(tls, plaintext, name or "server"), coordinator, out, _token(token, token_file), listen, advertise,
        verbose, method=method, server=True,
    )  # fmt: skip


def status(coordinator: Address, tls: Tls = None, plaintext: PlainText = False) -> None:
    """Show who takes part in a run and how far everybody is."""

    async def ask() -> Status:
        from ..net.link import Link

        link = Link(coordinator, _security(tls, plaintext, "guest"))
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
    security = _security(tls, plaintext, name)

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
    seconds: Annotated[float | None, typer.Option(help="End after so many seconds.")] = None,
    updates: Annotated[int | None, typer.Option(help="End after so many local updates of each device.")] = None,
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


def _take_part(
    prepare: Prepare,
    security: Security,
    coordinator: str,
    out: Path,
    token: str,
    listen: str,
    advertise: str,
    verbose: bool,
    **more: Any,
) -> None:
    from ..net import logs
    from ..net.node import Node
    from ..net.options import Options

    logs.configure(out, verbose)
    options = Options(coordinator, out, listen, advertise, token, **more)

    async def live() -> dict[str, Any]:
        node = Node(options, security, prepare)
        _on_signal(node.stop)
        return await node.run()

    summary = asyncio.run(live())
    console.print(f"{summary['updates']} local updates; model: {out / 'model.safetensors'}", soft_wrap=True)


def _security(tls: Path | None, plaintext: bool, name: str | None) -> Security:
    """TLS, or plaintext because it was asked for; never one for want of the other."""
    try:
        from ..net.credentials import Plaintext
        from ..net.credentials import Tls as Mutual
        from ..net.identity import check_name
    except ImportError as error:
        raise UserError(f"deployment needs more packages ({error}); install aedfl[deploy]") from None
    if tls is not None and plaintext:
        raise UserError("--tls and --plaintext contradict each other")
    if tls is not None:
        return Mutual(tls)
    if not plaintext:
        raise UserError("--tls is missing: make certificates with `aedfl certs init`, or say --plaintext on 127.0.0.1")
    if name is None:
        raise UserError("--plaintext needs --name, since there is no certificate to say who this is")
    return Plaintext(check_name(name))


def _token(token: str | None, file: Path | None) -> str:
    if file is None:
        return token or ""
    try:
        return file.read_text().strip()
    except OSError as error:
        raise UserError(f"cannot read the join token in {file}: {error.strerror}") from None


def _config(source: str | None, overrides: list[str] | None, method: str | None, **top: Any) -> RunConfig:
    from ..experiment.config import load

    return load(source or "digits", overrides or [], method=method, **top)


def _limits(config: RunConfig, seconds: float | None, updates: int | None) -> RunConfig:
    """How long `up` runs: as said, or else a minute."""
    chosen = seconds if seconds is not None or updates is not None else 60.0
    stop = config.stop.model_copy(update={"virtual_seconds": chosen, "updates": updates})
    return config.model_copy(update={"stop": stop})


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--shape is {text!r}; expected sizes with commas between, such as 1,8,8")
    return tuple(int(part) for part in parts)


def _on_signal(action: Any) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, action)


async def _until_signal() -> None:
    ended = asyncio.Event()
    _on_signal(ended.set)
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
