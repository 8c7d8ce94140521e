"""AD-PSGD and DisPFL: pairs that average atomically, and rounds between neighbours."""

from __future__ import annotations

from itertools import count
from math import ceil, cos, pi
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from aedfl.algorithms import ad_psgd, dispfl
from aedfl.layout import Layout
from aedfl.randomness import generator
from aedfl.sim.network import Links
from aedfl.training.plan import Plan

from .toy import LATENCY, LINKS, START, Point, local, minus, mix, play

CENTRES: list[Point] = [(1.0, 0.0), (0.0, 2.0), (-4.0, 8.0)]
AVERAGE = 8 / 48
"""Seconds of one average of two models (8 FLOPs) on a device whose update of 48 FLOPs takes 1 s."""


def plus(*points: list[float]) -> list[float]:
    return mix(points, [1.0] * len(points))


def change(w: list[float], device: int) -> list[float]:
    return minus(local(w, CENTRES[device]), w)


def test_ad_psgd_that_ask_each_other_both_get_the_average() -> None:
    """Both are done with training at the same time, and their questions cross."""
    run = play("ad-psgd", CENTRES[:2], updates=2)
    step = 1.0 + 2 * LATENCY + 2 * AVERAGE
    for device in (0, 1):
        assert [row.time for row in run.device(device)] == pytest.approx([step, 2 * step])
        assert [row.metric("merged") for row in run.device(device)] == [[(1 - device, 1)]] * 2
    x = [list(START), list(START)]
    for number in range(2):
        average = mix(x, [0.5, 0.5])
        x = [plus(average, change(x[device], device)) for device in (0, 1)]
        assert [run.device(device)[number].w for device in (0, 1)] == [pytest.approx(w) for w in x]


def test_ad_psgd_answers_while_it_trains() -> None:
    """Device 0 takes 1 s, device 1 takes 4.4 s. The change of 1 is that of its snapshot, added to what it is then."""
    run = play("ad-psgd", CENTRES[:2], seconds=[1.0, 4.4], until=6.5)
    slow = 4.4 * AVERAGE
    step = 1.0 + 2 * LATENCY + slow + AVERAGE
    times = [row.time for row in run.device(0)]
    assert times[:2] == pytest.approx([step, 2 * step])
    x0, x1 = list(START), list(START)
    x0, x1 = plus(mix([x0, x1], [0.5, 0.5]), change(x0, 0)), mix([x0, x1], [0.5, 0.5])
    assert run.device(0)[0].w == pytest.approx(x0)
    x0, x1 = plus(mix([x0, x1], [0.5, 0.5]), change(x0, 0)), mix([x0, x1], [0.5, 0.5])
    assert run.device(0)[1].w == pytest.approx(x0)
    # At 4.4 device 1 asks; device 0 is adding its own change when the question comes, and averages again after that;
    # only then device 1 adds its change, which is that of its start.
    x0, x1 = mix([x0, x1], [0.5, 0.5]), plus(mix([x0, x1], [0.5, 0.5]), change(list(START), 1))
    assert run.device(1)[0].time == pytest.approx(4.4 + 2 * LATENCY + 2 * AVERAGE + slow)
    assert run.device(1)[0].w == pytest.approx(x1)


def circle(seed: int) -> bool:
    """True if in their first update 0 asks 1, 1 asks 2 and 2 asks 0."""
    firsts = [
        int(generator(seed, device, 0, "program", "neighbour").permutation([d for d in range(3) if d != device])[0])
        for device in range(3)
    ]
    return firsts == [1, 2, 0]


def test_ad_psgd_in_a_circle_of_questions_nobody_waits_for_ever() -> None:
    """Each has a question open to another one, so each refuses, twice; they go on without an average."""
    seed = next(seed for seed in count() if circle(seed))
    run = play("ad-psgd", CENTRES, seed=seed, updates=1)
    for device in range(3):
        (row,) = run.device(device)
        assert row.time == pytest.approx(1.0 + 4 * LATENCY + AVERAGE)
        assert row.metric("merged") == []
        assert row.w == pytest.approx(local(START, CENTRES[device]))


@pytest.mark.parametrize("seed", range(4))
def test_ad_psgd_averages_are_atomic_whatever_crosses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An average keeps the sum of its two models, so the sum of all is the start's and every change ever applied."""
    nodes: list[ad_psgd.Node] = []
    make = ad_psgd.Node
    monkeypatch.setattr(ad_psgd, "Node", lambda *a, **k: nodes.append(make(*a, **k)) or nodes[-1])
    six: list[Point] = [*CENTRES, (5.0, 5.0), (2.0, -3.0), (0.0, 1.0)]
    seconds = [1.0, 1.0, 1.1, 1.3, 0.9, 1.0]
    run = play("ad-psgd", six, seconds=seconds, seed=seed, updates=12, topology="ring")
    changes = [0.0, 0.0]
    for device, centre in enumerate(six):
        snapshots = [list(START), *(row.w for row in run.device(device)[:-1])]
        assert len(snapshots) == 12
        changes = plus(changes, *(minus(local(w, centre), w) for w in snapshots))
    assert plus(*(node.model.vector.get().tolist() for node in nodes)) == pytest.approx(changes, abs=1e-4)
    assert sum(len(row.metric("merged")) for row in run.rows) > 36


def test_ad_psgd_does_not_stop_for_a_neighbour_that_left() -> None:
    gone = {1: [(0.0, "join"), (0.5, "leave")]}
    run = play("ad-psgd", CENTRES[:2], changes=gone, updates=3, hyper={"answer_seconds": 5.0})
    assert [row.time for row in run.device(0)] == pytest.approx(
        [6.0 + AVERAGE, 7.0 + 2 * AVERAGE, 8.0 + 3 * AVERAGE]
    )


def test_ad_psgd_with_lost_messages_goes_on() -> None:
    links = Links(LATENCY, LINKS.bandwidth, LINKS.server_bandwidth, loss=0.2)
    run = play("ad-psgd", CENTRES, links=links, updates=20, hyper={"answer_seconds": 2.0})
    assert [len(run.device(device)) for device in range(3)] == [20] * 3


# DisPFL


def test_dispfl_with_full_masks_is_the_mean_over_neighbours_then_training() -> None:
    hyper = {"density": 1.0, "lr_decay": 0.5}
    run = play("dispfl", CENTRES, seconds=[1.0, 2.0, 3.0], hyper=hyper, updates=3)
    x = [list(START)] * 3
    for number in range(3):
        mean = mix(x, [1 / 3] * 3) if number else list(START)
        x = [local(mean, CENTRES[device], lr=0.5 * 0.5**number) for device in range(3)]
        assert [run.device(device)[number].w for device in range(3)] == [pytest.approx(w) for w in x]


def test_dispfl_waits_for_its_neighbours_models_of_the_same_round() -> None:
    """A ring of three: each waits for the two others, so every round lasts as long as the slowest."""
    run = play("dispfl", CENTRES, seconds=[1.0, 2.0, 3.0], hyper={"density": 1.0}, updates=3)
    growth = (6 * 2 * 4 + 8) / 48
    """Seconds per second of an update: the dense gradient of one batch, and a pass over the masks."""
    merging = [2 * 2 * models / 48 for models in (1, 3)]
    slowest = [3.0 * (merging[0] + 1 + growth), 3.0 * (merging[1] + 1 + growth)]
    assert run.device(2)[0].time == pytest.approx(slowest[0])
    assert run.device(2)[1].time == pytest.approx(slowest[0] + slowest[1])
    fast = merging[1] + 1 + growth
    assert run.device(0)[1].time == pytest.approx(slowest[0] + LATENCY + fast)


def test_dispfl_leaves_out_a_neighbour_that_left_and_takes_one_back() -> None:
    gone = {1: [(0.0, "join"), (20.0, "leave")]}
    run = play("dispfl", CENTRES, hyper={"density": 1.0}, changes=gone, updates=12)
    assert [len(run.device(device)) for device in (0, 2)] == [12, 12]
    assert {source for row in run.device(0)[-3:] for source, _ in row.metric("merged")} == {2}
    back = {1: [(0.0, "join"), (20.0, "crash"), (200.0, "join")]}
    run = play("dispfl", CENTRES, hyper={"density": 1.0}, changes=back, until=300.0)
    assert {source for row in run.device(0)[-3:] for source, _ in row.metric("merged")} == {1, 2}


def test_dispfl_densities_follow_erdos_renyi() -> None:
    """Tensors (8, 4), (8,), (2, 8), (2,) of 58 entries, 60 % of them: the vectors come out dense."""
    layout = Layout.of(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    shares = dispfl.densities(layout, 0.6)
    left = 0.6 * 58 - 10
    scale = left / (12 + 10)
    expected = {"0.weight": scale * 12 / 32, "0.bias": 1.0, "1.weight": scale * 10 / 16, "1.bias": 1.0}
    assert shares == pytest.approx(expected)
    assert sum(shares[e.name] * e.numel for e in layout.entries) == pytest.approx(0.6 * 58)
    assert dispfl.densities(layout, 1.0) == pytest.approx(dict.fromkeys(shares, 1.0))


def test_dispfl_prunes_the_smallest_and_grows_the_steepest() -> None:
    """Of four kept weights the smallest half goes (0.1 and 0.2); of the missing four the steepest two come."""
    size = torch.tensor([0.5, 0.1, 0.2, 0.9, 0.0, 0.0])
    mask = torch.tensor([True, True, True, True, False, False])
    slope = torch.tensor([9.0, 3.0, 0.1, 9.0, 2.0, 1.0])
    assert dispfl.regrow(size, mask, slope, 0.5).tolist() == [True, True, False, True, True, False]
    assert dispfl.regrow(size, mask, slope, 0.0).tolist() == mask.tolist()


@given(
    kept=st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=40),
    share=st.floats(0.0, 1.0),
)
def test_dispfl_regrows_as_by_sorting(kept: list[tuple[bool, int, int]], share: float) -> None:
    """Many equal numbers: of those the first ones are taken."""
    mask = [row[0] for row in kept]
    count = ceil(share * sum(mask))
    gone = sorted((size, at) for at, (here, size, _) in enumerate(kept) if here)[:count]
    expected = [here and at not in {place for _, place in gone} for at, here in enumerate(mask)]
    come = sorted((-slope, at) for at, (_, _, slope) in enumerate(kept) if not expected[at])[:count]
    for _, at in come:
        expected[at] = True
    sizes, slopes = (torch.tensor([float(row[column]) for row in kept]) for column in (1, 2))
    assert dispfl.regrow(sizes, torch.tensor(mask), slopes, share).tolist() == expected


@given(st.data())
def test_dispfl_regrows_many_models_as_each_alone(data: st.DataObject) -> None:
    """What a GPU does, here on a CPU: with equal numbers, signed zeros and no numbers at all, in two layers."""
    models, size = data.draw(st.integers(1, 4)), 14
    numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-30, torch.inf, -torch.inf, torch.nan])

    def drawn(of: st.SearchStrategy[Any]) -> Any:
        return data.draw(st.lists(of, min_size=size, max_size=size))

    work = [
        (torch.tensor(drawn(numbers)), torch.tensor(drawn(st.booleans())), torch.tensor(drawn(numbers)), share)
        for share in data.draw(st.lists(st.floats(0.0, 1.0), min_size=models, max_size=models))
    ]
    layout = Layout.of(nn.Linear(6, 2))
    op = dispfl.Regrow(tuple(entry for entry in layout.entries if entry.trainable))
    assert layout.size == size
    for together, (alone,) in zip(op.together(work), op.run(work), strict=True):
        assert together.tolist() == alone.tolist()


def test_dispfl_keeps_its_density_when_a_model_is_no_number() -> None:
    mask, lost, known = torch.arange(10) < 6, torch.full((10,), torch.nan), torch.arange(10.0)
    for size, slope in ((lost, known), (known, lost), (lost, lost)):
        assert int(dispfl.regrow(size, mask, slope, 0.5).sum()) == 6


def test_dispfl_replaces_less_and_less() -> None:
    shares = [dispfl.replaced(t, 0.5, 100) for t in (0, 50, 100, 150)]
    assert shares == pytest.approx([0.5, 0.25 * (1 + cos(pi / 2)), 0.0, 0.0])


def test_dispfl_mixes_only_what_others_hold() -> None:
    vectors = [torch.tensor([2.0, 4.0, 6.0, 8.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])]
    masks = [torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])]
    own = torch.tensor([True, True, True, True])
    ((mixed,),) = dispfl.Mix().run([(vectors, masks, own)])
    assert mixed.tolist() == [6.0, 4.0, 30.0, 0.0]
    ((mixed,),) = dispfl.Mix().run([(vectors, masks, masks[0])])
    assert mixed.tolist() == [6.0, 4.0, 0.0, 0.0]


def test_dispfl_keeps_its_density_and_its_own_mask() -> None:
    run = play("dispfl", CENTRES, hyper={"density": 0.5}, updates=4, plan=Plan(1, 4, 0.1))
    for row in run.rows:
        assert row.model.mask is not None
        mask = row.model.mask.get()
        assert int(mask.sum()) == row.model.size.parameters == 1
        assert row.model.vector.get()[~mask].tolist() == [0.0]
        assert row.model.size.macs == pytest.approx(1.0)
