"""Damaged frames against the codec, and against a running device: everything refused, nothing grows, nothing falls.

`python bench/fuzz.py --frames 1000000 --live 20000`. Nine messages in ten carry valid checksums and lengths, so that
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
from aedfl.net.post import SEND
from aedfl.net.protocol_pb2 import Receipt
from net.cluster import Cluster
from net.damage import damaged

LAYOUT = Layout.of(nn.Linear(9, 4))
CHECKER = Checker(LAYOUT, 36.0, get("aedfl").messages)


def whole(seed: int, checker: Checker, run: str, source: int, number: int) -> list[bytes]:
    """A good message: some with a mask, all with fields."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(checker.size, generator=generator)
    kept = torch.rand(checker.size, generator=generator) > 0.4
    kept[0] = True
    size = Size(int(kept.sum()), checker.macs) if seed % 2 else Size(checker.size, checker.macs)
    given = Model(Value(vector), size, Value(kept) if seed % 2 else None)
    fields = {"loss": Value(torch.tensor(1.0)), "samples": 3, "rate": 0.25}
    return list(wire.frames(wire.pack("model", given, checker.digest, fields), wire.Stamp(run, source, 9, number)))


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


async def live(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Damaged messages over mutual TLS into a device that goes on with AEDFL meanwhile.

    They carry the fields that AEDFL's models have, some with something wrong; its program reads all that get in.
    """
    made = Cluster(folder, 2, True, get("aedfl-rl-dwu").device)
    made.method = get("aedfl-rl-dwu")
    await made.coordinate()
    for index in (0, 1):
        made.start(index)
    await made.until(lambda: made.updates(0) > 2 and made.received(0) > 2, 60)
    await made.kill(1)
    target = made.nodes[0]
    member = next(m for m in made.coordinator.status().view.members if m.index == 0)
    channel = made.security("device-1").connect(member.address, member.name, member.serial, [])
    rng = np.random.default_rng(seed)
    checker = target.transport.checker
    outcome: Counter[str] = Counter()
    updates, settled, frames, begin = made.updates(0), 0, 0, time.monotonic()
    for number in range(count):
        parts = damaged(whole(number % 64, checker, target.member.run, 1, 10 + number), rng)
        call = channel.stream_unary(SEND, None, Receipt.FromString)()
        try:
            for part in parts:
                await call.write(part)
            await call.done_writing()
            receipt = await call
            outcome["later" if receipt.later else "taken" if receipt.taken else "refused"] += 1
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            outcome["cut off"] += 1
        frames += len(parts)
        if number == count // 4:
            settled = memory()
    found = {
        "messages": count, "frames": frames, "outcome": dict(outcome), "seconds": time.monotonic() - begin,
        "updates_meanwhile": made.updates(0) - updates, "grown_bytes": memory() - settled,
        "alive": not made.tasks[0].done(),
        "finite": bool(target.context.model is not None and target.context.model.vector.get().isfinite().all()),
    }  # fmt: skip
    await channel.close()
    await made.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    import logging

    logging.getLogger("aedfl.net").setLevel(logging.CRITICAL)
    found = {"codec": codec(given.frames, given.seed)}
    with tempfile.TemporaryDirectory() as folder:
        found["device"] = asyncio.run(live(given.live, given.seed, Path(folder)))
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
