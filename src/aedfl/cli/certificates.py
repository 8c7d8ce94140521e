"""`aedfl certs`: who may take part in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from .outcome import console, tidy

certs = typer.Typer(help="Make, renew and revoke the certificates of a run; make join tokens.", no_args_is_help=True)


def certs_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder of the authority.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME…]", help="Certificates to issue at once.")] = None,
    days: Annotated[float, typer.Option(min=0.01, help="Life of the authority.")] = 3650.0,
) -> None:
    """Make a certificate authority, a certificate for the coordinator, and those that are named.

    [bold]Example[/]

      aedfl certs init tls device-0 device-1 server
    """
    from ..net.identity import COORDINATOR, Authority

    authority = Authority.create(folder, days)
    for name in (COORDINATOR, *(names or ())):
        console.print(f"issued: {authority.issue(name)}", soft_wrap=True)


def certs_issue(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority.")],
    names: Annotated[list[str], typer.Argument(metavar="NAME…")],
    days: Annotated[float, typer.Option(min=0.01, help="Life of the certificates.")] = 90.0,
) -> None:
    """Issue certificates, or renew them: a running device takes up new files in its folder by itself."""
    from ..net.identity import Authority

    for name in names:
        console.print(f"issued: {Authority(folder).issue(name, days=days)}", soft_wrap=True)


def certs_revoke(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority.")],
    name: Annotated[str, typer.Argument(metavar="NAME")],
    coordinator: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="The coordinator's TLS folder, to hand the list to.")
    ] = None,
) -> None:
    """Revoke every certificate of a name. The coordinator hands the signed list to all devices.

    Copy DIR/crl.pem into the coordinator's TLS folder if that is on another machine.
    """
    from ..net.identity import COORDINATOR, Authority

    count = Authority(folder).revoke(name)
    target = coordinator or folder / COORDINATOR
    if target.is_dir():
        partial = target / "crl.pem.partial"
        partial.write_bytes((folder / "crl.pem").read_bytes())
        partial.replace(target / "crl.pem")
    console.print(f"revoked {count} certificate(s) of {name}; list: {folder / 'crl.pem'}", soft_wrap=True)


def certs_token(
    state: Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's --state folder.")],
    hours: Annotated[float, typer.Option(min=0.0, help="Life of the token.")] = 24.0,
    uses: Annotated[int, typer.Option(min=1, help="New names that it lets in.")] = 1,
) -> None:
    """Make a join token and print it."""
    from ..net.ledger import Ledger

    if not (state / "ledger.sqlite").exists():
        raise UserError(f"{state} is not a coordinator's state folder")
    print(Ledger(state / "ledger.sqlite").new_token(hours, uses))


certs.command("init")(tidy(certs_init))
certs.command("issue")(tidy(certs_issue))
certs.command("renew")(tidy(certs_issue))
certs.command("revoke")(tidy(certs_revoke))
certs.command("token")(tidy(certs_token))
