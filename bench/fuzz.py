"""Damaged frames against the codec, and against a running device: everything refused, nothing grows, nothing falls.

`python bench/fuzz.py --frames 1000000 --live 200000`. Nine messages in ten carry valid checksums and lengths, so that
they reach the inner checks; the damage is that of the tests (`tests/net/damage.py`). A message that is not refused must
be a well-formed one: other finite values in the same shapes, say, which nobody could tell from a good model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from aedfl.algorithms import get
from aedfl.context import Model, Size
from aedfl.errors import PeerError
from aedfl.graph import Value
from aedfl.layout import Layout
from aedfl.net import wire
from aedfl.net.check import Checker
from aedfl.net.line import Line
from aedfl.net.post import SEND, TOGETHER, Limits
from aedfl.net.protocol_pb2 import Receipt
from net.cluster import Cluster
from net.damage import damaged

LAYOUT = Layout.of(nn.Linear(9, 4))
MESSAGES = get("aedfl").messages
FIELDS = {"loss": Value(torch.tensor(1.0)), "samples": 3, "rate": 0.25, "age": 1.0}
CHECKER = Checker(LAYOUT, 36.0, MESSAGES)
STREAMED = 0.1
"""Share of the trips to the device on which a message is a stream of its own, as large ones are."""


def whole(seed: int, checker: Checker, run: str, source: int, number: int) -> list[bytes]:
    """A good message: some with a mask, all with fields."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(checker.size, generator=generator)
    kept = torch.rand(checker.size, generator=generator) > 0.4
    kept[0] = True
    size = Size(int(kept.sum()), checker.macs) if seed % 2 else Size(checker.size, checker.macs)
    given = Model(Value(vector), size, Value(kept) if seed % 2 else None)
    packed = wire.pack("model", given, checker.digest, {name: FIELDS[name] for name in MESSAGES["model"].fields})
    return list(wire.frames(packed, wire.Stamp(run, source, 9, number)))


def memory() -> int:
    """Resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def codec(count: int, seed: int) -> dict[str, Any]:
    """So many damaged frames, one message after the other, each into a new decoder."""
    rng = np.random.default_rng(seed)
    good = [whole(number, CHECKER, "run", 3, 1) for number in range(64)]
    outcome: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    frames, messages, begin = 0, 0, time.monotonic()
    settled = 0
    while frames < count:
        parts = damaged(good[messages % 64], rng)
        frames, messages = frames + len(parts), messages + 1
        decoder = wire.Decoder(CHECKER.bytes_allowed)
        try:
            for part in parts:
                decoder.feed(part)
            message = CHECKER.message(decoder.finish(), 3)
            fits = message.model is None or bool(message.model.vector.get().isfinite().all())
            outcome["well-formed" if fits else "WRONG"] += 1
        except PeerError as error:
            outcome["refused"] += 1
            reasons[str(error)[:28]] += 1
        if messages == 50_000:
            settled = memory()
    seconds = time.monotonic() - begin
    grown = memory() - settled if settled else None
    return {
        "frames": frames, "messages": messages, "outcome": dict(outcome), "kinds_of_refusal": len(reasons),
        "frames_per_second": frames / seconds, "grown_bytes": grown,
    }  # fmt: skip


async def streamed(channel: grpc.aio.Channel, parts: list[bytes]) -> Receipt | None:
    """One message as a stream of frames; None if it was cut off."""
    call = channel.stream_unary(SEND, None, Receipt.FromString)()
    try:
        for part in parts:
            await call.write(part)
        await call.done_writing()
        receipt: Receipt = await call
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        return None
    return receipt


def piece(messages: list[list[bytes]], rng: np.random.Generator) -> bytes:
    """Small messages for one trip; in one of ten, something is wrong with what holds them together."""
    made = bytearray(wire.bundle(wire.bundle(parts) for parts in messages))
    if rng.random() < 0.1:
        made[int(rng.integers(0, len(made) if rng.random() < 0.5 else 8))] = int(rng.integers(0, 256))
    return bytes(made)


async def attack(made: Cluster, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """So many damaged messages from device 1 to device 0, over a line and as streams."""
    node = made.nodes[0]
    member = next(m for m in made.coordinator.status().view.members if m.index == 0)
    channel = made.security("device-1").connect(member.address, member.name, member.serial, [])
    outcome: Counter[str] = Counter()
    sent, settled, frames, line = 0, 0, 0, Line(channel)
    while sent < count:
        numbers = range(sent, sent + int(rng.integers(1, TOGETHER + 1)) if rng.random() > STREAMED else sent + 1)
        good = (whole(number % 64, node.transport.checker, node.member.run, 1, 10 + number) for number in numbers)
        parts = [damaged(message, rng) for message in good]
        if len(numbers) > 1:
            receipts = list(await line.hand(piece(parts, rng)))
        else:
            receipt = await streamed(channel, parts[0])
            receipts = [] if receipt is None else [receipt]
        if len(numbers) > 1 and (not receipts or receipts[-1].later):
            line = Line(channel)
        outcome.update("later" if r.later else "taken" if r.taken else "refused" for r in receipts)
        outcome["not looked at"] += len(numbers) - len(receipts)
        frames += sum(map(len, parts))
        if sent < count // 4 <= numbers.stop:
            settled = memory()
        sent = numbers.stop
    await channel.close()
    return {"messages": sent, "frames": frames, "outcome": dict(outcome), "grown_bytes": memory() - settled}


async def live(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Damaged messages over mutual TLS into a device that goes on with AEDFL meanwhile.

    They carry the fields that AEDFL's models have, some with something wrong; its program reads all that get in.
    """
    made = Cluster(folder, 2, True, get("aedfl-rl-dwu").device)
    made.method = get("aedfl-rl-dwu")
    await made.coordinate()
    for index in (0, 1):
        made.start(index, limits=Limits(messages_per_second=1e6))
    await made.until(lambda: made.updates(0) > 2 and made.received(0) > 2, 60)
    await made.kill(1)
    updates, begin, context = made.updates(0), time.monotonic(), made.nodes[0].context
    found = await attack(made, count, np.random.default_rng(seed))
    found |= {
        "seconds": time.monotonic() - begin, "updates_meanwhile": made.updates(0) - updates,
        "alive": not made.tasks[0].done(),
        "finite": bool(context.model is not None and context.model.vector.get().isfinite().all()),
    }  # fmt: skip
    await made.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    import logging

    logging.getLogger("aedfl.net").setLevel(logging.CRITICAL)
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    if given.frames:
        found["codec"] = codec(given.frames, given.seed)
    if given.live:
        with tempfile.TemporaryDirectory() as folder:
            found["device"] = asyncio.run(live(given.live, given.seed, Path(folder)))
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
