"""What the commands of a run's members share: options, certificates or plaintext, tokens, and taking part."""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..errors import UserError
from .outcome import console

if TYPE_CHECKING:
    from ..net.credentials import Security
    from ..net.options import Prepare

Address = Annotated[str, typer.Option("--coordinator", "-c", metavar="HOST:PORT", help="Where the coordinator is.")]
Tls = Annotated[
    Path | None, typer.Option("--tls", metavar="DIR", help="Folder with ca.pem, cert.pem and key.pem.")
]
PlainText = Annotated[
    bool, typer.Option("--plaintext", help="No encryption, no identities; on 127.0.0.1 only.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log everything of interest to stderr.")]


@dataclass(frozen=True)
class Membership:
    """What a device and a server say alike."""

    coordinator: str
    out: Path | None
    security: Security
    token: str
    listen: str
    advertise: str
    method: str | None
    verbose: bool

    def take_part(self, folder: str, prepare: Prepare, **more: Any) -> None:
        """Joins, lives and leaves; prints where the model is."""
        from ..net import logs
        from ..net.node import Node
        from ..net.options import Options

        out = self.out or Path(folder)
        logs.configure(out, self.verbose)
        options = Options(
            self.coordinator, out, self.listen, self.advertise, self.token, method=self.method, **more
        )

        async def live() -> dict[str, Any]:
            node = Node(options, self.security, prepare)
            on_signal(node.stop)
            return await node.run()

        summary = asyncio.run(live())
        console.print(f"{summary['updates']} local updates; model: {out / 'model.safetensors'}", soft_wrap=True)


def membership(
    coordinator: Address,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="State, record and model; ./device or ./server by default."),
    ] = None,
    tls: Tls = None,
    plaintext: PlainText = False,
    name: Annotated[
        str | None, typer.Option("--name", help="With --plaintext: what the certificate would say.")
    ] = None,
    token: Annotated[str | None, typer.Option("--token", help="Join token; --token-file keeps it out of `ps`.")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with the join token.")
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where others' models arrive; port 0: any.")
    ] = "127.0.0.1:0",
    advertise: Annotated[
        str, typer.Option("--advertise", metavar="HOST:PORT", help="Where others reach it, if not where it listens.")
    ] = "",
    method: Annotated[
        str | None, typer.Option("--method", help="This machine's copy of the run's method, if it is a file.")
    ] = None,
    verbose: Verbose = False,
) -> Membership:
    """The options of every member, as typer wants them."""
    security = choose_security(tls, plaintext, name)
    return Membership(coordinator, out, security, _token(token, token_file), listen, advertise, method, verbose)


def joins(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command whose first parameter is a `Membership` the options of `membership` in its place."""
    shared = inspect.signature(membership).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        common = {name: given.pop(name) for name in shared}
        command(membership(**common), **given)

    hints = {**get_type_hints(membership, include_extras=True), **get_type_hints(command, include_extras=True)}
    parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in (*shared.values(), *own)]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def choose_security(tls: Path | None, plaintext: bool, name: str | None) -> Security:
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


def on_signal(action: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, action)
