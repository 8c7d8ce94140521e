"""Captured work on a GPU: what may happen around a capture."""

from __future__ import annotations

import gc

import pytest
import torch

from aedfl.replay import _uncollected, capture, most_models, padded_size


def test_a_batch_has_the_fewer_models_the_larger_they_are() -> None:
    found = [most_models(macs) for macs in (0, 0.283e6, 1.5e6, 4.85e6, 136e6)]
    assert found == [128, 128, 64, 24, 24]


def test_sizes_are_padded_up() -> None:
    assert [padded_size(count) for count in (1, 3, 20, 97, 128, 129, 192)] == [1, 4, 20, 128, 128, 192, 192]


@pytest.mark.parametrize("was", [True, False])
def test_nothing_is_collected_meanwhile(was: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was else gc.disable)()
        with pytest.raises(ZeroDivisionError), _uncollected():
            assert not gc.isenabled()
            _ = 1 // 0
        assert gc.isenabled() == was
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_that_fails_leaves_the_process_as_it_was() -> None:
    x = torch.ones(8, device="cuda")
    calls = []

    def fails_when_captured() -> None:
        x.mul_(2)
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("not this time")

    with pytest.raises(ValueError, match="not this time"):
        capture(fails_when_captured)
    assert torch.randn(8, device="cuda").isfinite().all()
    replay = capture(lambda: x.add_(1))
    before = x.clone()
    replay()
    assert torch.equal(x, before + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_in_garbage_do_not_break_a_capture() -> None:
    x = torch.zeros(8, device="cuda")
    for _ in range(20):
        loop: list[object] = [capture(lambda: x.add_(1))]
        loop.append(loop)  # only the collector finds it
        del loop
    made: list[list[object]] = []

    def busy() -> None:
        x.add_(1)
        made.extend([] for _ in range(5000))  # enough for the collector to begin

    replay = capture(busy)
    before = x.clone()
    replay()
    assert torch.equal(x, before + 1)
