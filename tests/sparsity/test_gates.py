"""Slopes by gates, against a gradient per sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from aedfl.sparsity import flat_loss
from aedfl.sparsity.gates import unit_slopes

MODELS = ["lenet5", "resnet8", "resnet8-batch", "vgg9-group", "textcnn", "mlp", "cnn", "concat", "depthwise"]


@pytest.mark.parametrize("name", MODELS)
def test_slopes_are_those_of_each_samples_gradient(name: str, made) -> None:
    case = made(name)
    x = case.x.double() if case.x.is_floating_point() else case.x
    start = case.vector.double()
    objective = flat_loss(case.module, case.layout, x, torch.tensor([0, 1, 1]), vector=start)
    m = start[: case.layout.parameters]
    width = objective.outputs(m, x).shape[1]
    weights = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def one(sample: Tensor, weight: Tensor) -> Tensor:
        return grad(lambda p: (objective.outputs(p, sample[None])[0] * weight).sum())(m)

    wanted = torch.stack([case.groups.sums(vmap(one)(x, w) * m) for w in weights])
    found = unit_slopes(objective, m, case.groups, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in objective.module.modules())
