"""A device's line to the coordinator: five short calls, and what their failures mean."""

from __future__ import annotations

from typing import Any, TypeVar

import grpc

from ..errors import AedflError, UserError
from .coordinator import SERVICE
from .credentials import Security
from .identity import COORDINATOR
from .places import check_address
from .protocol_pb2 import Ask, Beat, Empty, Join, Joined, Leave, Settings, Status, View
from .wire import PROTOCOL

R = TypeVar("R")

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 << 20),
]
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class CoordinatorAway(AedflError):
    """No answer; it may come back."""


class NotAMember(AedflError):
    """The coordinator does not know this device (any more)."""


class Refused(UserError):
    """The coordinator will not have it; the sentence says why."""

    def __init__(self, sentence: str, code: grpc.StatusCode) -> None:
        super().__init__(sentence)
        self.code = code


class Link:
    """Calls the coordinator at `HOST:PORT`."""

    def __init__(self, address: str, security: Security) -> None:
        check_address(address)
        self.address, self._security = address, security
        self._channel = security.connect(address, COORDINATOR, "", _OPTIONS)

    async def settings(self) -> Settings:
        return await self._call("Settings", Ask(protocol=PROTOCOL), Settings)

    async def join(self, request: Join) -> Joined:
        return await self._call("Join", request, Joined)

    async def beat(self, request: Beat) -> View:
        return await self._call("Beat", request, View)

    async def leave(self, name: str) -> None:
        await self._call("Leave", Leave(name=name), Empty)

    async def status(self) -> Status:
        return await self._call("Status", Ask(protocol=PROTOCOL), Status)

    async def _call(self, name: str, request: Any, kind: type[R], timeout: float = 5.0) -> R:
        method = self._channel.unary_unary(
            f"/{SERVICE}/{name}", lambda message: message.SerializeToString(), kind.FromString  # type: ignore[attr-defined]
        )
        try:
            return await method(request, timeout=timeout)  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            raise self._meaning(error) from None

    def _meaning(self, error: grpc.aio.AioRpcError) -> AedflError:
        details = str(error.details())
        if error.code() == grpc.StatusCode.NOT_FOUND:
            return NotAMember(details)
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return UserError(f"{self.address} is not a coordinator: it is another device's port, or another program's")
        if error.code() not in _AWAY:
            return Refused(details, error.code())
        return CoordinatorAway(f"cannot reach the coordinator at {self.address}: {_reason(details)}")

    async def reconnect(self) -> None:
        """Over a new connection, with the certificate that is now in the folder."""
        old, self._channel = self._channel, self._security.connect(self.address, COORDINATOR, "", _OPTIONS)
        await old.close()

    async def close(self) -> None:
        await self._channel.close()


def _reason(details: str) -> str:
    """gRPC's words for the usual mistakes, in ours."""
    low = details.lower()
    if any(sign in low for sign in ("verify_failed", "verify failed", "local issuer", "signature failure")):
        return "its certificate was not made by this device's authority (ca.pem), or has expired"
    if "peer name" in low or "hostname verification" in low:
        return "what answers there is not the coordinator: its certificate has another name"
    if "connection refused" in low:
        return "nothing listens there; check host and port"
    if "ssl" in low or "handshake" in low or "tls" in low or "wrong_version" in low:
        return f"no secure connection ({details[-160:]}); both sides need certificates of the same authority"
    return details[-200:]
