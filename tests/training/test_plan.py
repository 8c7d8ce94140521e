"""The order in which local training takes its samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aedfl.training.plan import Plan, TrainJob, TrainResult, batches, even_share, in_parts, shared_out


def job(samples: int, epochs: int = 1, key: tuple[int, ...] = (0, 0, 1)) -> TrainJob:
    return TrainJob(torch.zeros(1), 100 + np.arange(samples), key, 0.1, epochs)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3))
def test_an_epoch_takes_every_sample_once(samples: int, size: int, epochs: int) -> None:
    rows = batches(job(samples, epochs), size)
    assert rows.shape == (Plan(epochs, size).steps(samples), size)
    for epoch in np.split(rows, epochs):
        taken = epoch[epoch >= 0]
        assert sorted(taken) == list(range(100, 100 + samples))


@given(st.integers(1, 40), st.integers(1, 12))
def test_only_the_end_of_the_last_batch_is_padded(samples: int, size: int) -> None:
    flat = batches(job(samples), size).ravel()
    assert (flat[:samples] >= 0).all() and (flat[samples:] == -1).all()


def test_epochs_and_keys_have_orders_of_their_own() -> None:
    first, second = batches(job(20, epochs=2), 20)
    (other,) = batches(job(20, key=(0, 0, 2)), 20)
    (same,) = batches(job(20), 20)
    assert (first == same).all()
    assert (first != second).any() and (first != other).any()


def test_a_lone_sample_is_left_out_where_two_are_needed() -> None:
    rows = batches(job(9, epochs=2), 4, least=2)
    assert rows.shape == (6, 4)
    assert (rows[[2, 5]] == -1).all() and (rows[[0, 1, 3, 4]] >= 0).all()
    assert (batches(job(10), 4, least=2) >= 0).sum() == 10


def test_jobs_that_differ_in_epochs_and_rate_share_a_batch() -> None:
    plan = Plan(momentum=0.9)
    assert plan.shape() == replace(plan, epochs=7, lr=0.5).shape() != replace(plan, momentum=0.8).shape()


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (1, [1]), (24, [24]), (25, [12, 13]), (60, [20, 20, 20])])
def test_jobs_are_shared_out_evenly_and_in_order(count: int, sizes: list[int]) -> None:
    jobs = [TrainJob(torch.zeros(1), np.arange(1), (number,), 0.1, 1) for number in range(count)]
    parts = shared_out(jobs, 24)
    assert [len(part) for part in parts] == sizes
    assert [job.key for part in parts for job in part] == [job.key for job in jobs]


def test_parts_have_jobs_of_like_length_and_results_the_order_of_the_jobs() -> None:
    jobs = [job(samples, epochs, (samples, epochs)) for samples, epochs in ((1, 3), (9, 1), (4, 4), (2, 1), (3, 2))]
    seen: list[list[int]] = []

    def train(part: list[TrainJob]) -> list[TrainResult]:
        seen.append([len(batches(one, 4)) for one in part])
        return [TrainResult(torch.tensor(one.key), *[torch.zeros(())] * 3) for one in part]

    found = in_parts(train, jobs, batch_size=4, most=2)
    assert [tuple(result.vector.tolist()) for result in found] == [one.key for one in jobs]
    assert seen == [[4], [3, 3], [2, 1]]


@pytest.mark.parametrize(
    ("left", "rounds", "share"),
    [(1, 1, 1), (100, 5, 20), (99, 5, 20), (100, 7, 16), (24, 1, 24), (100, 4, 48), (100, 1, 120), (3, 7, 1)],
)
def test_rounds_have_even_shares_in_sizes_that_need_no_padding(left: int, rounds: int, share: int) -> None:
    assert even_share(left, rounds, most=24) == share
