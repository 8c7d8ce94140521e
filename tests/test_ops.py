"""Ops that methods share, against the formulas written out."""

from __future__ import annotations

import pytest
import torch

from aedfl import placement
from aedfl.ops import Along, LargestNorm, SlowMomentum


def test_slow_momentum_adds_up_what_steps_have_in_common() -> None:
    start, velocity = torch.zeros(3), torch.zeros(3)
    places = []
    for _ in range(3):
        end = start + torch.tensor([1.0, 0.0, 5.0])
        ((start, velocity),) = SlowMomentum(0.5, parameters=2).run([(start, end, velocity, None)])
        places.append(start.tolist())
    assert [place[0] for place in places] == [1.0, 2.5, 4.25]  # steps of 1, 1 + 1/2, 1 + 1/2 + 1/4
    assert [place[1] for place in places] == [0.0, 0.0, 0.0]
    assert [place[2] for place in places] == [5.0, 10.0, 15.0]  # a running statistic: that of the end


def test_slow_momentum_treats_jobs_one_by_one() -> None:
    drawn = [tuple(torch.randn(3, 4, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    together = SlowMomentum(0.3, 4).run([(*job, None) for job in drawn])
    for job, found in zip(drawn, together, strict=True):
        start, end, velocity = job
        faster = 0.3 * velocity + end - start
        assert torch.allclose(found[1], faster) and torch.allclose(found[0], start + faster)


@pytest.mark.parametrize("room", [1, 1 << 30])
def test_jobs_are_treated_alike_in_many_parts_and_in_one(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "ROOM", room)
    random = torch.Generator().manual_seed(0)
    drawn = [tuple(torch.randn(3, 50, generator=random)) for _ in range(4)]
    masks = [torch.rand(50, generator=random) > 0.5 for _ in range(3)]
    jobs = [(*job, mask) for job, mask in zip(drawn, [masks[0], None, *masks[1:]], strict=True)]
    for job, found in zip(jobs, SlowMomentum(0.3, 50).run(jobs), strict=True):
        (alone,) = SlowMomentum(0.3, 50).run([job])
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    norms = LargestNorm().run([(torch.tensor(7.0), job[0]) for job in drawn])
    assert [norm.item() for (norm,) in norms] == pytest.approx([max(7.0, job[0].norm().item()) for job in drawn])
    assert any(norm > 7 for (norm,) in norms)


def test_slow_momentum_leaves_alone_what_is_pruned_and_forgets_its_velocity() -> None:
    """Two steps of 1; then the second entry is out, while neighbours move it; then it is back."""
    op, start, velocity = SlowMomentum(0.5, parameters=2), torch.zeros(2), torch.zeros(2)
    masks = [None, None, torch.tensor([True, False]), torch.tensor([True, True]), torch.tensor([True, True])]
    places, speeds = [], []
    for mask in masks:
        ((start, velocity),) = op.run([(start, start + 1, velocity, mask)])
        places.append(start[1].item())
        speeds.append(velocity[1].item())
    assert places == [1.0, 2.5, 3.5, 4.5, 6.0]
    assert speeds == [1.0, 1.5, 0.0, 1.0, 1.5]
    assert velocity[0].item() == 1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16


def test_along_moves_parameters_by_the_update_and_statistics_by_the_own_weight() -> None:
    """Two parameters, one statistic: a merge of (start, other) by (1/4, 3/4), and the update counted."""
    start, end, other = torch.tensor([1.0, 0.0, 4.0]), torch.tensor([2.0, -1.0, 8.0]), torch.tensor([5.0, 4.0, 0.0])
    weights = torch.tensor([0.25, 0.75])
    merged = weights[0] * start + weights[1] * other
    jobs = [(merged, end, start, 2.0, weights), (merged, start, start, 3.0, weights), (merged, end, start, 0.5, None)]
    ((there,), (stays,), (sent,)) = Along(parameters=2).run(jobs)
    assert there.tolist() == [4.0 + 2.0, 3.0 - 2.0, 0.25 * 8.0]
    assert stays.tolist() == merged.tolist()
    assert sent.tolist() == [4.0 + 0.5, 3.0 - 0.5, 0.25 * 4.0]
