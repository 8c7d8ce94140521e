"""What every method really sends fits the forms that it declares, and goes over the wire; anything else is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from aedfl.algorithms import METHODS
from aedfl.algorithms._server import Desk, Order
from aedfl.context import SERVER, Message, Model, Size
from aedfl.errors import PeerError
from aedfl.graph import Value
from aedfl.layout import Entry, Layout
from aedfl.net import wire
from aedfl.net.check import Checker
from aedfl.sim.simulation import Simulation
from aedfl.training.plan import Plan

from .test_all import SECONDS, consistent
from .test_pruning import two_layers
from .toy import play

LAYOUT = Layout((Entry("weights", (6,), 0),))


def transmitted(checker: Checker, message: Message) -> Message:
    """As it comes out at the other end."""
    packed = wire.pack(message.kind, message.model, checker.digest, message.fields)
    decoder = wire.Decoder(checker.bytes_allowed)
    for frame in wire.frames(packed, wire.Stamp("run", message.source, 1, 1)):
        decoder.feed(frame)
    return checker.message(decoder.finish(), message.source)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_sends_is_what_it_declares(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Message] = []
    post = Simulation.post

    def noting(self: Simulation, message: Message, to: int, count: int) -> None:
        sent.append(message)
        post(self, message, to, count)

    monkeypatch.setattr(Simulation, "post", noting)
    task, rows = consistent()
    play(
        name, [(0.0, 0.0)] * 5, task=(task, rows), seconds=SECONDS, plan=Plan(2, 6, 0.05), updates=8,
        topology="exponential", public=np.arange(0, 60, 7),
    )  # fmt: skip
    checker = Checker(task.layout, task.macs, METHODS[name].messages, lambda: task.groups.count)
    assert {message.kind for message in sent} <= METHODS[name].messages.keys()
    for message in sent[:40]:
        arrived = transmitted(checker, message)
        assert arrived.fields.keys() == message.fields.keys()


def example(check: Any) -> Any:
    """Something that this check lets through."""
    things = [1, 0.5, Value(torch.tensor(0.5)), (1.0, 2.0)]
    return next(thing for thing in things if check(thing))


def good(kind: str, name: str) -> Message:
    form = METHODS[name].messages[kind]
    mask = Value(torch.ones(6, dtype=torch.bool)) if form.masked else None
    model = None if form.model is False else Model(Value(torch.ones(6)), Size(6, 1.0), mask)
    fields = {field: example(check) for field, check in form.fields.items()}
    return Message(SERVER if form.by_server else 3, kind, model, fields)


KINDS = [(name, kind) for name, method in METHODS.items() for kind in method.messages]


def changed(message: Message, **changes: Any) -> Message:
    parts: Mapping[str, Any] = {
        "source": message.source, "kind": message.kind, "model": message.model, "fields": message.fields, **changes,
    }  # fmt: skip
    return Message(**parts)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_what_a_program_could_not_read_is_refused(name: str, kind: str) -> None:
    """A field left out, one too many, a word or a huge number for a number, no model, the wrong sender."""
    checker = Checker(LAYOUT, 1.0, METHODS[name].messages)
    whole = good(kind, name)
    assert transmitted(checker, whole).fields.keys() == whole.fields.keys()
    bad = [changed(whole, fields={**whole.fields, "more": 1}), changed(whole, kind="gossip")]
    bad.append(changed(whole, source=3 if whole.source == SERVER else SERVER))
    for field in whole.fields:
        rest = {key: thing for key, thing in whole.fields.items() if key != field}
        bad.append(changed(whole, fields=rest))
        shapes = [Value(torch.full(shape, 0.5)) for shape in ((2,), (1,), (1, 1, 1))]
        wrong = ("many", -1, 10**17, None, *shapes, Value(torch.tensor(-1.0)), ("a",))
        bad += [changed(whole, fields={**rest, field: thing}) for thing in wrong]
    form = METHODS[name].messages[kind]
    if form.masked:
        bad.append(changed(whole, model=Model(Value(torch.ones(6)), Size(6, 1.0))))
    if form.model is not None:
        bad.append(changed(whole, model=None if form.model else Model(Value(torch.ones(6)), Size(6, 1.0))))
    for message in bad:
        with pytest.raises(PeerError, match=f"message of kind '{message.kind}'"):
            transmitted(checker, message)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_loss_has_the_type_of_a_loss(dtype: torch.dtype) -> None:
    checker, whole = Checker(LAYOUT, 1.0, METHODS["aedfl"].messages), good("model", "aedfl")
    other = changed(whole, fields={**whole.fields, "loss": Value(torch.ones((), dtype=dtype))})
    with pytest.raises(PeerError, match="field 'loss' holds what it must not"):
        transmitted(checker, other)


UNITS = 4


def with_worth(worth: Any) -> Message:
    whole = good("model", "aedfl")
    return changed(whole, fields={**whole.fields, "worth": worth})


def test_a_number_for_every_unit_comes_through() -> None:
    checker = Checker(LAYOUT, 1.0, METHODS["aedfl"].messages, lambda: UNITS)
    worth = torch.tensor([0.5, 0.25, 0.25, 0.0])
    assert torch.equal(transmitted(checker, with_worth(Value(worth))).fields["worth"].get(), worth)


WRONG = [
    torch.full((UNITS - 1,), 0.1), torch.full((UNITS + 1,), 0.1), torch.full((1, UNITS), 0.1), torch.tensor(0.5),
    torch.tensor([0.5, 0.5, 0.5, -0.1]), torch.tensor([0.5, 0.5, 0.5, 1.1]), torch.ones(UNITS, dtype=torch.int64),
    torch.ones(UNITS).double(),
]  # fmt: skip


@pytest.mark.parametrize("worth", [*map(Value, WRONG), 0.5, (0.1,) * UNITS, "high"])
def test_other_than_a_share_for_every_unit_is_refused(worth: Any) -> None:
    checker = Checker(LAYOUT, 1.0, METHODS["aedfl"].messages, lambda: UNITS)
    with pytest.raises(PeerError, match=r"message of kind 'model': field 'worth' (holds what|has \d entries)"):
        transmitted(checker, with_worth(worth))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_worth_that_is_not_finite_is_refused(wrong: float) -> None:
    checker = Checker(LAYOUT, 1.0, METHODS["aedfl"].messages, lambda: UNITS)
    with pytest.raises(PeerError, match="'worth' holds numbers that are not finite"):
        transmitted(checker, with_worth(Value(torch.tensor([0.5, 0.5, 0.0, wrong]))))


def test_a_vector_is_charged_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []
    monkeypatch.setattr(Simulation, "post", lambda _, message, __, count: counts.append((len(message.fields), count)))
    task, rows = two_layers(hidden=7), [np.arange(6 * device, 6 * device + 6) for device in range(4)]
    for name in ("aedfl-0", "aedfl-p"):
        play(name, [(0.0, 0.0)] * 4, task=(task, rows), plan=Plan(2, 6, 0.05), updates=1)
    plain = 256 + 4 * (4 * 7 + 8 * 2) + 4 * 16
    assert set(counts) == {(4, plain), (5, plain + 16 + 4 * 7)}


def test_a_client_with_nothing_but_outdated_updates_does_not_end_the_server() -> None:
    """They are dropped one after the other, however many they are; the next that fits is found behind them."""
    model = Model(Value(torch.ones(6)), Size(6, 1.0))
    outdated = [Message(1, "update", model, {"version": 7, "samples": 3})] * 5000
    waiting = [*outdated, Message(1, "update", model, {"version": 0, "samples": 4})]

    async def wait(_: float) -> Message:
        return waiting.pop(0)

    desk = Desk(cast(Any, SimpleNamespace(wait=wait, now=0.0)), model, orders={1: Order(0, model, 0.0)})
    arrived = asyncio.run(desk.arrival())
    assert arrived is not None and arrived[1] is not None and arrived[1].samples == 4 and not waiting
