"""How fast models travel: bytes per second between two devices, beside a bare gRPC stream and a bare socket.

`python bench/wire.py`. Sender and receiver are two processes on 127.0.0.1. Also: what a 400 MB model costs in memory at
either end, and the heartbeats of 64 devices (`--devices`) with a tiny model, all in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from aedfl.context import Message, Model, Size
from aedfl.graph import Value
from aedfl.layout import Entry, Layout
from aedfl.net.check import Checker
from aedfl.net.credentials import Plaintext, Security, Tls
from aedfl.net.identity import Authority
from aedfl.net.post import Limits
from aedfl.net.protocol_pb2 import Member
from aedfl.net.transport import Transport
from aedfl.net.wire import CHUNK

REPEATS = 5
"""Ours and the reference in turns; the best of each counts, since others use the machine as well."""
OPEN: list[tuple[str, Any]] = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def layout(count: int) -> Layout:
    return Layout((Entry("weights", (count,), 0),))


def peak() -> int:
    """Most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def security(folder: str | None, name: str) -> Security:
    return Plaintext(name) if folder is None else Tls(Path(folder) / name)


# ---- ours: a Transport in each process


def receive_ours(pipe: Any, count: int, messages: int, tls: str | None) -> None:
    async def run() -> None:
        transport = Transport(1, "run", Checker(layout(count), 1.0), security(tls, "device-1"))
        done = asyncio.Event()
        got = 0

        async def deliver(message: Message) -> None:
            nonlocal got
            got += 1
            if got == messages:
                done.set()

        serial = getattr(transport.security, "serial", "")
        port = await transport.listen("127.0.0.1:0", deliver, Limits(messages_per_second=1e6))
        transport.know([Member(index=0, name="device-0", state="here")])
        before = peak()
        pipe.send((port, serial))
        await done.wait()
        pipe.send(peak() - before)
        await transport.close()

    asyncio.run(run())


def ours(count: int, messages: int, tls: str | None) -> dict[str, float]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=receive_ours, args=(there, count, messages, tls))
    process.start()
    port, serial = here.recv()

    async def run() -> tuple[float, int]:
        transport = Transport(0, "run", Checker(layout(count), 1.0), security(tls, "device-0"))
        transport.know([Member(index=1, name="device-1", state="here", address=f"127.0.0.1:{port}", serial=serial)])
        model = Model(Value(torch.ones(count)), Size(count, 1.0))
        before, begin = peak(), time.perf_counter()
        for _ in range(messages):
            transport.send(1, "model", model, {"samples": 1})
            await transport.settle(300)
        seconds = time.perf_counter() - begin
        used = peak() - before
        await transport.close()
        return seconds, used

    seconds, sender = asyncio.run(run())
    receiver = here.recv()
    process.join()
    size = 4 * count
    return {"bytes_per_second": size * messages / seconds, "messages_per_second": messages / seconds,
            "sender_copies": sender / size, "receiver_copies": receiver / size}  # fmt: skip


# ---- a bare gRPC stream of chunks of the same size


def receive_bare(pipe: Any, tls: str | None) -> None:
    async def run() -> None:
        async def take(frames: Any, _: Any) -> bytes:
            async for _frame in frames:
                pass
            return b"ok"

        async def hand(data: bytes, _: Any) -> bytes:
            return b"ok"

        server = grpc.aio.server(options=OPEN)
        methods: dict[str, Any] = {
            "Send": grpc.stream_unary_rpc_method_handler(take), "Hand": grpc.unary_unary_rpc_method_handler(hand),
        }  # fmt: skip
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
        mine = security(tls, "device-1")
        pipe.send((mine.listen(server, "127.0.0.1:0"), getattr(mine, "serial", "")))
        await server.start()
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)

    asyncio.run(run())


def bare(count: int, messages: int, tls: str | None, stream: bool = True) -> float:
    """Bytes per second as a stream of chunks, or in one call per message."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=receive_bare, args=(there, tls))
    process.start()
    port, serial = here.recv()
    time.sleep(0.3)

    async def run() -> float:
        channel = security(tls, "device-0").connect(f"127.0.0.1:{port}", "device-1", serial, OPEN)
        data = memoryview(bytearray(4 * count))
        begin = time.perf_counter()
        for _ in range(messages if not stream else 0):
            await channel.unary_unary("/bare/Hand")(bytes(data))
        for _ in range(messages if stream else 0):
            call = channel.stream_unary("/bare/Send")()
            for offset in range(0, len(data), CHUNK):
                await call.write(bytes(data[offset : offset + CHUNK]))
            await call.done_writing()
            await call
        seconds = time.perf_counter() - begin
        await channel.close()
        return seconds

    seconds = asyncio.run(run())
    here.send("end")
    process.join()
    return 4 * count * messages / seconds


# ---- a bare socket


def receive_socket(pipe: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        buffer = bytearray(CHUNK)
        while connection.recv_into(buffer):
            pass
        connection.close()
        pipe.send("done")


def plain_socket(count: int, messages: int) -> float:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=receive_socket, args=(there,))
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


# ---- many devices


async def many(devices: int, seconds: float, folder: Path) -> dict[str, Any]:
    """That many nodes with a tiny model in this process; the coordinator's share of one core, heartbeats per second."""
    from net.cluster import Cluster, kit

    async def idle(ctx: Any, _: Any) -> None:
        while ctx.running:
            await ctx.sleep(2.0)
            ctx.send(int(ctx.random("neighbour").choice(ctx.out_neighbours)), ctx.initial(), samples=1)
            ctx.publish(ctx.initial())
            ctx.receive()

    made = Cluster(folder, devices, False, idle)
    exponential = made.config.topology.model_copy(update={"kind": "exponential"})
    made.config = made.config.model_copy(update={"topology": exponential})
    await made.coordinate(beat=1.0)
    ready = kit(made.config)
    for index in range(devices):
        made.start(index, prepare=lambda _: _shared(ready, devices))
    await made.until(lambda: all(made.updates(i) for i in range(devices)), 120)
    cpu, begin = time.process_time(), time.monotonic()
    updates = sum(made.updates(i) for i in range(devices))
    await asyncio.sleep(seconds)
    status = made.coordinator.status()
    found = {
        "devices": devices, "here": sum(member.state == "here" for member in status.view.members),
        "heartbeats_per_second": status.beats_per_second,
        "updates_per_second": (sum(made.updates(i) for i in range(devices)) - updates) / seconds,
        "messages_per_second": sum(made.received(i) for i in range(devices)) / (made.coordinator.clock.now or 1),
        "core_share_of_everything": (time.process_time() - cpu) / (time.monotonic() - begin),
    }  # fmt: skip
    begin = time.process_time()
    roster = made.coordinator.roster
    for _ in range(2000):
        roster.view(next(iter(roster.entries.values())), roster.epoch)
    found["seconds_per_heartbeat_answer"] = (time.process_time() - begin) / 2000
    await made.close()
    return found


def _shared(ready: Any, devices: int) -> Any:
    from dataclasses import replace
    from types import SimpleNamespace

    rows = SimpleNamespace(
        train=[ready.rows.train[i % 5] for i in range(devices)],
        held_out=[ready.rows.held_out[i % 5] for i in range(devices)], public=ready.rows.public,
    )  # fmt: skip
    return replace(ready, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--large", type=int, default=100_000_000, help="parameters of the large model")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    torch.set_num_threads(1)
    found: dict[str, Any] = {"cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory() as scratch:
        authority = Authority.create(Path(scratch) / "tls")
        for name in ("device-0", "device-1"):
            authority.issue(name)
        for label, tls in (("tls", str(Path(scratch) / "tls")), ("plaintext", None)):
            mine, theirs = [], []
            for _ in range(REPEATS):
                mine.append(ours(5_000_000, 10, tls)["bytes_per_second"])
                theirs.append(bare(5_000_000, 10, tls))
            best, reference = max(mine), max(theirs)
            found[label] = {"bytes_per_second": best, "bare_grpc": reference, "ratio": best / reference}
        raw = plain_socket(5_000_000, 10)
        found["socket"] = {"bytes_per_second": raw, "ratio": found["plaintext"]["bytes_per_second"] / raw}
        for label, tls in (("tls", str(Path(scratch) / "tls")), ("plaintext", None)):
            rates, calls = [], []
            for _ in range(REPEATS):
                rates.append(ours(1_000, 1000, tls)["messages_per_second"])
                calls.append(bare(1_000, 1000, tls, stream=False) / 4_000)
            found[f"small_messages_{label}"] = {
                "per_second": max(rates), "bare_grpc": max(calls), "ratio": max(rates) / max(calls),
            }  # fmt: skip
        large = ours(given.large, 1, str(Path(scratch) / "tls"))
        found["large"] = {"bytes": 4 * given.large, **large}
        if given.devices:
            found["many"] = asyncio.run(many(given.devices, given.seconds, Path(scratch) / "many"))
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
