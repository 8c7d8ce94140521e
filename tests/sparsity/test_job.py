"""A pruning step as queued work."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from aedfl import costs, placement
from aedfl.data import Dataset, Split
from aedfl.models import build, count_macs
from aedfl.sparsity.job import Budget, Prune, Regroup
from aedfl.sparsity.physical import shrink
from aedfl.sparsity.saliency import blend
from aedfl.task import Task
from memory import Memory
from training.tasks import built_in


@cache
def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 1, 8, 8, generator=generator)
    y = torch.randint(0, 10, (80,), generator=generator)
    return Task(build("cnn", (1, 8, 8), 10, seed=0), Dataset("random", Split(x, y), Split(x, y), 10))


def job(
    key: int,
    cap: float = 0.4,
    weights: tuple[float, ...] = (1.0,),
    rates: tuple[float, ...] = (),
    worth: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    vector = task().start * (1 + 0.1 * key)
    rows = np.arange(key, key + 20)
    units = task().groups.count
    known = (torch.zeros(units) if worth is None else worth, torch.ones(units).bool() if kept is None else kept)
    return (vector, task().start, rows, key, torch.tensor(0.0), torch.tensor(weights), rates, cap, *known)


def op(**changed: Any) -> Prune:
    return Prune(task(), Budget(samples=20, probes=4, steps=6), **changed)


def test_the_schedule_is_the_rate_and_its_size_is_that_of_the_smaller_network() -> None:
    ((mask, kept, rate, _, largest, _, entries, macs),) = op(rate="schedule").run([job(1)])
    groups = task().groups
    gone = groups.layout.parameters - int(groups.kept_parameters(kept))
    assert rate.item() == pytest.approx(0.4) and gone >= 0.4 * int(groups.prunable.sum())
    assert torch.equal(mask, groups.expand(kept)) and int(mask.sum()) == int(entries)
    small = shrink(task().module, groups, task().start, kept)
    assert int(macs) == count_macs(small.module, (1, 8, 8)) < task().macs
    assert largest > 0


def test_a_share_of_the_macs_leaves_a_network_that_computes_that_much_less() -> None:
    ((_, kept, rate, _, _, _, _, macs),) = op(rate="schedule", share_of="macs").run([job(1)])
    small = shrink(task().module, task().groups, task().start, kept)
    assert rate.item() == pytest.approx(0.4)
    assert int(macs) == count_macs(small.module, (1, 8, 8)) <= 0.6 * task().macs


def test_the_rate_is_merged_with_the_neighbours_rates_and_capped() -> None:
    found = op(rate="schedule").run([job(1, 0.4, (0.5, 0.5), (0.1,)), job(1, 0.4, (0.5, 0.5), (0.9,))])
    assert found[0][2].item() == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    assert found[1][2].item() == pytest.approx(0.4)


def test_the_gap_rule_never_exceeds_the_cap_and_its_raw_value_is_told() -> None:
    ((_, kept, rate, raw, *_),) = op(rate="gap").run([job(2, 0.3)])
    assert 0 <= rate <= 0.3 and 0 <= raw <= 1
    assert rate.item() == pytest.approx(min(0.3, raw.item()), abs=1e-6)
    assert raw > 0 or kept.all()


@pytest.mark.parametrize(("looks", "sizes"), [(9.0, [3]), (2.5, [2, 1]), (0.0, [1, 1, 1])])
def test_devices_looked_at_together_are_seen_as_alone(
    looks: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many at once as there is memory for."""
    jobs = [job(1), job(2), job(3)]
    alone = op()._looks(jobs)
    seen: list[int] = []
    look = Prune._together

    def counted(self: Prune, module: Any, jobs: Any) -> Any:
        seen.append(len(jobs))
        return look(self, module, jobs)

    monkeypatch.setattr(Prune, "together", True)
    monkeypatch.setattr(Prune, "_together", counted)
    monkeypatch.setattr(placement, "ROOM", int(looks * op().room()))
    for found, (score, raw, norm) in zip(op()._looks(jobs), alone, strict=True):
        assert torch.allclose(found[0], score, rtol=1e-3, atol=1e-5)
        assert torch.allclose(found[1], raw) and torch.allclose(found[2], norm, rtol=1e-4)
    assert seen == sizes


@pytest.mark.parametrize("rate", ["schedule", "gap"])
@pytest.mark.parametrize("name", ["lenet5", "textcnn", "resnet8", "vgg9"])
def test_a_look_takes_no_more_memory_than_it_says(name: str, rate: Any) -> None:
    looked = built_in(name)
    pruning = Prune(looked, Budget(20, 4, steps=6) if rate == "gap" else Budget(20, 4, steps=0), rate=rate)
    rows, count = np.arange(20), 3
    jobs = [(looked.start, 0.9 * looked.start, rows, key, torch.zeros(())) for key in range(count)]
    assert looked.groups.count
    with torch.no_grad(), Memory() as memory:
        pruning._together(deepcopy(looked.module).eval(), jobs)
    assert 0.2 * pruning.room() < memory.peak / count < pruning.room()


@pytest.mark.parametrize("share_of", ["parameters", "macs"])
def test_regrouping_keeps_what_a_step_by_the_same_worth_keeps_and_scores_nothing(share_of: Any) -> None:
    worth = torch.rand(task().groups.count, generator=torch.Generator().manual_seed(3))
    stepped = op(rate="schedule", share_of=share_of, view=0.1).run([job(1, 0.4, worth=worth)])[0]
    ((mask, kept, entries, macs),) = Regroup(task(), share_of).run([(worth, 0.4)])
    assert torch.equal(mask, stepped[0]) and torch.equal(kept, stepped[1]) and not kept.all()
    assert (entries, macs) == (stepped[6], stepped[7])


def test_a_pruned_channel_can_come_back() -> None:
    ((_, few, *_),) = op(rate="schedule").run([job(1, 0.6)])
    ((_, more, *_),) = op(rate="schedule").run([job(4, 0.2)])
    assert (more & ~few).any()


def test_the_schedule_needs_no_spectrum_and_is_cheaper() -> None:
    found, ruled = (op(rate=rate)._looks([job(1)])[0] for rate in ("schedule", "gap"))
    assert torch.equal(found[0], ruled[0]) and found[1] == 0
    assert Budget(steps=0).macs(1.0) < 0.5 * Budget().macs(1.0)


def test_the_default_budget_costs_less_than_two_local_updates() -> None:
    macs = 651_720.0
    assert Prune(task()).flops(macs) < 2 * costs.training(macs, 4 * 500)


def test_what_was_agreed_on_outweighs_the_own_scores() -> None:
    """Two devices with other models, samples and probes take the same units out; by their own scores they would not."""
    units = task().groups.count
    agreed = torch.rand(units, generator=torch.Generator().manual_seed(1))
    agreed = agreed / agreed.sum()
    alone, together = (
        op(rate="schedule", view=view).run([job(1, worth=agreed), job(4, worth=agreed)]) for view in (1.0, 0.0)
    )
    assert not torch.equal(alone[0][1], alone[1][1])
    assert torch.equal(together[0][1], together[1][1]) and torch.equal(together[0][5], agreed)
    assert agreed[~together[0][1]].max() < agreed[together[0][1]].median()


def test_own_scores_are_a_share_of_the_worth_and_the_first_ones_all_of_it() -> None:
    units = task().groups.count
    (score, *_), *_ = op(rate="schedule")._looks([job(1)])
    own, even = score / score.sum(), torch.full((units,), 1 / units)
    for worth, expected in ((torch.zeros(units), own), (even, 0.7 * even + 0.3 * own)):
        ((*_, found, _, _),) = op(rate="schedule", view=0.3).run([job(1, worth=worth)])
        assert torch.allclose(found, expected, rtol=1e-4) and found.sum().item() == pytest.approx(1)


def test_a_unit_that_is_out_counts_for_less() -> None:
    kept = torch.ones(task().groups.count, dtype=torch.bool)
    kept[0] = False
    (score, *_), *_ = op(rate="schedule")._looks([job(1)])
    score[0] /= 2
    ((*_, found, _, _),) = op(rate="schedule", comeback=2.0).run([job(1, kept=kept)])
    assert torch.allclose(found, score / score.sum(), rtol=1e-4)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_scores_of_a_diverged_model_say_nothing(wrong: float) -> None:
    worth = torch.tensor([0.25, 0.75])
    assert torch.equal(blend(worth, torch.tensor([wrong, 1.0]), 0.5), worth)
