"""TLS as gRPC wants it, read from a folder and read again when the files change. Fails closed.

A folder holds `ca.pem`, `cert.pem`, `key.pem`, and perhaps `crl.pem`. Without one there is no connection,
unless plaintext was asked for by name, and then only where nothing leaves this machine.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ..errors import PeerError, UserError
from .identity import common_name, list_number, read_list, revoked_serials, server_name
from .places import is_loopback

log = logging.getLogger(__name__)
CALLERS = 1024
"""Callers whose certificates are kept read."""
_FILES = ("ca.pem", "cert.pem", "key.pem")


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as its certificate says."""

    name: str
    serial: str
    ends: float = math.inf
    """When the certificate expires, in seconds since 1970."""


class Security(ABC):
    """What both kinds of security share: credentials for either side, and who a caller is."""

    name: str

    @abstractmethod
    def listen(self, server: grpc.aio.Server, address: str) -> int: ...

    @abstractmethod
    def connect(self, address: str, name: str, serial: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel: ...

    @abstractmethod
    def shown(self, context: Any) -> Peer:
        """Whoever is at the other end of a connection; the same for all that comes over it."""

    @abstractmethod
    def check(self, peer: Peer, claimed: str = "") -> Peer:
        """The peer, under the name that it claims; `PeerError` if it cannot be trusted (any more)."""

    def caller(self, context: Any, claimed: str) -> Peer:
        return self.check(self.shown(context), claimed)

    def refresh(self) -> bool:
        """Looks for renewed files; true if the certificate has changed, so that connections must be made anew."""
        return False

    @property
    def revocations(self) -> tuple[int, bytes]:
        """Number and bytes of the newest revocation list known here; number 0 without one."""
        return 0, b""

    def learn(self, data: bytes) -> None:  # noqa: B027, where nothing can be revoked there is nothing to learn
        """Takes a newer revocation list."""

    def revoked(self, serial: str) -> bool:
        """True for a certificate that must not be talked to any more."""
        return False


class Plaintext(Security):
    """No protection at all; only on this machine, and only because somebody asked for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        _only_here(address)
        return int(server.add_insecure_port(address))

    def connect(self, address: str, name: str, serial: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        _only_here(address)
        return grpc.aio.insecure_channel(address, options)

    def shown(self, context: Any) -> Peer:
        return Peer("", "")

    def check(self, peer: Peer, claimed: str = "") -> Peer:
        return Peer(claimed, "")


def _only_here(address: str) -> None:
    if not is_loopback(address):
        raise UserError(
            f"plaintext is allowed on 127.0.0.1 only, not on {address}; make certificates: aedfl certs init"
        )


class Tls(Security):
    """Mutual TLS from a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp: tuple[Any, ...] = ()
        self._list: tuple[int, bytes] = 0, b""
        self._revoked: frozenset[int] = frozenset()
        self._callers: dict[bytes, Peer] = {}
        self._load()
        self.name = common_name(self.certificate)

    def _load(self) -> None:
        """Reads the files; raises `UserError` if they do not belong together."""
        stamp = self._now()
        try:
            authority, chain, key = ((self.folder / name).read_bytes() for name in _FILES)
            certificate = x509.load_pem_x509_certificate(chain)
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
            if load_pem_private_key(key, None).public_key() != certificate.public_key():
                raise ValueError("key.pem does not belong to cert.pem")
        except OSError as error:
            raise UserError(f"TLS needs {', '.join(_FILES)} in {self.folder}: {error}") from None
        except Exception as error:  # the library raises many kinds for files that are not what they should be
            reason = str(error) or type(error).__name__
            raise UserError(f"the certificate in {self.folder} cannot be used: {reason}") from None
        if (ended := certificate.not_valid_after_utc) <= datetime.now(UTC):
            raise UserError(f"the certificate in {self.folder} expired on {ended:%Y-%m-%d %H:%M} UTC; renew it")
        self._authority, self._chain, self._key, self.certificate = authority, chain, key, certificate
        self._stamp = stamp
        if (self.folder / "crl.pem").exists():
            self.learn((self.folder / "crl.pem").read_bytes())

    def _now(self) -> tuple[Any, ...]:
        files = [self.folder / name for name in (*_FILES, "crl.pem")]
        return tuple((path.stat().st_mtime_ns, path.stat().st_ino) if path.exists() else None for path in files)

    @property
    def serial(self) -> str:
        return f"{self.certificate.serial_number:x}"

    def refresh(self) -> bool:
        if self._now() == self._stamp:
            return False
        before, stamp = self.serial, self._now()
        try:
            self._load()
        except UserError as error:
            self._stamp = stamp  # taken before the files were read: one that changed since is looked at again
            log.error(str(error), extra={"event": "certificate"})
        return self.serial != before

    @property
    def revocations(self) -> tuple[int, bytes]:
        return self._list

    def learn(self, data: bytes) -> None:
        try:
            found = read_list(data, self._authority)
        except ValueError as error:
            log.warning(str(error), extra={"event": "revocation"})
            return
        if list_number(found) > self._list[0]:
            self._list = list_number(found), data
            self._revoked = frozenset(revoked_serials(found))

    def revoked(self, serial: str) -> bool:
        return bool(serial) and int(serial, 16) in self._revoked

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        credentials = grpc.dynamic_ssl_server_credentials(self._server(), self._server, True)
        return int(server.add_secure_port(address, credentials))

    def _server(self) -> Any:
        return grpc.ssl_server_certificate_configuration([(self._key, self._chain)], self._authority)

    def connect(self, address: str, name: str, serial: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(self._authority, self._key, self._chain)
        demanded = ("grpc.ssl_target_name_override", server_name(name, serial))
        return grpc.aio.secure_channel(address, credentials, [*options, demanded])

    def shown(self, context: Any) -> Peer:
        """Every call of a connection shows the same certificate, so it is read once."""
        pem = context.auth_context().get("x509_pem_cert")
        if not pem:
            raise PeerError("the caller showed no certificate")
        if pem[0] not in self._callers:
            if len(self._callers) >= CALLERS:
                self._callers.clear()
            read = x509.load_pem_x509_certificate(pem[0])
            ends = read.not_valid_after_utc.timestamp()
            self._callers[pem[0]] = Peer(common_name(read), f"{read.serial_number:x}", ends)
        return self._callers[pem[0]]

    def check(self, peer: Peer, claimed: str = "") -> Peer:
        if self.revoked(peer.serial):
            raise PeerError(f"the certificate of {peer.name} was revoked")
        if peer.ends <= time.time():
            raise PeerError(f"the certificate of {peer.name} has expired")
        if claimed and claimed != peer.name:
            raise PeerError(f"the caller says it is {claimed!r}, but its certificate is that of {peer.name!r}")
        return peer
