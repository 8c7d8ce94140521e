"""How fast models travel: bytes per second between two devices, beside a bare gRPC stream and a bare socket.

Sender and receiver are two processes on 127.0.0.1. Also: small messages beside bare calls, and what a large model
costs in memory at either end. Ours and the reference take turns, with the same chunks and channel options. Rates are
the best of each, ratios the median of the turns, since others may use the machine as well. The first message is not
counted: it connects, and touches memory that all later ones find ready; how long it took is told apart.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import torch

from ..context import Message, Model, Size
from ..graph import Value
from ..layout import Entry, Layout
from ..net import courier, transport
from ..net.check import Checker
from ..net.credentials import Plaintext, Security, Tls
from ..net.identity import Authority
from ..net.post import TOGETHER, Limits
from ..net.protocol_pb2 import Member
from ..net.wire import CHUNK
from .stamp import stamp
from .table import Figures, Tell, quiet, short

SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Options:
    parameters: int = 5_000_000
    """Of the model whose bytes per second are measured."""
    messages: int = 20
    small_messages: int = 1000
    large: int = 100_000_000
    """Parameters of the model whose copies in memory are counted; 0 leaves it out."""
    repeats: int = 5


def measure(options: Options, tell: Tell = quiet) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = stamp() | {"options": asdict(options)}
    with tempfile.TemporaryDirectory() as scratch:
        authority = Authority.create(Path(scratch) / "tls")
        for name in ("device-0", "device-1"):
            authority.issue(name)
        ways = {"tls": str(Path(scratch) / "tls"), "plaintext": None}
        for number, (way, tls) in enumerate(ways.items()):
            tell(f"models, {way}", number, 6)
            found[way] = _models(options, tls)
        tell("models through a bare socket", 2, 6)
        raw = _socket(options.parameters, options.messages)
        found["socket"] = {"bytes_per_second": raw, "ratio": found["plaintext"]["bytes_per_second"] / raw}
        for number, (way, tls) in enumerate(ways.items(), 3):
            tell(f"small messages, {way}", number, 6)
            found[f"small_{way}"] = _small(options, tls)
        tell("a large model", 5, 6)
        if options.large:
            found["large"] = {"bytes": 4 * options.large, **_ours(options.large, 1, ways["tls"], warm=0)}
    tell("done", 6, 6)
    return found


def table(found: dict[str, Any]) -> Figures:
    rows: list[tuple[str, ...]] = []
    for way in ("tls", "plaintext"):
        big, small = found[way], found[f"small_{way}"]
        rows.append(
            (
                way,
                short(big["bytes_per_second"] / 1e6),
                f"{big['ratio']:.2f}",
                short(small["per_second"]),
                f"{small['ratio']:.2f}",
                short(small["per_second_waiting"]),
            )
        )
    columns = (
        "way", "MB/s of models", "of a bare gRPC stream", "small messages/s, one by one", "of bare gRPC calls",
        f"with {TOGETHER} waiting",
    )  # fmt: skip
    notes = [f"in plaintext {found['socket']['ratio']:.2f} of a bare socket"]
    if large := found.get("large"):
        copies = f"{large['sender_copies']:.2f} at the sender, {large['receiver_copies']:.2f} at the receiver"
        notes.append(f"further copies of a model of {large['bytes'] / 1e6:,.0f} MB in memory: {copies}")
    return Figures(columns, rows, tuple(notes))


def _models(options: Options, tls: str | None) -> dict[str, float]:
    mine, theirs = [], []
    for _ in range(options.repeats):
        mine.append(_ours(options.parameters, options.messages, tls))
        theirs.append(_bare(options.parameters, options.messages, tls))
    rates, bare = ([turn["bytes_per_second"] for turn in turns] for turns in (mine, theirs))
    return {
        "bytes_per_second": max(rates), "bare_grpc": max(bare), "ratio": _ratio(rates, bare),
        "ratio_of_best": max(rates) / max(bare), "first_seconds": median(turn["first_seconds"] for turn in mine),
        "first_seconds_bare": median(turn["first_seconds"] for turn in theirs),
    }  # fmt: skip


def _ratio(mine: list[float], theirs: list[float]) -> float:
    return median(ours / bare for ours, bare in zip(mine, theirs, strict=True))


def _small(options: Options, tls: str | None) -> dict[str, float]:
    """One by one, and with as many waiting as share a trip."""
    mine, waiting, theirs = [], [], []
    for _ in range(options.repeats):
        mine.append(small(1_000, options.small_messages, tls))
        waiting.append(small(1_000, options.small_messages, tls, TOGETHER))
        theirs.append(_bare(1_000, options.small_messages, tls, stream=False)["bytes_per_second"] / 4_000)
    best = {"per_second": max(mine), "per_second_waiting": max(waiting), "bare_grpc": max(theirs)}
    return best | {"ratio": _ratio(mine, theirs), "ratio_of_best": max(mine) / max(theirs)}


def small(count: int, messages: int, tls: str | None, together: int = 1) -> float:
    """Messages per second, each a model of `count` values; the next (few) when the last (few) were taken."""
    trips = -(-messages // together)
    return _ours(count, trips * together, tls, together)["messages_per_second"]


def _layout(count: int) -> Layout:
    return Layout((Entry("weights", (count,), 0),))


def _peak() -> int:
    """Most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _security(folder: str | None, name: str) -> Security:
    return Plaintext(name) if folder is None else Tls(Path(folder) / name)


# ---- ours: a Transport in each process


def _receive_ours(pipe: Any, count: int, messages: int, tls: str | None) -> None:
    async def run() -> None:
        device = transport.Transport(1, "run", Checker(_layout(count), 1.0), _security(tls, "device-1"))
        done = asyncio.Event()
        got = 0

        async def deliver(message: Message) -> None:
            nonlocal got
            got += 1
            if got == messages:
                done.set()

        serial = getattr(device.security, "serial", "")
        port = await device.listen("127.0.0.1:0", deliver, Limits(messages_per_second=1e6))
        device.know([Member(index=0, name="device-0", state="here")])
        before = _peak()
        pipe.send((port, serial))
        await done.wait()
        pipe.send(_peak() - before)
        await device.close()

    asyncio.run(run())


def _ours(count: int, messages: int, tls: str | None, together: int = 1, warm: int = 1) -> dict[str, float]:
    """Rates, and further copies in memory at either end; `warm` messages go before without being counted."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_receive_ours, args=(there, count, warm + messages, tls))
    process.start()
    port, serial = here.recv()

    async def run() -> tuple[float, float, int]:
        device = transport.Transport(0, "run", Checker(_layout(count), 1.0), _security(tls, "device-0"))
        device.know([Member(index=1, name="device-1", state="here", address=f"127.0.0.1:{port}", serial=serial)])
        model = Model(Value(torch.ones(count)), Size(count, 1.0))
        before = _peak()

        async def trips(number: int, each: int) -> float:
            begin = time.perf_counter()
            for _ in range(number):
                for _ in range(each):
                    device.send(1, "model", model, {"samples": 1})
                await device.settle(300)
            return time.perf_counter() - begin

        first = await trips(warm, 1)
        seconds = await trips(messages // together, together)
        used = _peak() - before
        await device.close()
        return first, seconds, used

    first, seconds, sender = asyncio.run(run())
    receiver = here.recv()
    process.join()
    size = 4 * count
    return {"bytes_per_second": size * messages / seconds, "messages_per_second": messages / seconds,
            "first_seconds": first, "sender_copies": sender / size, "receiver_copies": receiver / size}  # fmt: skip


# ---- a bare gRPC stream of chunks of the same size, over channels with the same options


def _receive_bare(pipe: Any, tls: str | None) -> None:
    async def run() -> None:
        async def take(frames: Any, _: Any) -> bytes:
            async for _frame in frames:
                pass
            return b"ok"

        async def hand(data: bytes, _: Any) -> bytes:
            return b"ok"

        server = grpc.aio.server(options=transport.OPTIONS)
        methods: dict[str, Any] = {
            "Send": grpc.stream_unary_rpc_method_handler(take), "Hand": grpc.unary_unary_rpc_method_handler(hand),
        }  # fmt: skip
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
        mine = _security(tls, "device-1")
        pipe.send((mine.listen(server, "127.0.0.1:0"), getattr(mine, "serial", "")))
        await server.start()
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)

    asyncio.run(run())


def _bare(count: int, messages: int, tls: str | None, stream: bool = True) -> dict[str, float]:
    """Bytes per second as a stream of chunks, or in one call per message, after a first message."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_receive_bare, args=(there, tls))
    process.start()
    port, serial = here.recv()
    time.sleep(0.3)

    async def run() -> tuple[float, float]:
        channel = _security(tls, "device-0").connect(f"127.0.0.1:{port}", "device-1", serial, courier.OPTIONS)
        data = memoryview(bytearray(4 * count))

        async def send(number: int) -> float:
            begin = time.perf_counter()
            for _ in range(number):
                if not stream:
                    await channel.unary_unary("/bare/Hand")(bytes(data))
                    continue
                call = channel.stream_unary("/bare/Send")()
                for offset in range(0, len(data), CHUNK):
                    await call.write(bytes(data[offset : offset + CHUNK]))
                await call.done_writing()
                await call
            return time.perf_counter() - begin

        first, seconds = await send(1), await send(messages)
        await channel.close()
        return first, seconds

    first, seconds = asyncio.run(run())
    here.send("end")
    process.join()
    return {"bytes_per_second": 4 * count * messages / seconds, "first_seconds": first}


# ---- a bare socket


def _receive_socket(pipe: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        buffer = bytearray(CHUNK)
        while connection.recv_into(buffer):
            pass
        connection.close()
        pipe.send("done")


def _socket(count: int, messages: int) -> float:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_receive_socket, args=(there,))
    process.start()
    data = memoryview(bytearray(4 * count))
    with socket.create_connection(("127.0.0.1", here.recv())) as connection:
        begin = time.perf_counter()
        for _ in range(messages):
            connection.sendall(data)
    here.recv()
    seconds = time.perf_counter() - begin
    process.join()
    return 4 * count * messages / seconds
