"""The receiving side by itself: transfers that are cut off, slots, bundles, limits."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from aedfl.algorithms import get
from aedfl.context import Message
from aedfl.errors import PeerError
from aedfl.layout import Layout
from aedfl.net import wire
from aedfl.net.check import Checker
from aedfl.net.counters import Counters
from aedfl.net.courier import WAITING, Courier
from aedfl.net.credentials import Peer, Plaintext
from aedfl.net.line import Line
from aedfl.net.post import SEND, TOGETHER, Limits, Post
from aedfl.net.protocol_pb2 import Member, Receipt, Receipts
from aedfl.net.transport import Transport
from net.cluster import cluster

CHECKER = Checker(Layout.of(nn.Linear(2, 2)), 4.0)
OTHER = Member(index=3, name="device-3", state="here")
ANYBODY = Peer("", "")
"""Without certificates nobody shows who it is."""


class Caller:
    """What gRPC says about a call; and the call itself, where pieces come over a line."""

    def __init__(self, sent: AsyncIterator[bytes] | None = None) -> None:
        self._sent = sent
        self.answers: list[Receipts] = []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        assert self._sent is not None
        return await anext(self._sent, grpc.aio.EOF)

    async def write(self, answer: Receipts) -> None:
        self.answers.append(answer)


async def answers(made: Post, sent: AsyncIterator[bytes]) -> list[list[Receipt]]:
    """The receipts for each piece of a line."""
    caller = Caller(sent)
    await made.line(None, caller)
    return [list(answer.receipts) for answer in caller.answers]


def post(deliver: Any, **limits: Any) -> Post:
    return Post(
        "run", CHECKER, Plaintext("me"), lambda name: OTHER, lambda index: OTHER if index == 3 else None, deliver,
        Counters(), Limits(**limits),
    )  # fmt: skip


def piece(number: int, **fields: Any) -> bytes:
    return wire.bundle(wire.frames(wire.pack("note", None, b"", fields), wire.Stamp("run", 3, 5, number)))


def test_a_message_that_was_cut_off_while_it_was_delivered_comes_again() -> None:
    """A second transfer of the same sender ends the first; whatever that had not delivered must not count as come."""
    got: list[Any] = []
    blocked = asyncio.Event()

    async def deliver(message: Message) -> None:
        if not blocked.is_set():
            blocked.set()
            await asyncio.sleep(60)
        got.append(message.fields["value"])

    async def test() -> None:
        made = post(deliver)
        first = asyncio.ensure_future(made.hand(piece(1, value=1), ANYBODY, Caller()))
        await blocked.wait()
        second = await made.hand(piece(1, value=1), ANYBODY, Caller())
        assert second.taken and got == [1]
        with pytest.raises(asyncio.CancelledError):
            await first
        again = await made.hand(piece(1, value=1), ANYBODY, Caller())
        assert again.taken and got == [1], "it has come, and does not come twice"

    asyncio.run(test())


def test_transfers_beyond_the_limit_are_put_off() -> None:
    async def deliver(message: Message) -> None: ...

    async def stuck() -> Any:
        await asyncio.sleep(60)
        yield b""

    async def test() -> None:
        made = post(deliver, streams_each=2)
        held = [asyncio.ensure_future(made.send(stuck(), Caller())) for _ in range(2)]
        await asyncio.sleep(0)
        receipt = await made.hand(piece(1), ANYBODY, Caller())
        assert receipt.later and not receipt.taken
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert (await made.hand(piece(1), ANYBODY, Caller())).taken

    asyncio.run(test())


async def pieces(*groups: list[bytes]) -> AsyncIterator[bytes]:
    for group in groups:
        yield wire.bundle(group)


def test_a_line_takes_messages_one_by_one_and_together_in_their_order() -> None:
    got: list[Any] = []

    async def deliver(message: Message) -> None:
        got.append(message.fields["value"])

    async def test() -> None:
        made = post(deliver)
        bad = piece(3, value=3)[:-1] + b"x"
        sent = pieces([piece(1, value=1)], [piece(2, value=2), bad, piece(4, value=4)], [piece(2, value=2)])
        taken = [[receipt.taken for receipt in answer] for answer in await answers(made, sent)]
        assert taken == [[True], [True, False, True], [True]]
        assert got == [1, 2, 4], "a refused one costs itself alone, and none comes twice"

    asyncio.run(test())


def test_a_message_that_is_put_off_ends_the_line_before_those_behind_it() -> None:
    got: list[Any] = []

    async def deliver(message: Message) -> None:
        got.append(message.fields["value"])

    async def test() -> None:
        made = post(deliver, messages_per_second=2.0)
        sent = pieces([piece(number, value=number) for number in (1, 2, 3, 4)], [piece(5, value=5)])
        (answer,) = await answers(made, sent)
        assert [(receipt.taken, receipt.later) for receipt in answer] == [(True, False)] * 2 + [(False, True)]
        assert got == [1, 2]

    asyncio.run(test())


@pytest.mark.parametrize("broken", [b"", wire.bundle([b"x"] * (TOGETHER + 1)), b"\xff" * 9])
def test_a_piece_that_is_none_is_refused_and_the_line_goes_on(broken: bytes) -> None:
    async def deliver(message: Message) -> None: ...

    async def test() -> None:
        async def sent() -> AsyncIterator[bytes]:
            yield broken
            yield wire.bundle([piece(1)])

        made = post(deliver)
        first, second = await answers(made, sent())
        assert len(first) == len(second) == 1 and made._counters.refused == 1
        assert first[0].reason.startswith("a bundle") and second[0].taken

    asyncio.run(test())


def test_a_new_line_of_the_same_sender_ends_the_old() -> None:
    async def deliver(message: Message) -> None: ...

    async def silent() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async def test() -> None:
        made = post(deliver)
        old = asyncio.ensure_future(answers(made, silent()))
        await asyncio.sleep(0)
        assert len(await answers(made, pieces([piece(1)]))) == 1
        assert await old == [] and not made._lines, "it ends without an error, so that a sender who is there sees it"

    asyncio.run(test())


def test_messages_that_are_put_off_again_and_again_all_arrive_once_and_in_order() -> None:
    """Over real lines, to a receiver that takes few messages per second and is started anew in the middle."""
    got: list[int] = []

    async def deliver(message: Message) -> None:
        got.append(message.fields["value"])

    async def listening(place: str) -> Transport:
        made = Transport(3, "run", CHECKER, Plaintext("device-3"))
        made.know([Member(index=0, name="device-0", state="here")])
        await made.listen(place, deliver, Limits(messages_per_second=60.0))
        return made

    async def arrived(count: int) -> None:
        while len(got) < count:  # noqa: ASYNC110 (the condition is what another task does)
            await asyncio.sleep(0.02)

    async def test() -> None:
        receiver = await listening("127.0.0.1:0")
        place = f"127.0.0.1:{receiver.port}"
        sender = Transport(0, "run", CHECKER, Plaintext("device-0"))
        sender.know([Member(index=3, name="device-3", state="here", address=place)])
        for value in range(100):
            sender.send(3, "note", None, {"value": value})
        await asyncio.wait_for(arrived(40), 60)
        await receiver.close()
        before = len(got)
        receiver = await listening(place)
        await asyncio.wait_for(arrived(before + 1), 60)
        await sender.settle(60)
        await asyncio.gather(sender.close(), receiver.close())
        assert sender.counters.messages_sent == 100 and sender.counters.messages_lost == 0
        assert got == [*range(before), *range(got[before], 100)]
        assert got[before] <= before, "whose receipt was lost with the receiver comes again, and nothing is left out"

    asyncio.run(test())


def test_a_message_on_its_way_does_not_give_way_to_newer_ones() -> None:
    async def test() -> None:
        counters = Counters()
        courier = Courier(3, lambda _: None, Plaintext("me"), lambda n: wire.Stamp("run", 0, 5, n), b"", counters)
        for _ in range(WAITING):
            courier.add("note", None, ([], []))
        first, second = courier._queue[0], courier._queue[1]
        courier._current = [first]
        for _ in range(2):
            courier.add("note", None, ([], []))
        assert courier._queue[0] is first and second not in courier._queue and counters.messages_lost == 1
        await courier.stop()

    asyncio.run(test())


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5))
def test_a_bundle_comes_apart_as_it_was_put_together(frames: list[bytes]) -> None:
    assert wire.unbundle(wire.bundle(frames), 5) == frames


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.data())
def test_a_bundle_that_was_cut_is_refused(frames: list[bytes], data: st.DataObject) -> None:
    whole = wire.bundle(frames)
    ends = {0}
    for frame in frames:
        ends.add(max(ends) + 4 + len(frame))
    cut = data.draw(st.integers(1, len(whole) - 1).filter(lambda end: end not in ends))
    with pytest.raises(PeerError, match="do not add up"):
        wire.unbundle(whole[:cut], 4)


def test_small_and_large_messages_meet_the_same_checks() -> None:
    async def deliver(message: Message) -> None: ...

    async def stream(frames: list[bytes]) -> Any:
        for frame in frames:
            yield frame

    async def test() -> None:
        made = post(deliver)
        broken = list(wire.frames(wire.pack("note", None, b"", {"a": 1}), wire.Stamp("run", 3, 5, 1)))
        broken[0] = b"\0\0\0\0" + broken[0][4:]
        handed = await made.hand(wire.bundle(broken), ANYBODY, Caller())
        for receipt in (handed, await made.send(stream(broken), Caller())):
            assert receipt.reason == "a frame's checksum is wrong" and not receipt.taken and not receipt.later
        assert made._counters.refused == 2

    asyncio.run(test())


def test_a_certificate_that_does_not_take_part_holds_up_nobody(tmp_path: Path) -> None:
    """It may connect, but its transfers are neither read nor given one of the slots."""

    async def test() -> None:
        async with cluster(tmp_path) as made:
            member = next(m for m in made.coordinator.status().view.members if m.index == 1)
            channel = made.security("device-2").connect(member.address, member.name, member.serial, [])
            calls = [channel.stream_unary(SEND, None, Receipt.FromString)() for _ in range(80)]
            receipts = await asyncio.gather(*calls, return_exceptions=True)
            said = [receipt.reason for receipt in receipts if isinstance(receipt, Receipt)]
            assert said and set(said) == {"device-2 is not known here (yet)"}
            before = made.received(1)
            await made.until(lambda: made.received(1) > before + 2)
            await channel.close()

    asyncio.run(test())


def test_connections_are_limited(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, tls=False, start=False) as made:
            made.start(0, limits=Limits(connections=2))
            await made.until(lambda: made.listening(0))
            place = f"127.0.0.1:{made.listening(0)}"
            alone = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.aio.insecure_channel(place, alone) for _ in range(3)]
            for channel in channels[:2]:
                await asyncio.wait_for(channel.channel_ready(), 10)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channels[2].channel_ready(), 1.0)
            for channel in channels:
                await channel.close()

    asyncio.run(test())


def test_a_message_that_its_program_could_not_read_does_not_end_a_device(tmp_path: Path) -> None:
    """Well-formed, with a good model, from a member; but AEDFL's fields are missing."""

    async def test() -> None:
        method = get("aedfl-rl-dwu")
        async with cluster(tmp_path, program=method.device, start=False) as made:
            made.method = method
            for index in (0, 1):
                made.start(index)
            await made.until(lambda: made.updates(0) and made.updates(1) and made.received(1))
            node = made.nodes[0]
            member = next(m for m in node.member.view.members if m.index == 1)
            channel = made.security("device-0").connect(member.address, member.name, member.serial, [])
            frames = wire.frames(
                wire.pack("model", node.context.model, node.transport.checker.digest, {"samples": 3}),
                wire.Stamp(node.member.run, 0, 5, 1),
            )
            (receipt,) = await Line(channel).hand(wire.bundle([wire.bundle(frames)]))
            assert not receipt.taken
            assert re.fullmatch(r"message of kind 'model': field '\w+' is missing", receipt.reason)
            await channel.close()
            updates, received = made.updates(1), made.received(1)
            await made.until(lambda: made.updates(1) > updates + 1 and made.received(1) > received + 1)

    asyncio.run(test())
