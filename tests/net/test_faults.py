"""Crashes, cut links, full disks, jumping clocks: a device goes on, and what is on its disk is always whole."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from aedfl.context import Context, Message, Model, Size
from aedfl.errors import UserError
from aedfl.graph import Value
from aedfl.net import state
from aedfl.net.clock import Clock
from aedfl.net.store import Store
from net.cluster import cluster
from net.proxy import Proxy

FIND = state.finder({})


def rows(folder: Path) -> list[int]:
    return [json.loads(line)["update"] for line in (folder / "updates.jsonl").read_text().splitlines()]


def test_a_device_comes_back_from_its_own_state(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as made:
            await made.until(lambda: made.updates(1) >= 5)
            await made.kill(1)
            saved = state.read(tmp_path / "d1" / "state.safetensors", FIND)
            updates = made.updates(0)
            await made.until(lambda: made.updates(0) > updates + 2)
            node = made.start(1)
            await made.until(lambda: hasattr(node, "context"))
            assert node.index == 1 and node.context.update >= saved["update"] >= 5
            await made.until(lambda: made.updates(1) > saved["update"] + 2)
            await made.until(lambda: made.received(1) > 2)
            assert rows(tmp_path / "d1") == list(range(1, made.updates(1) + 1)), "no update twice, none missing"

    asyncio.run(test())


def test_a_device_comes_back_while_the_coordinator_is_away(tmp_path: Path) -> None:
    """Both were killed; the device knows from its folder who it is, and who its neighbours are."""

    async def test() -> None:
        async with cluster(tmp_path) as made:
            await made.until(lambda: made.updates(1) >= 3)
            port = made.port
            await made.coordinator.close()
            listening = made.nodes[1].transport.port
            await made.kill(1)
            node = made.start(1, listen=f"127.0.0.1:{listening}")
            await made.until(lambda: made.updates(1) > 5)
            assert node.index == 1 and node.clock.begun
            await made.until(lambda: made.received(1) > 1 and made.received(0) > 1)
            await made.coordinate(f"127.0.0.1:{port}")
            await made.until(lambda: not node.member.trouble)

    asyncio.run(test())


def test_a_partition_heals(tmp_path: Path) -> None:
    async def test() -> None:
        proxies = [Proxy(), Proxy()]
        async with cluster(tmp_path, start=False) as made:
            for index, proxy in enumerate(proxies):
                port = await proxy.start()
                made.start(index, advertise=f"127.0.0.1:{port}", listen="127.0.0.1:0")
            for index, proxy in enumerate(proxies):
                await made.until(lambda index=index: made.listening(index))
                proxy.target = made.listening(index)
            await made.until(lambda: made.received(0) > 2 and made.received(1) > 2)
            for proxy in proxies:
                proxy.break_off()
            couriers = [next(iter(node.transport._couriers.values())) for node in made.nodes.values()]
            await made.until(lambda: all(courier._failures > 1 for courier in couriers))
            received = [made.received(index) for index in (0, 1)]
            updates = [made.updates(index) for index in (0, 1)]
            await made.until(lambda: all(made.updates(i) > updates[i] + 5 for i in (0, 1)))
            assert [made.received(index) for index in (0, 1)] == received, "nothing gets through"
            assert all(len(courier._queue) <= 2 for courier in couriers), "and little is held for later"
            for proxy in proxies:
                proxy.mend()
            await made.until(lambda: all(made.received(i) > received[i] + 3 for i in (0, 1)))
            for proxy in proxies:
                await proxy.close()

    asyncio.run(test())


def test_a_dead_neighbour_costs_its_messages_only(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, devices=3, tls=False) as made:
            await made.kill(2)
            updates, received = made.updates(0), made.received(1)
            await made.until(lambda: made.updates(0) >= updates + 10 and made.received(1) > received + 3)
            assert len(made.nodes[0].transport._couriers[2]._queue) <= 2

    asyncio.run(test())


def test_a_full_disk_is_reported_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with cluster(tmp_path, tls=False) as made:
            await made.until(lambda: made.updates(0) >= 3)
            real = os.fsync

            def full(handle: int) -> None:
                path = os.readlink(f"/proc/self/fd/{handle}")
                if "state" in path and "/d0/" in path:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                real(handle)

            monkeypatch.setattr(os, "fsync", full)
            await made.until(lambda: "No space left" in made.nodes[0].store.trouble)
            old = state.read(tmp_path / "d0" / "state.safetensors", FIND)["update"]
            updates = made.updates(0)
            await made.until(lambda: made.updates(0) > updates + 3)
            reports = lambda: {m.index: m.report.trouble for m in made.coordinator.status().view.members}  # noqa: E731
            await made.until(lambda: "the older state is kept" in reports()[0])
            assert state.read(tmp_path / "d0" / "state.safetensors", FIND)["update"] == old
            assert not list((tmp_path / "d0").glob("*.partial"))
            monkeypatch.setattr(os, "fsync", real)
            await made.until(lambda: not made.nodes[0].store.trouble)
            await made.until(lambda: state.read(tmp_path / "d0" / "state.safetensors", FIND)["update"] > old)

    asyncio.run(test())


def test_the_clock_of_a_run_ignores_jumps_of_the_date(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    assert clock.now == 0.0
    clock.begin()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    before = clock.now
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert 0.0 <= clock.now - before < 1.0
    clock.at_least(100.0)
    assert 100.0 <= clock.now < 101.0
    clock.at_least(5.0)
    assert clock.now >= 100.0


WRITER = """
import itertools, sys, torch
from pathlib import Path
from aedfl.net import state
from aedfl.graph import Value
path = Path(sys.argv[1])
for number in itertools.count():
    state.write(path, {"number": number, "value": Value(torch.full((300_000,), float(number)))})
    print(number, flush=True)
"""


def test_kill_9_leaves_a_whole_state(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(5):
        last = int(process.stdout.readline())
    time.sleep(0.0213)
    process.send_signal(signal.SIGKILL)
    last = max([last, *(int(line) for line in process.stdout.read().split())])
    process.wait()
    found = state.read(path, FIND)
    assert last <= found["number"] <= last + 1
    assert torch.equal(found["value"].get(), torch.full((300_000,), float(found["number"])))


def test_any_state_of_a_program_can_be_kept(tmp_path: Path) -> None:
    from aedfl.algorithms._state import Cached

    vector = Value(torch.arange(5.0))
    model = Model(vector, Size(5, 2.0), Value(torch.tensor([True, False, True, True, True])))
    thing: dict[str, Any] = {
        "model": model, "cache": {3: Cached(model, Value(torch.tensor(0.5)), 4, 0.1, None, 2, 7)}, "none": None,
        "numbers": (1, 2.5, True, "a", float("inf")), "list": [vector, {"a": (vector,)}], "set": {1, 2},
    }  # fmt: skip
    state.write(tmp_path / "s", thing)
    found = state.read(tmp_path / "s", FIND)
    assert found["numbers"] == thing["numbers"] and found["set"] == {1, 2} and found["none"] is None
    assert found["cache"][3].version == 7 and found["cache"][3].model.size == Size(5, 2.0)
    assert found["list"][0] is found["list"][1]["a"][0] is found["model"].vector, "what was one is one again"
    assert torch.equal(found["model"].mask.get(), model.mask.get())  # type: ignore[union-attr]


def test_a_state_runs_no_code(tmp_path: Path) -> None:
    text = b'{"class": ["os", "system"], "fields": {"command": "true"}}'
    from aedfl.net.tensors import dump

    tree = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    state.replace(tmp_path / "s", dump({"tree": tree}))
    with pytest.raises(Exception, match=r"holds a os\.system, which this method does not have"):
        state.read(tmp_path / "s", FIND)
    (tmp_path / "s").write_bytes(b"rubbish" * 10)
    with pytest.raises(UserError, match="cannot be read"):
        state.read(tmp_path / "s", FIND)


def test_a_damaged_message_in_the_box_is_lost_and_nothing_else(tmp_path: Path) -> None:
    """Messages in the box are not synced: after a power cut one may be empty. The device comes back all the same."""

    async def test() -> None:
        store = Store(tmp_path)
        for number in range(3):
            store.keep(Message(1, "model", None, {"number": number}))
        store.close()
        (tmp_path / "inbox" / "000000000002.safetensors").write_bytes(b"")
        (tmp_path / "inbox" / "000000000009.safetensors.partial").write_bytes(b"half")
        again = Store(tmp_path)
        assert [message.fields["number"] for message in again.messages(FIND)] == [0, 2]
        assert len(list((tmp_path / "inbox").iterdir())) == 2
        again.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("instance", "seven", r"instance holds 'seven' instead of a number; move it away"),
        ("membership.json", '{"run": ', r"membership\.json cannot be read \(.*\); move it away"),
    ],
)
def test_a_file_of_a_device_that_is_damaged_is_named(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    async def test() -> None:
        async with cluster(tmp_path, start=False) as made:
            (tmp_path / "d0").mkdir()
            (tmp_path / "d0" / name).write_text(content)
            with pytest.raises(UserError, match=sentence):
                await made.node(0).run()

    asyncio.run(test())


def test_what_is_not_a_message_may_lie_in_the_box(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "inbox" / "copy of 000000000002.safetensors").write_bytes(b"")
    assert store.messages(FIND) == []
    store.close()


def test_messages_that_come_and_go_fast_leave_nothing_behind(tmp_path: Path) -> None:
    """The writer's thread and the program work on the same box."""

    async def test() -> None:
        store = Store(tmp_path)
        waiting: list[Message] = []
        for number in range(600):
            waiting.append(Message(1, "model", None, {"number": number}))
            store.keep(waiting[-1])
            if number % 3:
                store.drop(waiting.pop(0))
        kept = [message.fields["number"] for message in waiting]
        store.close()
        again = Store(tmp_path)
        assert [message.fields["number"] for message in again.messages(FIND)] == kept
        again.close()

    asyncio.run(test())


def test_a_state_that_cannot_be_kept_is_trouble_and_not_silence(tmp_path: Path) -> None:
    async def test() -> None:
        store = Store(tmp_path)
        store.save({"a": 1})
        await store.settle()
        store.save({"a": object()})
        await store.settle()
        assert "holds a object, which cannot be saved" in store.trouble
        assert store.load(FIND) == {"a": 1}
        store.close()

    asyncio.run(test())


def test_what_arrived_and_was_not_taken_is_still_there(tmp_path: Path) -> None:
    async def test() -> None:
        store = Store(tmp_path)
        messages = [Message(1, "model", None, {"number": number}) for number in range(4)]
        for message in messages:
            store.keep(message)
        store.drop(messages[1])
        store.close()
        again = Store(tmp_path)
        assert [message.fields["number"] for message in again.messages(FIND)] == [0, 2, 3]
        again.close()

    asyncio.run(test())


def test_a_training_that_has_diverged_is_said_and_others_go_on(tmp_path: Path) -> None:
    async def diverged(ctx: Context, _: Any) -> None:
        while ctx.running:
            await ctx.sleep(0.02)
            ctx.publish(ctx.initial(), loss=float("nan") if ctx.index == 0 else 1.0)

    async def test() -> None:
        async with cluster(tmp_path, program=diverged) as made:
            def said(index: int) -> str:
                members = made.coordinator.status().view.members
                return next(str(member.report.trouble) for member in members if member.index == index)

            await made.until(lambda: "the own training is not finite" in said(0))
            assert said(1) == ""

    asyncio.run(test())
