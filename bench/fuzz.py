"""Damaged frames against the codec, and against a running device: everything refused, nothing grows, nothing falls.

`python bench/fuzz.py --frames 1000000 --live 200000`. Nine messages in ten carry valid checksums and lengths, so that
they reach the inner checks; the damage is that of the tests (`tests/net/damage.py`). The messages are those of all
methods, with every field that their forms have, optional ones too. A message that is not refused must
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from torch import Generator, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from aedfl import forms
from aedfl.algorithms import METHODS, get
from aedfl.context import SERVER, Message, Model, Size
from aedfl.data import Dataset
from aedfl.errors import PeerError
from aedfl.forms import Check, Form
from aedfl.graph import Value
from aedfl.net import wire
from aedfl.net.check import Checker
from aedfl.net.line import Line
from aedfl.net.post import SEND, TOGETHER, Limits
from aedfl.net.protocol_pb2 import Receipt
from aedfl.task import Task
from net.cluster import Cluster, evaluator, kit
from net.damage import damaged
from sim.worlds import tiny_task

UNITS = 6
MODULE = nn.Sequential(nn.Linear(4, UNITS), nn.ReLU(), nn.Linear(UNITS, 3))
"""The smallest model with units that can be pruned, so that there is something for fields with a number for each."""
STREAMED = 0.1
"""Share of the trips to the device on which a message is a stream of its own, as large ones are."""
GOOD: Mapping[Check, Callable[[Generator], Any]] = {
    forms.count: lambda rng: int(torch.randint(0, 9, (), generator=rng)),
    forms.some: lambda rng: int(torch.randint(1, 9, (), generator=rng)),
    forms.number: lambda rng: Value(torch.randn((), generator=rng)),
    forms.positive: lambda rng: 0.1 + float(torch.rand((), generator=rng)),
    forms.amount: lambda rng: float(9 * torch.rand((), generator=rng)),
    forms.loss: lambda rng: Value(torch.rand((), generator=rng)),
    forms.share: lambda rng: float(torch.rand((), generator=rng)),
    forms.counts: lambda rng: tuple(torch.randint(0, 9, (3,), generator=rng).tolist()),
    forms.per_unit: lambda rng: Value(torch.rand(UNITS, generator=rng)),
}
"""What may stand in a field, by what looks at it."""


@dataclass(frozen=True)
class Target:
    """Who is attacked, and by whom: an index, or the server."""

    method: str
    target: int = 0
    source: int = 1

    @property
    def forms(self) -> Mapping[str, Form]:
        """The messages that the attacker may send."""
        by_server = self.source == SERVER
        return {kind: form for kind, form in get(self.method).messages.items() if form.by_server == by_server}


TARGETS = (
    Target("aedfl"), Target("fedap"), Target("dispfl"), Target("ad-psgd"),
    Target("fedsa", SERVER), Target("fednova", SERVER), Target("fedsa", 0, SERVER), Target("port", 0, SERVER),
)  # fmt: skip
"""Together they have every form of message that there is, and every way round."""


def task() -> Task:
    with torch.random.fork_rng(devices=[]):
        return Task(MODULE, Dataset("tiny", tiny_task(5).dataset.train, tiny_task(5).dataset.test, 3))


def whole(seed: int, kinds: Mapping[str, Form], checker: Checker, stamp: wire.Stamp) -> list[bytes]:
    """A good message of one of these kinds: some with a mask, some with the optional fields."""
    generator = Generator().manual_seed(seed)
    kind = sorted(kinds)[seed % len(kinds)]
    form, masked, full = kinds[kind], *(torch.rand(2, generator=generator) < 0.5).tolist()
    named = {name: GOOD[check](generator) for name, check in {**form.fields, **(form.optional if full else {})}.items()}
    vector = torch.randn(checker.size, generator=generator)
    kept = torch.rand(checker.size, generator=generator) > 0.4
    kept[0] = True
    size = Size(int(kept.sum()), checker.macs) if masked else Size(checker.size, checker.macs)
    model = Model(Value(vector), size, Value(kept) if masked else None)
    carries = full if form.model is None else form.model
    return list(wire.frames(wire.pack(kind, model if carries else None, checker.digest, named), stamp))


def fits(message: Message) -> bool:
    """What got in must at least be finite, wherever it stands."""
    values = [thing for thing in message.fields.values() if isinstance(thing, Value)]
    values += [] if message.model is None else [message.model.vector]
    return all(bool(value.get().isfinite().all()) for value in values)


def memory() -> int:
    """Resident bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def codec(count: int, seed: int) -> dict[str, Any]:
    """So many damaged frames, one message after the other, each into a new decoder."""
    rng = np.random.default_rng(seed)
    made = task()
    tables = [method.messages for method in METHODS.values() if method.messages]
    checkers = [Checker(made.layout, made.macs, table, lambda: UNITS) for table in tables]
    good: list[tuple[Checker, int, list[bytes]]] = []
    for table, checker in zip(tables, checkers, strict=True):
        for source in (3, SERVER):
            mine = {kind: form for kind, form in table.items() if form.by_server == (source == SERVER)}
            stamp = wire.Stamp("run", source, 9, 1)
            good += [(checker, source, whole(number, mine, checker, stamp)) for number in range(64 if mine else 0)]
    outcome: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    frames, messages, begin = 0, 0, time.monotonic()
    settled = 0
    while frames < count:
        checker, source, message = good[int(rng.integers(len(good)))]
        parts = damaged(message, rng)
        frames, messages = frames + len(parts), messages + 1
        decoder = wire.Decoder(checker.bytes_allowed)
        try:
            for part in parts:
                decoder.feed(part)
            outcome["well-formed" if fits(checker.message(decoder.finish(), source)) else "WRONG"] += 1
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


async def attack(made: Cluster, aim: Target, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """So many damaged frames from one to the other, in messages over a line and as streams."""
    node = made.nodes[aim.target]
    member = next(m for m in made.coordinator.status().view.members if m.index == aim.target)
    channel = made.security(name(aim.source)).connect(member.address, member.name, member.serial, [])
    outcome: Counter[str] = Counter()
    sent, settled, frames, line = 0, 0, 0, Line(channel)
    while frames < count:
        numbers = range(sent, sent + int(rng.integers(1, TOGETHER + 1)) if rng.random() > STREAMED else sent + 1)
        stamps = (wire.Stamp(node.member.run, aim.source, 9, 10 + number) for number in numbers)
        good = (whole(stamp.number % 64, aim.forms, node.transport.checker, stamp) for stamp in stamps)
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
        before, frames = frames, frames + sum(map(len, parts))
        if before < count // 4 <= frames:
            settled = memory()
        sent = numbers.stop
    await channel.close()
    return {"messages": sent, "frames": frames, "outcome": dict(outcome), "grown_bytes": memory() - settled}


def name(index: int) -> str:
    return "server" if index == SERVER else f"device-{index}"


async def live(aim: Target, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Damaged messages over mutual TLS into a device or a server that goes on with its method meanwhile.

    They carry the fields that the method's messages have, some with something wrong; its program reads all that get in.
    """
    method, own = get(aim.method), task()
    evaluator(own)
    made = Cluster(folder, 2, True, method.device, method=aim.method)
    made.method = method
    assert made.authority is not None
    made.authority.issue(name(SERVER))
    await made.coordinate(with_server=method.server is not None)
    options: dict[str, Any] = {"limits": Limits(messages_per_second=1e6), "prepare": partial(kit, task=own)}
    for index in (0, 1, *([SERVER] if method.server is not None else [])):
        extra = {"name": name(index), "server": True, "wish": None} if index == SERVER else {}
        made.start(index, **options, **extra)
    await made.until(lambda: made.updates(0) > 2 and made.received(0) > 2, 60)
    await made.kill(aim.source)
    updates, begin, context = made.updates(0), time.monotonic(), made.nodes[aim.target].context
    found = await attack(made, aim, count, np.random.default_rng(seed))
    task_of = made.tasks[aim.target]
    found = {"method": aim.method, "target": name(aim.target), "source": name(aim.source)} | found | {
        "seconds": time.monotonic() - begin, "updates_meanwhile": made.updates(0) - updates,
        "alive": not task_of.done(),
        "finite": bool(context.model is not None and context.model.vector.get().isfinite().all()),
    }  # fmt: skip
    if task_of.done() and not task_of.cancelled():
        found["fault"] = repr(task_of.exception())
    await made.close()
    return found


def lives(count: int, seed: int, names: list[str]) -> list[dict[str, Any]]:
    """The frames in equal shares over the targets."""
    aims = [aim for aim in TARGETS if not names or aim.method in names]
    found = []
    for number, aim in enumerate(aims):
        with tempfile.TemporaryDirectory() as folder:
            found.append(asyncio.run(live(aim, -(-count // len(aims)), seed + number, Path(folder))))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=200_000, help="frames against running devices and servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default="", help="only targets that run these, such as aedfl,fedsa")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    import logging

    logging.getLogger("aedfl.net").setLevel(logging.CRITICAL)
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    if given.frames:
        found["codec"] = codec(given.frames, given.seed)
    if given.live:
        found["targets"] = lives(given.live, given.seed, [part for part in given.methods.split(",") if part])
        found["live_frames"] = sum(target["frames"] for target in found["targets"])
    text = json.dumps(found, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
