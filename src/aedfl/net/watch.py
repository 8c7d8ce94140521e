"""Watching a run: a small live page and Prometheus metrics, over HTTP, on this machine only by default.

They show what the coordinator knows, which is no model and no data. The server understands `GET` and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from importlib.resources import files
from typing import Any

from google.protobuf.json_format import MessageToDict

from ..errors import UserError
from .coordinator import Coordinator
from .places import is_loopback
from .protocol_pb2 import Member, Status

log = logging.getLogger(__name__)
_METRICS: tuple[tuple[str, str, str], ...] = (
    ("update", "aedfl_updates_total", "Local updates finished"),
    ("loss", "aedfl_loss", "Training loss of the last local update"),
    ("accuracy", "aedfl_accuracy", "Accuracy of the device's own model on its test data"),
    ("staleness", "aedfl_staleness", "Mean age, in local updates, of the models merged last"),
    ("bytes_sent", "aedfl_bytes_sent_total", "Bytes of tensors sent"),
    ("bytes_received", "aedfl_bytes_received_total", "Bytes of tensors received"),
    ("messages_sent", "aedfl_messages_sent_total", "Messages that arrived"),
    ("messages_received", "aedfl_messages_received_total", "Messages taken in"),
    ("messages_lost", "aedfl_messages_lost_total", "Own messages replaced by newer ones, refused or given up"),
    ("refused", "aedfl_refused_total", "Messages of others that did not fit"),
    ("filtered", "aedfl_filtered_total", "Models of others kept out by a robust rule"),
    ("update_seconds", "aedfl_update_seconds", "Duration of the last local update"),
)
REQUEST = 8192
"""Bytes of a request; and seconds that it may take."""
PATIENCE = 5.0
CONNECTIONS = 32


class Watch:
    """Serves `/`, `/status.json` and `/metrics` for a coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._server: asyncio.Server | None = None
        self._open = 0
        self.port = 0

    async def start(self, address: str, anywhere: bool = False) -> int:
        """Listens on `HOST:PORT`; off this machine only if that was said in so many words."""
        if not anywhere and not is_loopback(address):
            raise UserError(f"the page would be open to others on {address}; say --watch-anywhere if that is meant")
        host, _, port = address.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._serve, host.strip("[]"), int(port), limit=REQUEST)
        except OSError as error:
            raise UserError(f"cannot serve the page on {address}: {error.strerror}") from None
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS:
                async with asyncio.timeout(PATIENCE):
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
            log.debug("a client of the page was hung up on: %r", error, extra={"event": "page"})
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] != b"GET":
            return _response(405, "text/plain", "only GET\n")
        path = words[1].partition(b"?")[0]
        if path == b"/":
            return _response(200, "text/html", page())
        if path == b"/status.json":
            return _response(200, "application/json", json.dumps(describe(self._coordinator.status())))
        if path == b"/metrics":
            return _response(200, "text/plain; version=0.0.4", metrics(self._coordinator.status()))
        return _response(404, "text/plain", "there is /, /status.json and /metrics\n")


def page() -> str:
    return files("aedfl.net").joinpath("watch.html").read_text(encoding="utf-8")


def describe(status: Status) -> dict[str, Any]:
    """The status as JSON; what a device has not measured yet is null."""
    view = status.view
    return {
        "run": status.run,
        "method": status.method,
        "elapsed": view.elapsed,
        "begun": view.begun,
        "over": view.over,
        "beats_per_second": status.beats_per_second,
        "edges": [[edge.source, edge.target] for edge in status.edges],
        "devices": [_device(member) for member in sorted(view.members, key=lambda member: member.index)],
    }


def _device(member: Member) -> dict[str, Any]:
    report = MessageToDict(member.report, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    figures = {name: _number(getattr(member.report, name)) for name in report if name not in ("trouble", "finished")}
    plain = {"index": member.index, "name": member.name, "state": member.state, "silent": member.silent}
    return {**plain, **figures, "finished": member.report.finished, "trouble": member.report.trouble}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def metrics(status: Status) -> str:
    """Prometheus' text format."""
    view = status.view
    lines = [
        *_family("aedfl_elapsed_seconds", "Seconds since the run began", [("", view.elapsed)]),
        *_family("aedfl_heartbeats_per_second", "Heartbeats that come in", [("", status.beats_per_second)]),
        *_family("aedfl_edges", "Edges of the graph of neighbours", [("", len(status.edges))]),
    ]
    labels = {member.index: f'{{device="{member.index}",name="{member.name}"}}' for member in view.members}
    up = [(labels[member.index], float(member.state == "here")) for member in view.members]
    lines += _family("aedfl_up", "1 while heartbeats come", up)
    silent = [(labels[member.index], member.silent) for member in view.members]
    lines += _family("aedfl_silent_seconds", "Seconds since the last heartbeat", silent)
    for field, name, text in _METRICS:
        values = [(labels[member.index], float(getattr(member.report, field))) for member in view.members]
        lines += _family(name, text, [(label, value) for label, value in values if math.isfinite(value)])
    return "\n".join(lines) + "\n"


def _family(name: str, text: str, values: list[tuple[str, float]]) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"{name}{label} {value:.10g}" for label, value in values]
    return [f"# HELP {name} {text}.", f"# TYPE {name} {kind}", *lines]


def _response(code: int, kind: str, body: str) -> bytes:
    reason = {200: "OK", 404: "Not Found", 405: "Method Not Allowed"}[code]
    data = body.encode()
    charset = "" if "charset" in kind else "; charset=utf-8"
    head = (
        f"HTTP/1.1 {code} {reason}\r\nContent-Type: {kind}{charset}\r\nContent-Length: {len(data)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n"
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'\r\n\r\n"
    )
    return head.encode() + data
