"""Magnitudes and ranks of feature maps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from aedfl.sparsity import ChannelGroups, feature_ranks, magnitude
from aedfl.sparsity.scores import _ranks


def test_magnitude_is_the_root_mean_square(made) -> None:
    case = made("lenet5")
    groups = case.groups
    values = magnitude(case.vector, groups)
    unit = groups.layers["conv1"].start + 2
    own = [case.module.conv1.weight[2], case.module.conv1.bias[2], case.module.conv2.weight[:, 2]]
    wanted = torch.cat([part.detach().flatten() for part in own]).square().mean().sqrt()
    assert float(values[unit]) == pytest.approx(float(wanted), rel=1e-5)
    stack = torch.stack([case.vector, 2 * case.vector])
    torch.testing.assert_close(magnitude(stack, groups)[1], 2 * values)


class Maps(nn.Module):
    """Three feature maps of known rank: the image itself, a constant, nothing; then two neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.out = nn.Conv2d(1, 3, 1), nn.Linear(3, 2), nn.Linear(2, 2)
        with torch.no_grad():
            self.conv.weight.copy_(torch.tensor([1.0, 0, 0]).view(3, 1, 1, 1))
            self.conv.bias.copy_(torch.tensor([0.0, 1, -1]))
            self.fc.weight.zero_()
            self.fc.bias.copy_(torch.tensor([1.0, -1]))

    def forward(self, x):
        return self.out(F.relu(self.fc(F.relu(self.conv(x)).mean((2, 3)))))


def test_feature_ranks_of_known_maps() -> None:
    module, x = Maps(), torch.rand(4, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    x[2:] = torch.eye(5) * torch.tensor([1.0, 1, 0, 0, 0])
    groups = ChannelGroups.of(module, x[:1])
    ranks = feature_ranks(module, groups, groups.layout.flatten(module), [x[:2], x[2:]])
    torch.testing.assert_close(ranks, torch.tensor([(1 + 0.4) / 2, 0.2, 0, 1, 0]))


def test_feature_ranks_on_every_model(small_case) -> None:
    """Between dead and full; a unit whose weights are all zero is dead unless it gets something else."""
    groups = small_case.groups
    ranks = feature_ranks(small_case.module, groups, small_case.vector, [small_case.x])
    assert ranks.shape == (groups.count,) and ranks.min() >= 0 and ranks.max() <= 1
    mask = groups.full()
    for units in groups.layers.values():
        mask[units.start] = False
    masked = feature_ranks(small_case.module, groups, small_case.vector * groups.expand(mask), [small_case.x])
    assert (masked[~mask] == 0).all() and (masked[mask] > 0).any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1)])
def test_rows_have_the_rank_that_their_decomposition_says(shape: tuple[int, int]) -> None:
    maps = F.relu(torch.randn(40, *shape, generator=torch.Generator().manual_seed(1)) - 1)
    maps[0] = 0
    ranks = _ranks(maps, 1e-4)
    assert 0 < ranks.sum() < 40
    assert torch.equal(ranks.long(), torch.linalg.matrix_rank(maps, rtol=1e-4))
