"""FedBuff, Port, FedSA and ASO-Fed: every arrival by hand, at its exact virtual time."""

from __future__ import annotations

from itertools import pairwise
from math import exp, hypot, log, sqrt

import pytest
import torch

from aedfl.algorithms import aso_fed, fedbuff, fedsa, port
from aedfl.algorithms.aso_fed import weigh_features
from aedfl.layout import Entry
from aedfl.training.plan import Plan

from .toy import LATENCY, START, Point, Run, local, minus, mix, play

LEFT, RIGHT, UP = CENTRES = [(1.0, 0.5), (-2.0, 4.0), (3.0, 3.0)]
HALF = 0.5


def plus(left: list[float], right: list[float]) -> list[float]:
    return mix([left, right], [1, 1])


def change(w: list[float], centre: Point, steps: int = 1) -> list[float]:
    return minus(local(w, centre, steps), w)


# FedBuff: client 0 takes 1 s, client 1 takes 3 s, both 0.25 s from the server; a buffer of two.


@pytest.fixture(scope="module")
def buffered() -> Run:
    return play("fedbuff", [LEFT, RIGHT], seconds=[1.0, 3.0], hyper={"buffer": 2}, until=6.3)


def test_fedbuff_fills_its_buffer_in_order_of_arrival(buffered: Run) -> None:
    """Client 0 arrives at 1.75, 3.25, 4.75, 6.25, client 1 at 3.75: the buffer is full at every second one."""
    assert [row.time for row in buffered.server] == pytest.approx([3.25, 4.75])
    assert [row.metric("merged") for row in buffered.server] == [[(0, 0), (0, 0)], [(1, 1), (0, 0)]]
    assert [row.time for row in buffered.device(0)] == pytest.approx([1.5, 3.0, 4.5, 6.0])
    assert [row.time for row in buffered.device(1)] == pytest.approx([3.5])


def test_fedbuff_values(buffered: Run) -> None:
    w0 = list(START)
    w1 = plus(w0, mix([change(w0, LEFT), change(w0, LEFT)], [HALF, HALF]))
    stale = HALF / sqrt(1 + 1)
    w2 = plus(w1, mix([change(w0, RIGHT), change(w1, LEFT)], [stale, HALF]))
    assert buffered.server[0].w == pytest.approx(w1)
    assert buffered.server[1].w == pytest.approx(w2)
    assert buffered.server[1].metric("weights") == pytest.approx([stale, HALF])


@pytest.mark.parametrize(
    ("mistake", "factors"),
    [
        ("K twice", [HALF / 2 / sqrt(2), HALF / 2]),
        ("no staleness weight", [HALF, HALF]),
        ("1/(1 + sqrt(tau))", [HALF / (1 + sqrt(1)), HALF]),
    ],
)
def test_fedbuff_without_a_known_mistake(buffered: Run, mistake: str, factors: list[float]) -> None:
    w0, w1 = list(START), buffered.server[0].w
    wrong = plus(w1, mix([change(w0, RIGHT), change(w1, LEFT)], factors))
    assert buffered.server[1].w != pytest.approx(wrong, abs=1e-3), mistake


def test_fedbuff_weights_fall_with_the_root_of_one_plus_staleness() -> None:
    assert fedbuff.factors([0, 3, 8], lr=1.5) == pytest.approx([1.5 / 3 / r for r in (1, 2, 3)])


# Port: clients 0 and 1 take 1 s, client 2 takes 8 s in four epochs of 2 s; K = 2.

FOUR = Plan(epochs=4, batch_size=4, lr=0.5)


def test_port_asks_for_a_model_that_would_become_too_stale() -> None:
    """With S = 1 client 2 (from version 0) is asked for at 1.75; the request finds it in its first epoch, which ends
    at 2.5; it sends what it has and the server gets it at 2.75, before client 0 comes at 3.25."""
    run = play("port", CENTRES, seconds=[1.0, 1.0, 8.0], plan=FOUR, hyper={"bound": 1}, until=3.3)
    assert [row.time for row in run.server] == pytest.approx([1.75, 3.25])
    assert [row.metric("merged") for row in run.server] == [[(0, 0), (1, 0)], [(2, 1), (0, 0)]]
    assert run.device(2)[0].time == pytest.approx(2.5)
    assert run.device(2)[0].w == pytest.approx(local(START, UP, 1))
    assert run.device(0)[0].w == pytest.approx(local(START, LEFT, 4))


def test_port_waits_for_those_it_asked() -> None:
    """An epoch of client 2 takes 4 s: the request of 1.75 finds it busy until 4.5, and K = 2 have come at 3.25."""
    run = play("port", CENTRES, seconds=[1.0, 1.0, 16.0], plan=FOUR, hyper={"bound": 1}, until=5.0)
    assert [row.time for row in run.server] == pytest.approx([1.75, 4.75])
    assert [row.metric("merged") for row in run.server] == [[(0, 0), (1, 0)], [(0, 0), (1, 0), (2, 1)]]


@pytest.mark.parametrize(("bound", "stalest"), [(1, 1), (2, 2), (100, 5)])
def test_port_keeps_the_bound(bound: int, stalest: int) -> None:
    run = play("port", CENTRES, seconds=[1.0, 1.0, 8.0], plan=FOUR, hyper={"bound": bound}, until=40.0)
    ages = [age for row in run.server for _, age in row.metric("merged")]
    assert max(ages) == stalest


def test_port_weighs_by_staleness_and_by_the_direction_of_the_change() -> None:
    """Every aggregation again, with the model that each client started from; and beside it with that of t - 2."""
    centres = [*CENTRES, (5.0, -1.0)]
    samples, seconds = [4, 6, 2, 4], [1.0, 0.9, 3.3, 4.7]
    one = Plan(epochs=1, batch_size=12, lr=0.5)
    run = play("port", centres, samples=samples, seconds=seconds, plan=one, until=20.0, hyper={"bound": 5})
    versions = [list(START)]
    differs = False
    for number, row in enumerate(run.server):
        w, merged = versions[-1], row.metric("merged")
        starts = [versions[number - age] for _, age in merged]
        changes = [change(start, centres[k]) for (k, _), start in zip(merged, starts, strict=True)]
        second = [versions[max(0, number - 2)] if age else w for _, age in merged]
        right, wrong = (port_weights(w, changes, given, merged, samples) for given in (starts, second))
        assert row.metric("weights") == pytest.approx(right, rel=1e-4)
        differs |= right != pytest.approx(wrong, abs=0.01)
        versions.append(plus(w, mix(changes, right)))
        assert row.w == pytest.approx(versions[-1], rel=1e-4, abs=1e-5)
    assert differs
    assert max(age for row in run.server for _, age in row.metric("merged")) >= 3


def port_weights(
    w: list[float],
    changes: list[list[float]],
    starts: list[list[float]],
    merged: list[tuple[int, int]],
    samples: list[int],
) -> list[float]:
    """With S = 5, a = 3, b = 1."""
    alike = [cosine(d, minus(w, start)) for d, start in zip(changes, starts, strict=True)]
    raw = [samples[k] * (3 * 5 / (age + 5) + (c + 1) / 2) for (k, age), c in zip(merged, alike, strict=True)]
    return [r / sum(raw) for r in raw]


def cosine(left: list[float], right: list[float]) -> float:
    lengths = hypot(*left) * hypot(*right)
    return sum(a * b for a, b in zip(left, right, strict=True)) / lengths if lengths else 0.0


def test_port_compares_changes_not_whole_weights() -> None:
    """Far from the origin all weights are nearly parallel; the changes are opposite."""
    samples = torch.tensor([1, 1])
    far = torch.tensor([1000.0, 1000.0])
    op = port.Aggregate(2, port.Hyper())
    w, end = far + torch.tensor([1.0, 0.0]), far - torch.tensor([1.0, 0.0])
    _, weights = op._one(w, [end, w + 1], [far, w], [2, 0], samples.tolist())
    raw = [3 * 10 / 12 + (-1 + 1) / 2, 3 + 1 / 2]
    assert weights.tolist() == pytest.approx([r / sum(raw) for r in raw], rel=1e-6)


def test_port_with_nothing_gone_counts_the_cosine_as_zero() -> None:
    assert port.cosine(torch.ones(3), torch.zeros(3)).item() == 0.0
    weights = port.importance(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), torch.tensor([1, 1]), port.Hyper())
    assert weights.tolist() == pytest.approx([3.5 / 7.5, 4.0 / 7.5])


def test_port_gives_up_a_client_that_left() -> None:
    gone = {2: [(0.0, "join"), (1.0, "leave")]}
    run = play("port", CENTRES, seconds=[1.0, 1.0, 8.0], plan=FOUR, hyper={"bound": 1}, changes=gone, updates=5)
    assert all(client != 2 for row in run.server for client, _ in row.metric("merged"))
    assert len(run.device(0)) == 5


# FedSA: client 0 takes 1 s, client 1 takes 2 s.


def test_fedsa_mixes_by_staleness() -> None:
    run = play("fedsa", [LEFT, RIGHT], seconds=[1.0, 2.1], until=4.8)
    expected = [(1.5, 0), (1.75, -1), (2.6, 1), (2.85, -1), (3.0, 0), (3.25, -1), (4.5, 0), (4.75, -1)]
    assert run.events() == expected
    assert [row.metric("merged") for row in run.server] == [[(0, 0)], [(1, 1)], [(0, 1)], [(0, 0)]]
    w0 = list(START)
    fresh, stale = 0.6, 0.6 / sqrt(2)
    w1 = mix([w0, local(w0, LEFT)], [1 - fresh, fresh])
    w2 = mix([w1, local(w0, RIGHT)], [1 - stale, stale])
    w3 = mix([w2, local(w1, LEFT)], [1 - stale, stale])
    w4 = mix([w3, local(w3, LEFT)], [1 - fresh, fresh])
    assert [row.w for row in run.server] == [pytest.approx(w) for w in (w1, w2, w3, w4)]
    assert [row.metric("weights")[0] for row in run.server] == pytest.approx([fresh, stale, stale, fresh])


def test_fedsa_second_stage_trains_less_the_staler_a_client_is() -> None:
    hyper = fedsa.Hyper()
    assert fedsa.effort(4, 4.0, hyper) == 0.5
    assert fedsa.effort(8, 4.0, hyper) == 0.25
    assert fedsa.effort(1, 4.0, hyper) == 0.5
    assert fedsa.effort(0, 0.0, hyper) == 0.5


def test_fedsa_enters_the_second_stage_when_the_loss_falls_slowly() -> None:
    """Two clients that pull apart: the loss settles, and from then on a local update takes half of its four epochs."""
    run = play("fedsa", [LEFT, RIGHT], seconds=[1.0, 1.7], plan=FOUR, until=40.0)
    times = [row.time for row in run.device(0)]
    lengths = [later - earlier - 2 * LATENCY for earlier, later in pairwise(times)]
    assert lengths[0] == pytest.approx(1.0)
    assert lengths[-1] == pytest.approx(0.5)
    switch = next(i for i, seconds in enumerate(lengths) if seconds < 0.9)
    assert all(seconds < 0.9 for seconds in lengths[switch:])
    last = run.device(0)[-1].w
    begun = [row.w for row in run.server if row.time < times[-1] - 0.5 - LATENCY + 1e-9][-1]
    assert last == pytest.approx(local(begun, LEFT, 2, lr=0.25), abs=1e-5)


# ASO-Fed: one client, whose share is 1.

LAM, BETA = 0.7, 0.2


def by_hand(updates: int, seconds: float, lr: float) -> list[list[float]]:
    """The server's models: changes corrected by the ones before, step sizes by the delay."""
    w, s_prev, h = list(START), [0.0, 0.0], [0.0, 0.0]
    models = []
    for number in range(updates):
        step = lr * (max(1.0, log(seconds)) if number else 1.0)
        s = minus(w, local(w, LEFT, 2, lr=step, mu=LAM))
        zeta = mix([s, s_prev, h], [1, -1, 1])
        h = mix([h, s_prev], [BETA, 1 - BETA])
        s_prev = s
        w = minus(w, zeta)
        models.append(w)
    return models


@pytest.mark.parametrize("seconds", [1.0, 20.0])
def test_aso_fed_values(seconds: float) -> None:
    plan = Plan(epochs=2, batch_size=4, lr=0.1)
    hyper = {"lam": LAM, "beta": BETA, "features": "off"}
    run = play("aso-fed", [LEFT], seconds=[seconds], plan=plan, hyper=hyper, updates=5)
    correction = 3 * 2 * 2 / (6 * 2 * 8 / seconds)
    expected = by_hand(5, seconds + correction, 0.1)
    assert [row.w for row in run.server] == [pytest.approx(w, rel=1e-5) for w in expected]
    assert run.device(0)[0].time == pytest.approx(2 * LATENCY + seconds + correction)


def test_aso_fed_proximal_term_has_a_gradient() -> None:
    """A term computed from a detached copy would leave the path of lam = 0."""
    plan = Plan(epochs=3, batch_size=4, lr=0.1)
    pulled, free = (
        play("aso-fed", [LEFT], plan=plan, hyper={"lam": lam, "features": "off"}, updates=1).device(0)[0].w
        for lam in (2.0, 0.0)
    )
    assert pulled == pytest.approx(local(START, LEFT, 3, lr=0.1, mu=2.0))
    assert free == pytest.approx(local(START, LEFT, 3, lr=0.1))
    assert pulled[0] < 0.9 * free[0]


def test_aso_fed_server_goes_by_share_of_samples() -> None:
    hyper = {"lam": 0.0, "features": "off"}
    run = play("aso-fed", [LEFT, RIGHT], samples=[2, 6], seconds=[2.0, 6.0], hyper=hyper, until=3.0)
    w = mix([list(START), change(list(START), LEFT)], [1, 2 / 8])
    assert run.server[0].w == pytest.approx(w)
    assert run.server[0].metric("weights") == [0.25]


def test_aso_fed_learns_features_of_the_first_layer() -> None:
    """Rows (1, 3) and (0, 0) by hand; what lies behind the layer is left alone."""
    layer = Entry("weight", (2, 2), 0)
    vector = torch.tensor([1.0, -3.0, 0.0, 0.0, 7.0])
    a = [exp(1) / (exp(1) + exp(3)), exp(3) / (exp(1) + exp(3))]
    literal = weigh_features(vector, layer, scaled=False)
    assert literal.tolist() == pytest.approx([a[0] * 1, a[1] * -3, 0, 0, 7])
    scaled = weigh_features(vector, layer, scaled=True)
    assert scaled.tolist() == pytest.approx([2 * a[0] * 1, 2 * a[1] * -3, 0, 0, 7])
    assert vector.tolist() == [1, -3, 0, 0, 7]


@pytest.mark.parametrize("features", ["scaled", "paper"])
def test_aso_fed_feature_step_is_not_left_out(features: str) -> None:
    """The toy's layer has one input per unit, where both factors are 1; here are two units of two inputs."""
    op = aso_fed.Absorb(_layout(), features)
    total, model = op._one(torch.tensor([1.0, 3.0]), torch.tensor([0.5, -1.0]), 0.5)
    raw = [1 - 0.25, 3 + 0.5]
    a = [exp(r) / (exp(raw[0]) + exp(raw[1])) for r in raw]
    scale = 2 if features == "scaled" else 1
    assert model.tolist() == pytest.approx([scale * f * r for f, r in zip(a, raw, strict=True)])
    assert total.tolist() == pytest.approx(raw if features == "scaled" else model.tolist())


def _layout() -> aso_fed.Layout:
    return aso_fed.Layout.of(torch.nn.Linear(2, 1, bias=False))


def test_the_clock_is_virtual() -> None:
    """Two runs give the same events and values to the last bit, however long the machine took."""
    runs = [play("port", CENTRES, seconds=[1.0, 1.3, 2.9], until=30.0) for _ in range(2)]
    assert runs[0].events() == runs[1].events()
    assert [row.w for row in runs[0].rows] == [row.w for row in runs[1].rows]
