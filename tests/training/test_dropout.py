"""Keyed dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aedfl.training.dropout import Dropout, keyed


def drawn(layer: nn.Module, key: int, shape: tuple[int, ...] = (50, 400)) -> Tensor:
    assert isinstance(layer, Dropout)
    layer.key = torch.tensor(key)
    return layer(torch.ones(shape))


def first(module: nn.Module) -> Dropout:
    return next(m for m in keyed(nn.Sequential(module)).modules() if isinstance(m, Dropout))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_that_share_is_dropped_and_the_rest_scaled(p: float) -> None:
    output = drawn(first(nn.Dropout(p)), 12345)
    assert (output == 0).float().mean().item() == pytest.approx(p, abs=0.015)
    torch.testing.assert_close(output[output > 0], torch.full_like(output[output > 0], 1 / (1 - p)))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_all_or_nothing(p: float) -> None:
    assert torch.equal(drawn(first(nn.Dropout(p)), 1), torch.full((50, 400), 1.0 - p))


def test_the_same_key_drops_the_same_and_the_next_key_others() -> None:
    layer = first(nn.Dropout(0.5))
    a, again, b = (drawn(layer, key) for key in (7, 7, 8))
    assert torch.equal(a, again)
    assert ((a > 0) == (b > 0)).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_layers_drop_independently() -> None:
    both = keyed(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    a, b = (drawn(layer, 7) for layer in both)
    assert ((a > 0) == (b > 0)).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_neighbouring_places_are_dropped_independently() -> None:
    kept = drawn(first(nn.Dropout(0.5)), 99) > 0
    for shifted in (kept.roll(1, 0), kept.roll(1, 1)):
        assert (kept == shifted).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_a_longer_batch_does_not_change_its_beginning() -> None:
    layer = first(nn.Dropout(0.5))
    assert torch.equal(drawn(layer, 3, (9, 20))[:4], drawn(layer, 3, (4, 20)))


def test_whole_channels_are_dropped_by_a_channel_dropout() -> None:
    output = drawn(first(nn.Dropout2d(0.5)), 3, (20, 30, 4, 4))
    assert torch.equal(output.amax((2, 3)), output.amin((2, 3)))
    assert (output[:, :, 0, 0] == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_nothing_is_dropped_in_evaluation_mode() -> None:
    layer = first(nn.Dropout(0.5)).eval()
    assert torch.equal(drawn(layer, 3), torch.ones(50, 400))
