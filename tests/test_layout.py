"""Flat vectors and what lies where in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aedfl.layout import Layout
from training.tasks import NAMES, built_in


def module() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    made[2].weight.requires_grad_(False)
    return made


def test_trainable_parameters_come_first() -> None:
    layout = Layout.of(module())
    named = [(e.name, e.shape, e.offset, e.trainable) for e in layout.entries]
    assert named == [
        ("0.weight", (2, 3), 0, True),
        ("0.bias", (2,), 6, True),
        ("1.weight", (2,), 8, True),
        ("1.bias", (2,), 10, True),
        ("2.weight", (2, 2), 12, False),
        ("1.running_mean", (2,), 16, False),
        ("1.running_var", (2,), 18, False),
        ("1.num_batches_tracked", (), 20, False),
    ]
    assert (layout.parameters, layout.size) == (12, 21)


def test_a_module_without_tensors_has_an_empty_vector() -> None:
    layout = Layout.of(nn.ReLU())
    assert (layout.parameters, layout.size, layout.flatten(nn.ReLU()).numel()) == (0, 0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_flattening_and_loading_are_inverse(name: str) -> None:
    task = built_in(name)
    vector = torch.arange(task.layout.size).float() % 97
    twin = task.module_with(vector)
    assert torch.equal(task.layout.flatten(twin), vector)
    assert not torch.equal(task.layout.flatten(task.module), vector)


def test_flattening_copies() -> None:
    made = module()
    layout = Layout.of(made)
    vector = layout.flatten(made)
    vector.zero_()
    assert layout.flatten(made).any()


def test_views_are_views_and_counters_are_converted() -> None:
    layout = Layout.of(module())
    vector = torch.arange(21).float()
    named = layout.views(vector)
    assert named["0.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert named["1.num_batches_tracked"].dtype == torch.int64 and named["1.num_batches_tracked"].item() == 20
    vector[0] = 7.0
    assert named["0.weight"][0, 0].item() == 7.0


def test_a_forward_pass_writes_to_copies_of_the_buffers() -> None:
    made = module()
    layout = Layout.of(made)
    vector = layout.flatten(made)
    weights, buffers = vector[:12], vector[12:].clone()
    before = buffers.clone()
    named = layout.views(weights, buffers)
    torch.func.functional_call(made.train(), named, (torch.randn(5, 3),))
    after = layout.collect(named, buffers)
    assert torch.equal(buffers, before)
    assert after[-1].item() == 1.0 and not torch.equal(after[4:6], before[4:6])
    assert torch.equal(after[:4], before[:4])


def test_tied_weights_are_held_once() -> None:
    made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    made[1].weight = made[0].weight
    assert Layout.of(made).size == 9
