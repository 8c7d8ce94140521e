"""AEDFL and its variants as programs: what is merged, learnt, pruned, charged and recorded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aedfl import costs
from aedfl.algorithms import get
from aedfl.algorithms._options import Hyper
from aedfl.algorithms._state import State
from aedfl.algorithms.aedfl import VARIANTS, plan
from aedfl.context import Context
from aedfl.experiment.config import load
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, drive_all
from aedfl.experiment.workshop import Workshop
from aedfl.sim.network import Links
from aedfl.training.plan import Plan

from .toy import START, Point, local, minus, mix, play
from .toy import Run as Played

SHORT = ("devices=6", "stop.virtual_seconds=40", "evaluation.every=20", "training.epochs=1", "data.samples=240")
EARLY = (
    "hyper.prune_start=2",
    "hyper.prune_every=2",
    "hyper.prune_end=6",
    "hyper.hessian_samples=10",
    "hyper.probes=3",
    "hyper.lanczos_steps=4",
    "stop.virtual_seconds=1000",
    "stop.updates=12",
    "evaluation.every=500",
)
"""Pruning from the start, and time for it: beside so small an update it takes long."""


def finished(method: str, *overrides: str) -> Run:
    workshop = Workshop()
    run = Run(load("digits", (*SHORT, *overrides), method=method), workshop, None, Silent())
    drive_all([run], workshop)
    return run


def test_the_six_variants_are_switches_of_one_program() -> None:
    switches = {m.name: (m.hyper.selection, m.hyper.weighting, m.hyper.pruning) for m in VARIANTS}
    assert switches == {
        "aedfl": (True, True, True),
        "aedfl-0": (False, False, False),
        "aedfl-rl": (True, False, False),
        "aedfl-dwu": (False, True, False),
        "aedfl-p": (False, False, True),
        "aedfl-rl-dwu": (True, True, False),
    }
    assert len({method.device for method in VARIANTS}) == 1
    assert all(get(method.name) is method for method in VARIANTS)


def test_the_record_explains_what_was_done() -> None:
    run = finished("aedfl", *EARLY)
    rows = run.record.read("updates")
    slots = len(run.sim.contexts[0].in_neighbours)
    for row in rows:
        assert len(row["weights"]) == len(row["control"]) == slots + 1 and len(row["priorities"]) == slots
        assert sum(row["weights"]) == pytest.approx(1, abs=1e-5)
        taken = {source for source, _ in row["merged"]}
        assert taken <= set(run.sim.contexts[row["device"]].in_neighbours)
        weighed = {
            s for s, w in zip(run.sim.contexts[row["device"]].in_neighbours, row["weights"][1:], strict=True) if w
        }
        assert weighed == taken
    assert any(row["control"] != [1.0] * (slots + 1) for row in rows)
    pruned = [row for row in rows if "kept" in row]
    assert pruned and all(len(row["kept"]) == run.task.groups.count for row in pruned)
    assert all(0 <= row["prune_rate"] <= 0.5 for row in pruned)
    scored = [row["raw_rate"] for row in pruned if "raw_rate" in row]
    assert scored and all(0 <= rate <= 1 for rate in scored)


def test_pruning_shrinks_compute_messages_and_time() -> None:
    full, pruned = finished("aedfl-0", "stop.virtual_seconds=1000", "stop.updates=12"), finished("aedfl-p", *EARLY)
    assert pruned.summary["mmacs"] < full.summary["mmacs"] == pytest.approx(full.task.macs / 1e6)
    per_message = [run.sim.network.bytes_sent / run.sim.network.sent for run in (pruned, full)]
    assert per_message[0] < per_message[1]
    for context in pruned.sim.contexts:
        assert context.model is not None and context.model.mask is not None
        assert int(context.model.mask.get().sum()) < pruned.task.layout.size


def disagreement(run: Run) -> float:
    """4 p (1 - p), p being the share of devices that keep a unit: 0 where all do alike, 1 where half do."""
    rows = {row["device"]: row["kept"] for row in run.record.read("updates") if "kept" in row}
    share = np.array(list(rows.values()), dtype=float).mean(0)
    assert len(rows) == run.sim.devices and share.min() < 1
    return float((4 * share * (1 - share)).mean())


def test_devices_that_tell_each_other_what_units_are_worth_keep_the_same_ones() -> None:
    later = ("hyper.prune_start=4", "hyper.prune_every=3", "hyper.prune_end=12")  # when they have heard of each other
    longer = (*EARLY, *later, "hyper.max_rate=0.4", "devices=12", "data.samples=480", "stop.updates=30")
    alone = finished("aedfl-p", *longer, "hyper.view=1", "hyper.comeback=1", "hyper.regroup=0")
    told = finished("aedfl-p", *longer, "hyper.regroup=0")
    agreed = finished("aedfl-p", *longer)
    assert max(disagreement(told), disagreement(agreed)) < 0.5 * disagreement(alone)


def test_masks_follow_what_units_are_worth_between_two_scorings() -> None:
    """Without regrouping a mask changes at a pruning step only; with it, more often, and at hardly any cost."""
    seldom = (*EARLY, "hyper.prune_every=4", "hyper.prune_end=7", "stop.updates=30")
    steps, followed = (finished("aedfl-p", *seldom, f"hyper.regroup={age}") for age in (0, 1))
    masks = [sum("kept" in row for row in run.record.read("updates")) for run in (steps, followed)]
    assert masks[1] > 2 * masks[0]
    scored = [sum("raw_rate" in row for row in run.record.read("updates")) for run in (steps, followed)]
    assert scored[1] == pytest.approx(scored[0], rel=0.2)
    spent = [run.summary["costs"]["pruning"] for run in (steps, followed)]
    assert spent[1] / scored[1] == pytest.approx(spent[0] / scored[0], rel=0.05)


def test_the_clock_sees_the_pruned_size() -> None:
    same = ("fleet.fastest=2", "fleet.slowest=2")
    pruned, full = finished("aedfl-p", *EARLY, *same), finished("aedfl-p", *EARLY, *same, "hyper.max_rate=0.0")
    assert pruned.summary["updates"] == full.summary["updates"] == 6 * 12
    assert pruned.summary["costs"]["training"] < 0.95 * full.summary["costs"]["training"]
    speeds = {context.index: context._speed for context in full.sim.contexts}
    exact = sum(12 * costs.training(full.task.macs, c.samples) / speeds[c.index] for c in full.sim.contexts)
    assert full.summary["costs"]["training"] == pytest.approx(exact)


def test_fast_and_slow_devices_begin_to_prune_together() -> None:
    cheap = ("hyper.hessian_samples=2", "hyper.probes=1", "stop.virtual_seconds=80", "fleet.slowest=10")
    run = finished("aedfl-p", *cheap, "hyper.prune_start=8", "hyper.prune_every=4", "hyper.prune_end=20")
    first = {row["device"]: row for row in reversed(run.record.read("updates")) if "kept" in row}
    assert len(first) == 6
    times = [row["time"] for row in first.values()]
    alone = [8 * row["time"] / row["update"] for row in first.values()]  # by its own updates only
    assert max(times) / min(times) < 0.75 * max(alone) / min(alone)


def test_everything_the_method_does_is_charged() -> None:
    run = finished("aedfl", *EARLY, "data.held_out=0.2", "hyper.outer=held-out", "hyper.reward=gain")
    spent = run.summary["costs"]
    assert set(spent) == {"training", "selection", "learning", "merging", "pruning", "held-out"}
    assert all(seconds > 0 for seconds in spent.values())
    free = finished("aedfl-0").summary["costs"]
    assert free.pop("selection") == 0 and set(free) == {"training", "merging"}


def test_aedfl_0_merges_each_model_once_weighted_by_samples() -> None:
    run = finished("aedfl-0")
    received = run.sim.network.sent - run.sim.network.lost
    rows = run.record.read("updates")
    merged = [pair for row in rows for pair in row["merged"]]
    assert 0 < len(merged) <= received
    samples = [context.samples for context in run.sim.contexts]
    for row in rows:
        slots = run.sim.contexts[row["device"]].in_neighbours
        counts = {source: samples[source] for source, _ in row["merged"]}
        total = samples[row["device"]] + sum(counts.values())
        expected = [samples[row["device"]] / total, *(counts.get(source, 0) / total for source in slots)]
        assert np.allclose(row["weights"], expected, atol=1e-6)


def test_a_device_that_waits_for_news_trains_less_and_merges_more_often() -> None:
    without, waiting = (finished("aedfl-0", f"hyper.quiet_limit={limit}").record.read("updates") for limit in (0, 1))
    assert len(waiting) < len(without)
    merges = [np.mean([bool(row["merged"]) for row in rows]) for rows in (without, waiting)]
    assert merges[1] > merges[0]


@pytest.mark.parametrize(
    ("hyper", "age", "quiet", "divisor"),
    [
        (Hyper(quiet_lr=0.0), 99.0, 5, 1.0),
        (Hyper(quiet_lr=1.0), 99.0, 0, 1.0),
        (Hyper(quiet_lr=2.0), 99.0, 2, 9.0),
        (Hyper(quiet_lr=2.0, quiet_after=1000.0), 25.0, 2, 3.0),
        (Hyper(quiet_lr=2.0, quiet_after=0.0), 0.0, 2, 9.0),
        (Hyper(quiet_lr=2.0, weighting=False), 99.0, 2, 1.0),
    ],
    ids=["off", "news", "no news", "half of the way", "from the start", "without dynamic weights"],
)
def test_the_learning_rate_falls_while_nothing_comes(hyper: Hyper, age: float, quiet: int, divisor: float) -> None:
    given = Plan(lr=0.3, epochs=2, batch_size=50)  # 20 steps on 500 samples
    ctx = cast(Context, SimpleNamespace(plan=lambda done=0: given, samples=500, update=0))
    state = cast(State, SimpleNamespace(age=age, quiet=quiet))
    assert plan(ctx, hyper, state).lr == pytest.approx(0.3 / divisor)


@pytest.mark.parametrize(
    ("method", "exchange", "share"),
    [("aedfl-dwu", 1, 0.25), ("aedfl-dwu", 2, 0.5), ("aedfl-dwu", 0, 1.0), ("aedfl-dwu", 9, 1.0), ("aedfl-0", 1, 1.0)],
)
def test_a_local_update_is_shared_out_between_exchanges(method: str, exchange: int, share: float) -> None:
    """As much is trained in the same time, and the learning rate falls as fast, whatever the number of merges."""
    four = ("training.epochs=4", "training.lr_decay=0.01", "stop.virtual_seconds=90", "hyper.quiet_lr=0")
    run = finished(method, *four, f"hyper.exchange={exchange}", "fleet.fastest=3", "fleet.slowest=3")
    whole = finished(method, *four, "hyper.exchange=0", "fleet.fastest=3", "fleet.slowest=3")
    assert run.sim.samples == pytest.approx(whole.sim.samples, rel=0.05)
    assert run.sim.updates == pytest.approx(whole.sim.updates / share, rel=0.05)
    context, other = run.sim.contexts[0], whole.sim.contexts[0]
    hyper, state = run.sim.hyper, cast(State, SimpleNamespace(age=9.0, quiet=0))
    asked = plan(context, hyper, state)
    assert asked.epochs == 4 * share
    assert asked.lr == pytest.approx(other.plan(context.update * share).lr)
    assert asked.lr < context.plan(0).lr


CENTRES: list[Point] = [(1.0, 0.0), (0.0, 2.0), (-4.0, 8.0)]


def plain(method: str, **hyper: Any) -> Played:
    """Three devices of one speed, all of them neighbours, for three updates; what is learnt stays out of it."""
    still = {"own_staleness": "one", "momentum": 0.0, "control_rate": 0.0, "quiet_lr": 0.0, "settle": 0.0, **hyper}
    return play(method, CENTRES, updates=3, hyper=still)


@pytest.mark.parametrize("own_step", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sent_step", [1.0, 2.0])
def test_the_own_update_counts_as_often_as_wished_at_home_and_in_what_is_sent(
    own_step: float, sent_step: float
) -> None:
    """With 0 it is weighed like all else, as in the paper, and the model that is sent is the one that is kept."""
    run = plain("aedfl-dwu", own_step=own_step, sent_step=sent_step, sends=2)
    kept = sent = [list(START)] * 3
    for number in range(3):
        trained = [local(x, centre) for x, centre in zip(kept, CENTRES, strict=True)]
        steps = [minus(end, start) for end, start in zip(trained, kept, strict=True)]
        own = kept if own_step else trained
        others = [[sent[j] for j in range(3) if j != k] if number else [] for k in range(3)]
        merged = [mix([own[k], *others[k]], [1 / (1 + len(others[k]))] * (1 + len(others[k]))) for k in range(3)]
        kept = [mix([m, step], [1.0, own_step]) for m, step in zip(merged, steps, strict=True)]
        sent = [mix([m, step], [1.0, own_step and sent_step]) for m, step in zip(merged, steps, strict=True)]
        assert [run.device(k)[number].w for k in range(3)] == [pytest.approx(x) for x in kept]


def test_steps_get_smaller_with_the_age_of_a_model() -> None:
    """The first update, with nothing to merge, makes a model of age 1: with `settle = 4`, 4/5 of it count."""
    run = plain("aedfl-dwu", settle=4.0, sent_step=1.0, sends=1)
    for device, centre in enumerate(CENTRES):
        first = mix([list(START), local(START, centre)], [1 / 5, 4 / 5])
        assert run.device(device)[0].w == pytest.approx(first)
    assert [Hyper(settle=4.0).rest(age) for age in (0.0, 4.0, 12.0)] == [1.0, 0.5, 0.25]
    assert Hyper(settle=0.0).rest(100.0) == 1.0


@pytest.mark.parametrize(("method", "sends", "each"), [("aedfl-dwu", 1, 1), ("aedfl-dwu", 6, 2), ("aedfl-0", 6, 1)])
def test_a_model_goes_to_so_many_neighbours_with_dynamic_weights_and_else_to_one(
    method: str, sends: int, each: int
) -> None:
    run = plain(method, sends=sends)
    assert run.sim.network.sent == 3 * 3 * each
    assert all(count <= 3 for count, _ in run.sim.network.edges.values())


def test_a_link_too_slow_for_all_models_gets_fewer() -> None:
    """A model takes a second, an update half of one: nobody sends to a neighbour again before the last one has left."""
    bytes_each = plain("aedfl-dwu").sim.network.bytes_sent / (3 * 3 * 2)
    slow = Links(latency=0.25, bandwidth=8 * bytes_each, server_bandwidth=1e9)
    run = play("aedfl-dwu", CENTRES, seconds=[0.5] * 3, until=20.0, links=slow)
    assert 15 * 3 <= run.sim.network.sent <= 20 * 3 + 6 < run.sim.updates * 2


def test_slow_momentum_belongs_to_the_weights_and_changes_what_is_trained_next() -> None:
    losses = {
        (method, beta): [row["loss"] for row in finished(method, f"hyper.momentum={beta}").record.read("updates")]
        for method in ("aedfl-0", "aedfl-dwu")
        for beta in (0.0, 0.5)
    }
    assert losses["aedfl-0", 0.0] == losses["aedfl-0", 0.5]
    plain, moved = losses["aedfl-dwu", 0.0], losses["aedfl-dwu", 0.5]
    assert plain[:3] == moved[:3] and plain != moved  # nothing has been merged before the first updates end


def test_a_crash_keeps_what_was_learnt(tmp_path: Any) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,15.5,crash\n0,18,join\n")
    run = finished("aedfl", *EARLY, f"fleet.trace={trace}", "fleet.fastest=2", "fleet.slowest=3")
    updates = [row["update"] for row in run.record.read("updates") if row["device"] == 0]
    assert updates == list(range(1, 13))
    gap = max(np.diff([row["time"] for row in run.record.read("updates") if row["device"] == 0]))
    assert gap > 2.5


def test_hyper_parameters_are_frozen_and_have_help() -> None:
    hyper = get("aedfl").hyper
    assert all(field.metadata.get("help") for field in hyper.__dataclass_fields__.values())
    assert replace(hyper, c=2.0).c == 2.0
    with pytest.raises(AttributeError):
        hyper.c = 3.0
