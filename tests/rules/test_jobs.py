"""The rules as queued work: the same numbers as device by device, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aedfl import placement
from aedfl.rules.baseline import advantage, empty_window, remember
from aedfl.rules.jobs import Agree, Learn, Merge, Select
from aedfl.rules.pretrain import pretrained
from aedfl.rules.selector import reinforce_step
from aedfl.rules.weights import control_gradient, control_step

P = 40


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scalar(value: float) -> Tensor:
    return torch.tensor(value)


def selection(slots: int, seed: int = 0, **changed: Any) -> tuple[Any, ...]:
    """A device whose first slot is new, whose second was merged before, and whose last is empty."""
    given = {
        "theta": pretrained(),
        "seen": torch.tensor([0, 2] + [0] * (slots - 2)),
        "since": torch.tensor(3),
        "versions": np.array([1, 2] + [1] * (slots - 3) + [0]),
        "ages": np.arange(1, slots + 1),
        "losses": (*(scalar(0.5 + i) for i in range(slots - 1)), None),
        "own": scalar(0.7),
        "uniforms": np.random.default_rng(seed).random(slots),
    }
    return tuple((given | changed).values())


def test_without_the_network_everything_new_is_chosen_and_nothing_twice() -> None:
    ((choices, _, _, seen, since),) = Select(learned=False).run([selection(4)])
    assert choices.tolist() == [True, False, True, False]
    assert seen.tolist() == [1, 2, 1, 0] and since.item() == 0
    ((choices, *_),) = Select(learned=False, reuse=True).run([selection(4)])
    assert choices.tolist() == [True, True, True, False]


def test_updates_without_a_merge_are_counted() -> None:
    job = selection(3, versions=np.array([0, 2, 0]))
    ((choices, _, _, seen, since),) = Select(learned=False).run([job])
    assert not choices.any() and since.item() == 4 and seen.tolist() == [0, 2, 0]


@pytest.mark.parametrize("learned", [True, False])
def test_selection_does_not_depend_on_the_batch(learned: bool) -> None:
    batch = [selection(4, 1), selection(7, 2), selection(3, 3)]
    together = Select(learned=learned).run(batch)
    for job, found in zip(batch, together, strict=True):
        (alone,) = Select(learned=learned).run([job])
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


def merge_job(slots: int, seed: int, masked: bool = False, chosen: list[bool] | None = None) -> tuple[Any, ...]:
    masks = tuple(numbers(P, seed=seed + 50 + i) > -0.5 if masked else None for i in range(slots + 1))
    return (
        tuple(numbers(P, seed=seed + i) for i in range(slots + 1)),
        masks,
        np.arange(10, 11 + slots),
        np.arange(1, slots + 1),
        tuple(scalar(0.5 + i) for i in range(slots + 1)),
        torch.linspace(0.5, 1.5, slots + 1),
        torch.tensor(chosen or [True] * slots),
        torch.tensor(2),
    )


def test_merge_by_samples_is_the_weighted_mean_of_the_chosen() -> None:
    job = merge_job(3, 0, chosen=[True, False, True])
    ((merged, weights),) = Merge(dynamic=False).run([job])
    shares = np.array([10, 11, 0, 13]) / 34
    assert np.allclose(weights.numpy(), shares)
    expected = sum(share * vector for share, vector in zip(shares, job[0], strict=True))
    assert torch.allclose(merged, torch.as_tensor(expected, dtype=torch.float32), atol=1e-6)


@pytest.mark.parametrize(("power", "counted"), [(1.0, False), (0.0, True)])
def test_dynamic_weights_follow_the_formula(power: float, counted: bool) -> None:
    job = merge_job(2, 3)
    ((_, weights),) = Merge(dynamic=True, count_own=counted, loss_power=power).run([job])
    ages = np.array([3.0 if counted else 1.0, 1.0, 2.0])
    raw = np.array([10, 11, 12]) * np.array([0.5, 1.0, 1.5]) / (np.sqrt(ages) * np.array([0.5, 1.5, 2.5]) ** power)
    assert np.allclose(weights.numpy(), raw / raw.sum(), rtol=1e-6)


@pytest.mark.parametrize("power", [0.0, 1.0])
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_model_whose_loss_is_no_number_is_left_out(power: float, loss: float) -> None:
    """Neighbours may have diverged, or the device itself: whoever has not keeps its model."""
    fine, broken = torch.ones(P), torch.full((P,), float("nan"))
    for vectors, losses, expected in (
        ((fine, broken), (scalar(1.0), scalar(loss)), [1.0, 0.0]),
        ((broken, fine), (scalar(loss), scalar(1.0)), [0.0, 1.0]),
    ):
        job = (vectors, (None, None), np.array([1, 1]), np.array([1]), losses, torch.ones(2), torch.tensor([True]),
               torch.tensor(0))  # fmt: skip
        ((merged, weights),) = Merge(dynamic=True, loss_power=power).run([job])
        assert weights.tolist() == expected and torch.equal(merged, fine)


def test_what_only_neighbours_hold_is_theirs_and_ready_to_come_back() -> None:
    """The second entry is pruned here; the stored value must not be what a unit comes back with."""
    own, other = torch.tensor([1.0, -9.0]), torch.tensor([3.0, 5.0])
    job = ((own, other), (torch.tensor([True, False]), None), np.array([1, 1]), np.array([1]), (scalar(1.0),) * 2,
           torch.ones(2), torch.tensor([True]), torch.tensor(0))  # fmt: skip
    ((merged, _),) = Merge(dynamic=False).run([job])
    assert merged.tolist() == [2.0, 5.0]


@pytest.mark.parametrize("masked", [False, True])
def test_merging_does_not_depend_on_the_batch_or_on_its_pieces(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [merge_job(3, 10, masked), merge_job(5, 20, masked), merge_job(1, 30, masked)]
    together = Merge(dynamic=True).run(batch)
    monkeypatch.setattr(placement, "ROOM", 1)
    for job, found, piece in zip(batch, together, Merge(dynamic=True).run(batch), strict=True):
        (alone,) = Merge(dynamic=True).run([job])
        for one, other, third in zip(found, alone, piece, strict=True):
            assert torch.equal(one, other) and torch.equal(one, third)


def learn_job(slots: int, seed: int) -> tuple[Any, ...]:
    vectors, masks, _, _, _, control, choices, _ = merge_job(slots, seed)
    weights = torch.softmax(numbers(slots + 1, seed=seed + 90), 0)
    merged = sum(w * v for w, v in zip(weights, vectors, strict=True))
    window = remember(remember(empty_window(1, 5), torch.tensor([1.0])), torch.tensor([2.0]))[0]
    features, versions = numbers(slots, 4, seed=seed + 91).abs(), np.ones(slots, dtype=np.int64)
    last = (vectors, masks, weights, merged, features, versions, choices)
    return (control, pretrained(), window, *last, scalar(1.2), None, numbers(P, seed=seed + 92))


def test_learning_is_the_rules_applied_to_each_device() -> None:
    batch = [learn_job(3, 100), learn_job(4, 200)]
    found = Learn(control=True, selector=True, derivative="exact", selector_lr=0.1, reuse=True).run(batch)
    for job, (control, theta, window) in zip(batch, found, strict=True):
        slope = control_gradient(
            job[-1][None], torch.stack(job[3])[None], job[5][None], job[0][None], None, job[6][None], "exact"
        )
        assert torch.equal(control, control_step(job[0][None], slope, 0.05)[0])
        gain = advantage(job[-3][None], job[2][None], True)
        valid = torch.ones(1, len(job[8]), dtype=torch.bool)
        moved = reinforce_step(job[1][None], job[7][None], valid, job[9][None], gain, 0.1, 0.05)
        assert torch.equal(theta, moved[0]) and not torch.equal(theta, job[1])
        assert torch.equal(window.nan_to_num(-1), remember(job[2][None], job[-3][None])[0].nan_to_num(-1))


def test_what_could_not_be_chosen_teaches_nothing() -> None:
    job = learn_job(4, 300)
    used = job[7][:, 0] > 0.5
    assert 0 < used.sum() < len(used)
    ((_, theta, _),) = Learn(control=False, selector=True, selector_lr=0.1).run([job])
    gain = advantage(job[-3][None], job[2][None], True)
    moved = reinforce_step(job[1][None], job[7][None], ~used[None], job[9][None], gain, 0.1, 0.05)
    assert torch.equal(theta, moved[0])


def test_a_reference_turns_the_reward_into_a_gain() -> None:
    job = learn_job(3, 300)
    referred = (*job[:-2], scalar(1.0), job[-1])
    ((_, _, window),) = Learn(control=False, selector=True).run([referred])
    assert window[-1].item() == pytest.approx(0.2)


def test_switched_off_parts_stay_as_they_are() -> None:
    job = learn_job(3, 400)
    ((control, theta, _),) = Learn(control=False, selector=False).run([job])
    assert control is job[0] and theta is job[1]


def test_worth_is_averaged_over_those_who_know_by_the_merges_weights() -> None:
    own, one, other, none = torch.tensor([0.2, 0.8]), torch.tensor([0.6, 0.4]), torch.tensor([1.0, 0.0]), torch.zeros(2)
    given = {
        "the mean": ((own, one, other), (0.5, 0.3, 0.2), 0.5 * own + 0.3 * one + 0.2 * other),
        "an empty slot and one that was not chosen": ((own, None, one, other), (0.5, 0.0, 0.5, 0.0), (own + one) / 2),
        "a neighbour that does not prune": ((own, None, one), (0.2, 0.6, 0.2), (own + one) / 2),
        "neighbours that have not measured": ((own, none), (0.5, 0.5), own),
        "the own one not known yet": ((none, one), (0.9, 0.1), one),
        "nobody": ((none, none), (0.5, 0.5), none),
    }
    jobs_ = [(worths, torch.tensor(weights)) for worths, weights, _ in given.values()]
    together = Agree().run(jobs_)
    for case, job, (found,), (*_, expected) in zip(given, jobs_, together, given.values(), strict=True):
        assert torch.allclose(found, expected), case
        assert torch.equal(found, Agree().run([job])[0][0]), f"{case}: depends on the batch"
