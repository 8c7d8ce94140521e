"""The steps of an exchange as one job, against the same steps taken one after the other by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch

from aedfl.ops import SlowMomentum
from aedfl.rules.exchange import Choose, Exchange
from aedfl.rules.jobs import Learn, Merge, Select
from aedfl.rules.pretrain import pretrained

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


def choice(grows: bool, learns: bool, seed: int) -> tuple[Any, ...]:
    """The own part of a device with three slots, of which the last is empty."""
    random = torch.Generator().manual_seed(seed)
    vectors = tuple(torch.randn(4, 3, generator=random))
    features, gradient = torch.rand(3, 4, generator=random), torch.tensor([3.0, 0.0, 4.0])
    picked = torch.tensor([True, False, False])
    lesson = (vectors, (None,) * 4, torch.tensor([0.5, 0.5, 0.0, 0.0]), vectors[0], features, np.array([1, 1, 0]),
              picked, torch.tensor(3.0), None, gradient)  # fmt: skip
    losses = (torch.tensor(0.5), torch.tensor(0.7), None)
    selection = (torch.zeros(3, dtype=torch.int64), torch.tensor(1), np.array([2, 1, 0]), np.array([1, 3, 1]), losses,
                 torch.tensor(0.6), np.array([0.3, 0.6, 0.1]))  # fmt: skip
    known = (torch.ones(4), pretrained(), torch.tensor([1.0, 2.0], dtype=torch.float64))
    return (torch.tensor(2.0), gradient) if grows else None, known, lesson if learns else None, selection


def test_a_choice_is_made_by_what_was_just_learned() -> None:
    learn, select = Learn(control=True, selector=True, selector_lr=5.0), Select(learned=True)
    growth, known, lesson, selection = choice(True, True, 1)
    largest, control, theta, window, *picked = Choose(learn, select).run([(growth, known, lesson, selection)])[0]
    assert largest.item() == 5.0 and window.tolist() == [2.0, 3.0]
    ((after, moved, _),) = learn.run([(*known, *lesson)])
    assert torch.equal(control, after) and torch.equal(theta, moved) and not torch.equal(theta, known[1])
    (expected,) = select.run([(moved, *selection)])
    assert all(torch.equal(part, same) for part, same in zip(picked, expected, strict=True))
    (before,) = select.run([(known[1], *selection)])
    assert not torch.equal(picked[1], before[1])


def test_what_is_not_learned_stays_and_devices_do_not_depend_on_each_other() -> None:
    op = Choose(Learn(control=True, selector=True, selector_lr=5.0), Select(learned=True))
    jobs = [choice(*steps, seed) for seed, steps in enumerate(product((False, True), repeat=2))]
    for one, found in zip(jobs, op.run(jobs), strict=True):
        (alone,) = op.run([one])
        assert all(torch.equal(part, same) for part, same in zip(found, alone, strict=True))
        stays = [torch.equal(part, same) for part, same in zip(found[1:4], one[1], strict=True)]
        assert stays == ([False] * 3 if one[2] else [True] * 3)
