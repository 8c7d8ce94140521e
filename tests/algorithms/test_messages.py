"""What every method really sends fits the forms that it declares, and goes over the wire; anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from aedfl.algorithms import METHODS
from aedfl.context import SERVER, Message, Model, Size
from aedfl.errors import PeerError
from aedfl.graph import Value
from aedfl.layout import Entry, Layout
from aedfl.net import wire
from aedfl.net.check import Checker
from aedfl.sim.simulation import Simulation
from aedfl.training.plan import Plan

from .test_all import SECONDS, consistent
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
    checker = Checker(task.layout, task.macs, METHODS[name].messages)
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
    model = None if form.model is False else Model(Value(torch.ones(6)), Size(6, 1.0))
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
        wrong = ("many", -1, 10**17, None, Value(torch.full((2,), 0.5)), Value(torch.tensor(-1.0)), ("a",))
        bad += [changed(whole, fields={**rest, field: thing}) for thing in wrong]
    form = METHODS[name].messages[kind]
    if form.model is not None:
        bad.append(changed(whole, model=None if form.model else Model(Value(torch.ones(6)), Size(6, 1.0))))
    for message in bad:
        with pytest.raises(PeerError, match=f"message of kind '{message.kind}'"):
            transmitted(checker, message)
