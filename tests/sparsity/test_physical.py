"""The smaller network: same outputs, same training, less time."""

from __future__ import annotations

import time
from copy import deepcopy
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from aedfl.models import build
from aedfl.sparsity import ChannelGroups, Shrinker, grow, shrink


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_same_outputs_as_masking(case, random_mask, seed: int, train: bool) -> None:
    mask = random_mask(case.groups, seed, share=(0.2, 0.5, 0.8)[seed])
    full = deepcopy(case.module).train(train)
    small = shrink(case.module, case.groups, case.vector, mask)
    small.module.train(train)
    masked = case.vector * case.groups.expand(mask)
    wanted = functional_call(full, {n: t.clone() for n, t in case.layout.views(masked).items()}, (case.x,))
    torch.testing.assert_close(small.module(case.x), wanted, rtol=1e-4, atol=1e-5)
    assert small.layout.size == len(small.index) == case.groups.expand(mask).sum()


def step(module: nn.Module, x: Tensor, y: Tensor, keep: dict[str, Tensor] | None = None) -> None:
    """One step of SGD; where `keep` is given, only on entries that it keeps."""
    loss = F.cross_entropy(module(x), y)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    with torch.no_grad():
        for (name, value), gradient in zip(module.named_parameters(), gradients, strict=True):
            value -= 0.05 * (gradient * keep[name] if keep else gradient)


@pytest.mark.parametrize("name", ["lenet5", "resnet8", "resnet8-batch", "residual", "depthwise", "textcnn"])
def test_training_it_is_training_the_masked_one(name: str, made, random_mask) -> None:
    case = made(name)
    mask = random_mask(case.groups, 7)
    expanded = case.groups.expand(mask)
    full, y = deepcopy(case.module).train(), torch.tensor([0, 1, 1])
    case.layout.load(full, case.vector * expanded)
    small = shrink(case.module, case.groups, case.vector, mask)
    small.module.train()
    for _ in range(3):
        step(full, case.x, y, case.layout.views(expanded.float()))
        step(small.module, case.x, y)
    trained = small.layout.flatten(small.module)
    torch.testing.assert_close(trained, case.layout.flatten(full)[small.index], rtol=1e-3, atol=1e-5)
    grown = grow(trained, small.index, case.vector)
    assert torch.equal(grown[expanded], trained)
    assert torch.equal(grown[~expanded], case.vector[~expanded])


def test_grow_takes_stacks_and_copies(made, random_mask) -> None:
    case = made("cnn")
    small = shrink(case.module, case.groups, case.vector, random_mask(case.groups, 0))
    full = torch.zeros(2, case.layout.size)
    grown = grow(torch.ones(2, len(small.index)), small.index, full)
    assert grown.sum() == 2 * len(small.index) and full.sum() == 0


def test_group_norm_keeps_its_groups_width(made, random_mask) -> None:
    case = made("resnet8")
    small = shrink(case.module, case.groups, case.vector, random_mask(case.groups, 3))
    norms = [m for m in small.module.modules() if isinstance(m, nn.GroupNorm)]
    assert {m.num_channels // m.num_groups for m in norms} == {4}


def test_the_full_module_stays_and_gradients_flow(made, random_mask) -> None:
    case = made("resnet8-batch")
    before = case.layout.flatten(case.module)
    small = shrink(case.module, case.groups, case.vector + 1, random_mask(case.groups, 3))
    assert torch.equal(case.layout.flatten(case.module), before)
    assert all(p.requires_grad for p in small.module.parameters())
    assert dict(small.module.named_buffers()).keys() == dict(case.module.named_buffers()).keys()


def test_shrinker_remembers_structures_but_shares_no_weights(made, random_mask) -> None:
    case = made("cnn")
    shrinker = Shrinker(case.module, case.groups, capacity=2)
    masks = random_mask(case.groups, 0, 3)
    first, second = shrinker.shrink(case.vector, masks[0]), shrinker.shrink(case.vector * 2, masks[0])
    assert first.index is second.index and first.module is not second.module
    assert torch.equal(first.layout.flatten(first.module) * 2, second.layout.flatten(second.module))
    for mask in masks[1:]:
        shrinker.shrink(case.vector, mask)
    assert shrinker.shrink(case.vector, masks[0]).index is not first.index


def test_training_takes_less_time() -> None:
    """Half of the channels of a VGG-9 are a quarter of the work; here at least a third must be saved."""
    module, x = build("vgg9", (3, 32, 32), 10, seed=0), torch.randn(10, 3, 32, 32)
    groups = ChannelGroups.of(module, x[:1])
    mask = groups.full()
    mask[1::2] = False
    small = shrink(module, groups, groups.layout.flatten(module), mask).module
    times: dict[nn.Module, list[float]] = {module: [], small: []}
    for _ in range(5):
        for net, taken in times.items():
            start = time.process_time()
            step(net, x, torch.arange(10))
            taken.append(time.process_time() - start)
    assert median(times[small]) < 0.67 * median(times[module])
