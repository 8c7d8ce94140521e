"""Tensors on their way from an accelerator, and what is made of them later."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from accelerator import Copy, behind
from aedfl.graph import Chosen, Value
from aedfl.sim.work import fetch
from aedfl.transfer import Later, arriving, sent

TENSORS = [
    torch.tensor(2.5),
    torch.arange(6).view(2, 3),
    torch.rand(4, 1, 2),
    torch.tensor([True, False]),
    torch.ones(0),
]


def test_what_lies_in_host_memory_is_there_at_once() -> None:
    found = arriving(TENSORS)
    assert found.ready
    assert all(one is other for one, other in zip(found.get(), TENSORS, strict=True))


def test_all_arrive_in_their_order_with_shape_and_kind_by_one_copy_for_each_kind() -> None:
    with behind() as accelerator:
        found = arriving(TENSORS)
        assert not found.ready and len(accelerator.copies) == 3
        for one, other in zip(found.get(), TENSORS, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        assert found.ready


def test_only_what_was_asked_for_is_waited_for() -> None:
    with behind() as accelerator:
        first, second = arriving(TENSORS[:1]), arriving(TENSORS[:1])
        first.get()
        assert [copy.arrived for copy in accelerator.copies] == [True, False]
        assert not second.ready


def test_the_source_of_a_copy_is_held_until_the_result_was_got(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[weakref.ref[torch.Tensor]] = []

    def begin(source: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        sources.append(weakref.ref(source))
        copy = Copy(source)
        return copy.target, copy

    with behind():
        monkeypatch.setattr("aedfl.transfer.begin_copy", begin)
        found = arriving([torch.rand(3), torch.rand(2)])
    gc.collect()
    assert sources[0]() is not None
    found.get()
    assert sources[0]() is None


def test_a_result_is_made_once_and_changed_later() -> None:
    made: list[int] = []
    first = Later(lambda: made.append(1) or len(made))
    doubled = first.then(lambda number: 2 * number)
    assert not made
    assert doubled.get() == 2 and first.get() == 1 and made == [1]


def test_nested_values_are_fetched_as_they_were() -> None:
    known, late = Value(torch.tensor([1.5, 2.0])), Value(None)
    flags = Chosen(((0, 9), (3, 50)), Value(torch.tensor([False, True])))
    with behind():
        row = {"known": known, "merged": (flags, "x"), "late": late}
        found = fetch([row, arriving([torch.tensor(7)]).then(lambda got: {"seven": got[0].item()}), known])
        known.data, late.data = None, torch.tensor(4)
        assert not found.ready
        wanted = {"known": [1.5, 2.0], "merged": [[[3, 50]], "x"], "late": 4}
        assert found.get() == [wanted, {"seven": 7}, [1.5, 2.0]]


def test_what_holds_no_values_waits_for_the_later_ones_in_it() -> None:
    with behind():
        found = fetch([{"a": 1}, arriving([torch.tensor(7)])])
        assert not found.ready
    assert fetch([{"a": 1}]).ready


def test_a_table_for_a_cpu_stays_where_it_is() -> None:
    assert sent(TENSORS[1], torch.device("cpu")) is TENSORS[1]
