"""FedAvg, FedProx and FedNova: every round by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from aedfl.algorithms import fednova
from aedfl.algorithms._server import PATIENCE, SPREAD
from aedfl.sim.network import Links
from aedfl.training.plan import Plan

from .toy import LATENCY, LINKS, START, Point, local, minus, mix, play

CENTRES: list[Point] = [(1.0, 0.0), (0.0, 2.0), (-4.0, 8.0)]
SAMPLES = [2, 4, 6]
SECONDS = [1.0, 2.0, 3.0]
PLAN = Plan(epochs=1, batch_size=2, lr=0.5)
STEPS = [1, 2, 3]
SHARES = [2 / 12, 4 / 12, 6 / 12]
TIMES = [seconds * count / 4 for seconds, count in zip(SECONDS, SAMPLES, strict=True)]
"""Seconds of a local update: the fleet's are those of a device with the mean number of samples."""


def test_fedavg_takes_the_mean_weighted_by_samples() -> None:
    run = play("fedavg", CENTRES, samples=SAMPLES, seconds=SECONDS, plan=PLAN, updates=3)
    w = list(START)
    for number, row in enumerate(run.server):
        trained = [local(w, c, steps) for c, steps in zip(CENTRES, STEPS, strict=True)]
        for device, expected in enumerate(trained):
            assert run.device(device)[number].w == pytest.approx(expected)
        w = mix(trained, SHARES)
        assert row.w == pytest.approx(w)
        assert row.metric("merged") == [(0, 0), (1, 0), (2, 0)]
    assert len(run.server) == 3


def test_a_synchronous_round_lasts_as_long_as_its_slowest_client() -> None:
    run = play("fedavg", CENTRES, samples=SAMPLES, seconds=SECONDS, plan=PLAN, updates=2)
    first = 3 * LATENCY + max(TIMES)
    second = first + 2 * LATENCY + max(TIMES)
    assert [row.time for row in run.server] == pytest.approx([first, second])
    assert [run.device(k)[0].time for k in range(3)] == pytest.approx([2 * LATENCY + t for t in TIMES])
    assert [run.device(k)[1].time for k in range(3)] == pytest.approx([first + LATENCY + t for t in TIMES])


def test_fedavg_with_a_share_asks_that_many_clients() -> None:
    run = play("fedavg", CENTRES, samples=SAMPLES, plan=PLAN, hyper={"share": 0.5}, until=30.0)
    w = list(START)
    drawn = set()
    for row in run.server:
        members = [client for client, _ in row.metric("merged")]
        assert len(members) == 2
        drawn |= set(members)
        total = sum(SAMPLES[k] for k in members)
        w = mix([local(w, CENTRES[k], STEPS[k]) for k in members], [SAMPLES[k] / total for k in members])
        assert row.w == pytest.approx(w, abs=1e-6)
    assert len(run.server) > 5
    assert drawn == {0, 1, 2}


def test_a_round_goes_on_without_a_client_that_never_comes_back() -> None:
    """In the first round it is waited for SPREAD times the fastest; later PATIENCE times its own longest."""
    gone = {2: [(0.0, "join"), (0.6, "leave")]}
    run = play("fedavg", CENTRES, samples=SAMPLES, seconds=SECONDS, plan=PLAN, changes=gone, updates=2)
    fastest = 2 * LATENCY + min(TIMES)
    assert [row.time for row in run.server] == pytest.approx(
        [LATENCY + SPREAD * fastest, LATENCY + SPREAD * fastest + 2 * LATENCY + TIMES[1]]
    )
    assert [row.metric("merged") for row in run.server] == [[(0, 0), (1, 0)]] * 2

    first = 3 * LATENCY + max(TIMES)
    gone = {2: [(0.0, "join"), (first + 1.0, "leave")]}
    run = play("fedavg", CENTRES, samples=SAMPLES, seconds=SECONDS, plan=PLAN, changes=gone, updates=3)
    longest = 2 * LATENCY + TIMES[2]
    assert [row.time for row in run.server[:2]] == pytest.approx([first, first + PATIENCE * longest])
    assert run.server[1].metric("merged") == [(0, 0), (1, 0)]
    assert run.server[2].time == pytest.approx(run.server[1].time + 2 * LATENCY + TIMES[1])


def test_a_client_that_crashes_takes_part_again_in_the_next_round() -> None:
    crash = {2: [(0.0, "join"), (1.0, "crash"), (2.0, "join")]}
    run = play("fedavg", CENTRES, samples=SAMPLES, seconds=SECONDS, plan=PLAN, changes=crash, until=12.0)
    assert [row.metric("merged") for row in run.server] == [[(0, 0), (1, 0)], [(0, 0), (1, 0), (2, 0)]]
    assert run.server[0].time == pytest.approx(3 * LATENCY + TIMES[1])


def test_lost_messages_stop_nobody_for_good() -> None:
    links = Links(LATENCY, LINKS.bandwidth, LINKS.server_bandwidth, loss=0.2)
    run = play("fedavg", CENTRES, links=links, until=2000.0)
    late = [row for row in run.server if row.time > 1500]
    assert {client for row in late for client, _ in row.metric("merged")} == {0, 1, 2}


MU = 0.4


def test_fedprox_adds_mu_times_the_way_from_the_global_model() -> None:
    plan = replace(PLAN, epochs=2)
    run = play("fedprox", CENTRES, samples=SAMPLES, plan=plan, updates=2, hyper={"mu": MU})
    w = list(START)
    for number, row in enumerate(run.server):
        trained = [local(w, c, 2 * steps, mu=MU) for c, steps in zip(CENTRES, STEPS, strict=True)]
        for device, expected in enumerate(trained):
            assert run.device(device)[number].w == pytest.approx(expected)
        w = mix(trained, SHARES)
        assert row.w == pytest.approx(w)


def test_fedprox_has_the_right_sign_and_the_squared_norm() -> None:
    """Three steps by hand, beside the two mistakes: pushed away, and a pull of constant length."""

    def walk(pull: Callable[[float], float]) -> float:
        x = 0.0
        for _ in range(3):
            x -= 0.5 * ((x - 1) + pull(x))
        return x

    run = play("fedprox", [(1.0, 0.0)], plan=replace(PLAN, epochs=3), samples=[2], updates=1, hyper={"mu": MU})
    assert run.server[0].w == pytest.approx([walk(lambda x: MU * x), 0.0])
    assert walk(lambda x: MU * x) != pytest.approx(walk(lambda x: -MU * x), abs=0.02)
    assert walk(lambda x: MU * x) != pytest.approx(walk(lambda x: MU / 2 * (x > 0)), abs=0.02)


def test_fedprox_keeps_stragglers_that_did_fewer_epochs() -> None:
    plan = replace(PLAN, epochs=4, batch_size=4)
    hyper = {"mu": MU, "round_seconds": 3.0}
    run = play("fedprox", CENTRES[:2], seconds=[2.0, 8.0], plan=plan, updates=1, hyper=hyper)
    done = [4, 2]
    trained = [local(START, c, steps, mu=MU) for c, steps in zip(CENTRES[:2], done, strict=True)]
    assert [run.device(k)[0].w for k in range(2)] == [pytest.approx(w) for w in trained]
    assert [run.device(k)[0].time for k in range(2)] == pytest.approx([2 * LATENCY + 2.0, 2 * LATENCY + 4.0])
    assert run.server[0].w == pytest.approx(mix(trained, [0.5, 0.5]))


def test_fednova_divides_each_change_by_its_own_steps() -> None:
    run = play("fednova", CENTRES, samples=SAMPLES, plan=PLAN, updates=3)
    w = list(START)
    effective = sum(share * a for share, a in zip(SHARES, STEPS, strict=True))
    for row in run.server:
        changes = [minus(w, local(w, c, steps)) for c, steps in zip(CENTRES, STEPS, strict=True)]
        factors = [effective * share / a for share, a in zip(SHARES, STEPS, strict=True)]
        assert row.metric("weights") == pytest.approx(factors)
        w = minus(w, mix(changes, factors))
        assert row.w == pytest.approx(w)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.3)])
def test_fednova_coefficients_are_the_weights_of_the_gradients(momentum: float, mu: float) -> None:
    """With a gradient of 1 at every step, a client moves by lr times the sum of its coefficients."""
    x = velocity = 0.0
    for _ in range(5):
        velocity = momentum * velocity + 1.0 + mu * x
        x -= 0.1 * velocity
    assert fednova.coefficients(5, 0.1, momentum, mu) == pytest.approx(-x / 0.1)


def test_fednova_with_momentum_and_proximal_term_end_to_end() -> None:
    plan = Plan(epochs=1, batch_size=2, lr=0.1, momentum=0.5)
    run = play("fednova", CENTRES, samples=SAMPLES, plan=plan, updates=1, hyper={"mu": 0.2})
    ends = [local(START, c, s, 0.1, 0.2, 0.5) for c, s in zip(CENTRES, STEPS, strict=True)]
    totals = [1.0, (1 - 0.02) * 1 + 1.5, (1 - 0.02) * ((1 - 0.02) * 1 + 1.5) + 1.75]
    effective = sum(share * a for share, a in zip(SHARES, totals, strict=True))
    factors = [effective * share / a for share, a in zip(SHARES, totals, strict=True)]
    assert run.server[0].w == pytest.approx(mix(ends, factors))


def test_fednova_is_not_drawn_towards_clients_with_more_steps() -> None:
    """With small steps FedNova ends at the optimum of the weighted sum; FedAvg nearer to the busiest client."""
    plan = Plan(epochs=1, batch_size=2, lr=0.02)
    optimum = mix(CENTRES, SHARES)
    ends = {}
    for method in ("fedavg", "fednova"):
        run = play(method, CENTRES, samples=SAMPLES, plan=plan, updates=200)
        ends[method] = sum(abs(d) for d in minus(run.server[-1].w, optimum))
    assert ends["fednova"] < 0.05 * ends["fedavg"]
