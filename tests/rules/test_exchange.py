"""The steps of an exchange as one job, against the same steps taken one after the other by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch

from aedfl.ops import SlowMomentum
from aedfl.rules.exchange import Exchange
from aedfl.rules.jobs import Merge

OP = Exchange(Merge(dynamic=False), SlowMomentum(0.5, parameters=2))
START, OTHER, END = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 6.0, 8.0]), torch.tensor([2.0, 0.0, 6.0])
WORTH, HEARD = torch.tensor([0.2, 0.8]), torch.tensor([0.6, 0.4])
BASE, VELOCITY = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([2.0, 4.0, 9.0])
MERGED = torch.tensor([2.5, 5.0, 7.0])
"""A quarter of the own model and three quarters of the other."""


def job(agrees: bool, moves: bool, goes_on: bool, further: bool = True) -> tuple[Any, ...]:
    """Two models of 10 and 30 samples, with two parameters and one running statistic."""
    one = torch.tensor(1.0)
    merging = ((START, OTHER), (None, None), np.array([10, 30]), np.array([1]), (one, one), torch.ones(2),
               torch.tensor([True]), torch.tensor(0))  # fmt: skip
    return (
        merging,
        (WORTH, HEARD) if agrees else None,
        (END, 2.0, 0.5 if further else None) if moves else None,
        (BASE, VELOCITY) if goes_on else None,
    )


def test_every_step_counts_if_it_is_asked_for() -> None:
    merged, weights, worth, vector, velocity, sent = OP.run([job(True, True, True)])[0]
    assert merged.tolist() == MERGED.tolist() and weights.tolist() == [0.25, 0.75]
    assert torch.allclose(worth, 0.25 * WORTH + 0.75 * HEARD)
    moved = torch.tensor([2.5 + 2 * (2 - 1), 5.0 + 2 * (0 - 2), 0.25 * 6 + 0.75 * 8])
    assert velocity[:2].tolist() == [0.5 * 2 + moved[0] - 0, 0.5 * 4 + moved[1] - 1]
    assert vector.tolist() == [*(BASE + velocity)[:2], moved[2]]
    assert sent.tolist() == [vector[0] + 0.5 * (2 - 1), vector[1] + 0.5 * (0 - 2), vector[2]]


def test_what_is_left_out_changes_nothing() -> None:
    merged, _, _, vector, _, sent = OP.run([job(False, False, False)])[0]
    assert merged.tolist() == vector.tolist() == sent.tolist() == MERGED.tolist()
    _, _, _, vector, _, sent = OP.run([job(False, True, False, further=False)])[0]
    assert vector.tolist() == sent.tolist() == [4.5, 1.0, 7.5]


def test_jobs_with_different_steps_do_not_depend_on_each_other() -> None:
    jobs = [job(*steps) for steps in product((False, True), repeat=4)]
    for one, found in zip(jobs, OP.run(jobs), strict=True):
        alone = OP.run([one])[0]
        assert all(torch.equal(part, same) for part, same in zip(found, alone, strict=True))
