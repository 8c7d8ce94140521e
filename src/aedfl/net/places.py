"""Addresses: what `HOST:PORT` may be, which of them never leave this machine, and where others find a device."""

from __future__ import annotations

import ipaddress
import re

from ..errors import UserError

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?|\[[0-9A-Fa-f:.]+\]")


def check_address(address: str) -> None:
    """A name or an IP address and a port; nothing that gRPC would take for another kind of address."""
    host, _, port = address.rpartition(":")
    if not (_HOST.fullmatch(host) and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16):
        raise UserError(f"address {address[:80]!r} is not HOST:PORT, such as 192.0.2.7:7700")


def is_loopback(address: str) -> bool:
    """True for `HOST:PORT` that never leaves this machine; names other than localhost are not trusted."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def advertised(listen: str, advertise: str) -> str:
    """The host under which others find a device; every address of a machine is no address for others."""
    check_address(listen)
    if advertise:
        check_address(advertise)
        return advertise
    host = listen.rpartition(":")[0]
    try:
        everywhere = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        raise UserError(f"--listen {listen} does not say where others find this device; add --advertise HOST:PORT")
    return ""
