"""SAFA and Sageflow: who is in which round, and what comes of it."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch
from torch import nn

from aedfl.algorithms import sageflow
from aedfl.data import Dataset, Split
from aedfl.native import library
from aedfl.task import Task
from aedfl.training.plan import Plan

from .toy import LATENCY, START, Point, Run, local, mix, play, problem

CENTRES: list[Point] = [(1.0, 0.0), (0.0, 2.0), (-4.0, 8.0), (6.0, 1.0)]
FOUR = Plan(epochs=4, batch_size=4, lr=0.5)
SECONDS = [1.0, 3.0, 4.0, 12.0]
DEADLINE = 4.725


def trained(w: list[float], device: int) -> list[float]:
    return local(w, CENTRES[device], 4)


@pytest.fixture(scope="module")
def safa() -> Run:
    """Local updates of 1, 3, 4 and 12 s in four epochs; two of four are picked, a lag of 1 is tolerated."""
    return play("safa", CENTRES, seconds=SECONDS, plan=FOUR, hyper={"lag": 1, "deadline": DEADLINE}, until=13.4)


def test_safa_rounds_close_at_the_quota_or_at_the_deadline(safa: Run) -> None:
    """0: clients 0 (1.75 s) and 1 (3.75 s) are the quota.

    1: client 2 (4.75) is picked; 0 (5.25) and 1 (7.25) were picked before and wait in line. At the deadline 0 fills
    up what is missing and 1 is passed over.
    2: client 1 (11.975) is picked, 0 (9.975) and 2 (12.975) wait in line until the deadline; 0 fills up.
    """
    assert [row.time for row in safa.server] == pytest.approx([3.75, 3.75 + DEADLINE, 3.75 + 2 * DEADLINE])
    assert [row.metric("merged") for row in safa.server] == [[(0, 0), (1, 0)], [(2, 1), (0, 0)], [(1, 0), (0, 0)]]
    assert [row.metric("passed") for row in safa.server] == [[], [1], [2]]


def test_safa_aggregates_the_entries_of_all_clients(safa: Run) -> None:
    w0, quarter = list(START), [0.25] * 4
    entries = [trained(w0, 0), trained(w0, 1), w0, w0]
    w1 = mix(entries, quarter)
    entries[2], entries[0] = trained(w0, 2), trained(w1, 0)
    w2 = mix(entries, quarter)
    entries[1] = trained(w1, 1)  # the bypass: too late for this round
    entries[3] = w2  # client 3 is two versions behind and starts over from the global model
    entries[1], entries[0] = trained(w2, 1), trained(w2, 0)
    w3 = mix(entries, quarter)
    assert [row.w for row in safa.server] == [pytest.approx(w) for w in (w1, w2, w3)]


def test_safa_bypass_goes_into_the_cache_after_the_aggregation(safa: Run) -> None:
    assert safa.sim.server is not None
    saved = safa.sim.server.restore()
    assert saved is not None
    entries = {client: model.vector.get().tolist() for client, model in saved["entries"].items()}
    w2 = safa.server[1].w
    assert entries[2] == pytest.approx(trained(w2, 2))
    assert entries[3] == pytest.approx(w2)


def test_safa_client_too_far_behind_drops_its_work() -> None:
    """The order of 8.475 reaches client 3 in its third epoch, which ends at 9.5; it starts over and is done at 21.5.

    The others leave at 14, or it would be too far behind again."""
    gone = {device: [(0.0, "join"), (14.0, "leave")] for device in range(3)}
    hyper = {"lag": 1, "deadline": DEADLINE}
    run = play("safa", CENTRES, seconds=SECONDS, plan=FOUR, hyper=hyper, until=22.0, changes=gone)
    assert [row.time for row in run.device(3)] == pytest.approx([9.5 + 12.0])
    assert run.device(3)[0].w == pytest.approx(trained(run.server[1].w, 3))
    tolerant = play("safa", CENTRES, seconds=SECONDS, plan=FOUR, hyper={"lag": 5, "deadline": DEADLINE}, until=22.0)
    assert tolerant.device(3)[0].time == pytest.approx(2 * LATENCY + 12.0)


def test_safa_without_a_deadline_gives_everybody_the_time_of_the_slowest() -> None:
    """Round 1 waits for client 3, which has never been seen; from then on the deadline is 1.05 times its 12.5 s."""
    run = play("safa", CENTRES, seconds=SECONDS, plan=FOUR, until=60.0)
    assert [row.time for row in run.server[:2]] == pytest.approx([3.75, 12.75])
    assert run.server[1].metric("merged") == [(2, 1), (3, 1)]
    assert run.server[1].metric("passed") == [0, 1]
    lengths = np.diff([row.time for row in run.server])
    assert lengths.max() <= 1.05 * 12.5 + 1e-9


def test_safa_with_a_client_that_left_goes_on() -> None:
    gone = {0: [(0.0, "join"), (1.0, "leave")]}
    run = play("safa", CENTRES, seconds=[1.0, 3.0, 4.0, 5.0], plan=FOUR, changes=gone, updates=5)
    assert [len(run.device(k)) for k in range(4)] == [0, 5, 5, 5]


PUBLIC: Point = (1.0, 3.0)


@pytest.fixture(scope="module")
def sage() -> Run:
    """Rounds of 2 s; local updates of 1, 3 and 9 s; two public samples that want (1, 3)."""
    samples = [4, 4, 4, 2]
    task, rows = problem([*CENTRES[:3], PUBLIC], samples)
    hyper = {"round_seconds": 2.0}
    return play("sageflow", CENTRES[:3], seconds=[1.0, 3.0, 9.0], hyper=hyper, until=10.1, task=(task, rows[:3]),
                public=rows[3])  # fmt: skip


def test_sageflow_groups_late_models_by_the_round_they_started_in(sage: Run) -> None:
    """Client 1 starts in rounds 0 and 2 and comes in rounds 1 and 3; client 2 comes in round 4, four late: too much."""
    assert [row.time for row in sage.server] == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0])
    merged = [sorted(row.metric("merged")) for row in sage.server]
    assert merged == [[(0, 0)], [(0, 0), (1, 1)], [(0, 0)], [(0, 0), (1, 1)], [(0, 0)]]
    assert sage.device(2)[0].time == pytest.approx(9.5)


def test_sageflow_values(sage: Run) -> None:
    """A group's weight falls with its lateness; alone in its group, a model's public loss does not matter."""
    fresh, late = 1 / (1 + 2**-0.5), 2**-0.5 / (1 + 2**-0.5)
    w0 = list(START)
    w1 = local(w0, CENTRES[0])
    w2 = mix([local(w1, CENTRES[0]), local(w0, CENTRES[1])], [fresh, late])
    w3 = local(w2, CENTRES[0])
    w4 = mix([local(w3, CENTRES[0]), local(w2, CENTRES[1])], [fresh, late])
    assert [row.w for row in sage.server[:4]] == [pytest.approx(w) for w in (w1, w2, w3, w4)]


def test_sageflow_weighs_by_public_loss_inside_a_group() -> None:
    samples = [4, 8, 2]
    task, rows = problem([*CENTRES[:2], PUBLIC], samples)
    hyper = {"round_seconds": 4.0, "gamma_rounds": 1}
    run = play("sageflow", CENTRES[:2], seconds=[1.0, 1.0], hyper=hyper, until=8.1, task=(task, rows[:2]),
               public=rows[2])  # fmt: skip
    w = list(START)
    for number, row in enumerate(run.server):
        models = [local(w, CENTRES[0], 1), local(w, CENTRES[1], 2)]
        losses = [sum((a - b) ** 2 for a, b in zip(m, PUBLIC, strict=True)) / 2 for m in models]
        raw = [4 / losses[0], 8 / losses[1]]
        weights = [r / sum(raw) for r in raw]
        assert row.metric("weights") == pytest.approx(weights, rel=1e-5)
        gamma = 0.5**number
        w = mix([mix(models, weights), w], [gamma, 1 - gamma])
        assert row.w == pytest.approx(w, rel=1e-5)


def test_sageflow_group_weights_by_hand() -> None:
    """Two groups; the second model is dropped for its entropy, which also takes its samples off its group."""
    hyper = sageflow.Hyper(delta=2.0)
    losses, entropies = torch.tensor([1.0, 0.1, 2.0, 0.5]), torch.tensor([0.5, 1.5, 0.9, 0.2])
    ages, samples = torch.tensor([0, 0, 1, 1]), torch.tensor([10, 90, 20, 40])
    inside = [1.0, 0.0, 20 / 4, 40 / 0.25]
    second = inside[2] + inside[3]
    groups = [10.0, 60 * 2**-0.5]
    raw = [groups[0], 0.0, groups[1] * inside[2] / second, groups[1] * inside[3] / second]
    expected = [r / sum(raw) for r in raw]
    assert sageflow.weights(losses, entropies, ages, samples, hyper).tolist() == pytest.approx(expected)


def test_sageflow_keeps_all_where_none_would_pass() -> None:
    weights = sageflow.weights(
        torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.2]), torch.tensor([0, 0]), torch.tensor([1, 3]), sageflow.Hyper()
    )
    assert weights.tolist() == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("kernels", [True, False])
def test_sageflow_scores_on_the_public_samples(kernels: bool) -> None:
    """Logits (0, log 3): probabilities 1/4 and 3/4; three public samples of classes 1, 1, 0."""
    split = Split(torch.ones(4, 1), torch.tensor([1, 1, 0, 0]))
    module = nn.Sequential(nn.Linear(1, 2, bias=False))
    task = Task(module, Dataset("two", split, split, 2), kernels=kernels)
    assert (task.speaker.chain is not None) == (kernels and library() is not None)
    ((loss, entropy),) = sageflow.Score(task).run([(torch.tensor([0.0, log(3)]), np.array([0, 1, 2]))])
    assert loss.item() == pytest.approx(-(2 * log(3 / 4) + log(1 / 4)) / 3)
    assert entropy.item() == pytest.approx(-(0.25 * log(0.25) + 0.75 * log(0.75)))


def test_sageflow_without_a_length_takes_it_from_the_first_round() -> None:
    """The first round waits for the slowest; later ones last a third of its time, so that it is two rounds late."""
    run = play("sageflow", CENTRES[:3], seconds=[1.0, 3.0, 9.0], until=30.0)
    first = 9.0 + 3 * LATENCY
    length = 1.05 * (9.0 + 2 * LATENCY) / 3
    assert [row.time for row in run.server] == pytest.approx(
        [first + number * length for number in range(len(run.server))]
    )
    ages = {age for row in run.server for client, age in row.metric("merged") if client == 2 and row.time > first + 1}
    assert ages == {2}
