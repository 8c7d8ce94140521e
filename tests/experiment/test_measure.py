"""The mean model and the measures of local ones, on models made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aedfl.context import Model, Size
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run
from aedfl.experiment.workshop import Workshop
from aedfl.graph import Chosen, Value
from experiment.small import small


@pytest.fixture
def run() -> Run:
    return Run(small(devices=4), Workshop(), None, Silent())


def stand_for(run: Run, vectors: list[Tensor], masks: list[Tensor | None] | None = None) -> list[float]:
    """Gives every device a model; their numbers of samples."""
    for number, context in enumerate(run.sim.contexts):
        mask = masks[number] if masks else None
        size = Size(int(mask.sum()) if mask is not None else len(vectors[number]), 100.0 * (number + 1))
        context.model = Model(Value(vectors[number]), size, None if mask is None else Value(mask))
    return [float(context.samples) for context in run.sim.contexts]


def random_vectors(run: Run) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(run.task.layout.size, generator=generator) for _ in range(4)]


def test_before_the_first_update_everybody_stands_for_the_start(run: Run) -> None:
    assert torch.allclose(run.measure.global_vector(), run.sim.start.vector.get())
    assert run.measure()["consensus"] == pytest.approx(0.0, abs=1e-5)


def test_the_mean_model_weighs_devices_by_their_samples(run: Run) -> None:
    vectors = random_vectors(run)
    samples = stand_for(run, vectors)
    assert len(set(samples)) > 1
    expected = sum(n * v.double() for n, v in zip(samples, vectors, strict=True)) / sum(samples)
    torch.testing.assert_close(run.measure.global_vector().double(), expected, rtol=1e-5, atol=1e-6)


def test_an_entry_is_the_mean_over_those_who_hold_it(run: Run) -> None:
    vectors = random_vectors(run)
    masks: list[Tensor | None] = [torch.ones(len(vectors[0]), dtype=torch.bool) for _ in range(3)] + [None]
    for mask in masks[:3]:
        assert mask is not None
        mask[:5] = False
    samples = stand_for(run, vectors, masks)
    mean = run.measure.global_vector()
    torch.testing.assert_close(mean[:5], vectors[3][:5])
    expected = sum(n * v[5:].double() for n, v in zip(samples, vectors, strict=True)) / sum(samples)
    torch.testing.assert_close(mean[5:].double(), expected, rtol=1e-5, atol=1e-6)


def test_an_entry_that_nobody_holds_is_zero(run: Run) -> None:
    """The vectors still have the values from before the cut."""
    vectors = random_vectors(run)
    mask = torch.arange(len(vectors[0])) >= 5
    stand_for(run, vectors, [mask] * 4)
    mean = run.measure.global_vector()
    assert not mean[:5].any() and mean[5:].all()


def test_consensus_is_the_root_mean_square_distance_of_pairs(run: Run) -> None:
    vectors = random_vectors(run)
    stand_for(run, vectors)
    pairs = [((vectors[i] - vectors[j]) ** 2).sum().item() for i in range(4) for j in range(i)]
    assert run.measure()["consensus"] == pytest.approx(np.sqrt(np.mean(pairs)), rel=1e-5)


def test_local_measures_are_means_over_devices(run: Run) -> None:
    vectors = random_vectors(run)
    stand_for(run, vectors)
    row = run.measure()
    local, _ = run.measure.evaluator.score(vectors, run.rows.local, run.rows.test)
    assert row["local_accuracy"] == pytest.approx(np.mean(local)) and row["worst_tenth"] == min(local)
    assert row["mmacs"] == pytest.approx(250.0 / 1e6)


def test_only_so_many_devices_are_measured() -> None:
    run = Run(small(devices=6, evaluation={"local_devices": 2}), Workshop(), None, Silent())
    assert len(run.measure.chosen) == 2


def test_staleness_is_a_mean_over_what_was_merged_and_then_forgotten(run: Run) -> None:
    run.measure.staleness([(1, 2), (2, 4)])
    run.measure.staleness(Chosen(((0, 9), (3, 50)), Value(torch.tensor([1, 0]))))
    assert run.measure()["staleness"] == pytest.approx(5.0)
    assert run.measure()["staleness"] == 0.0


def test_a_server_stands_for_the_whole() -> None:
    run = Run(small("fedavg", devices=4), Workshop(), None, Silent())
    assert run.sim.server is not None
    vector = torch.randn(run.task.layout.size)
    mask = torch.arange(len(vector)) >= 5
    run.sim.server.model = Model(Value(vector), run.sim.start.size, Value(mask))
    assert torch.equal(run.measure.global_vector(), vector * mask)
