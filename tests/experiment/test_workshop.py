"""From a config to tasks, trainers and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aedfl.data import from_user, load
from aedfl.errors import UserError
from aedfl.experiment.workshop import Own, Rows, Workshop, _lookahead
from aedfl.training.batched import BatchedTrainer
from aedfl.training.sequential import SequentialTrainer
from experiment.small import small
from training.tasks import CLASSES, data


def trainer_of(module: nn.Module, **engine: Any) -> Any:
    workshop = Workshop(Own(module=module, dataset=data((6,))))
    return workshop.bench(small(engine={"device": "cpu", **engine})).trainer


class Branching(nn.Module):
    """Control flow that depends on data, which `vmap` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output if output.sum() > 0 else 2 * output


@pytest.mark.parametrize("trainer", ["auto", "batched"])
def test_what_cannot_be_batched_is_trained_one_by_one(trainer: str) -> None:
    assert isinstance(trainer_of(Branching(), trainer=trainer), SequentialTrainer)
    assert isinstance(trainer_of(nn.Linear(6, CLASSES), trainer=trainer), BatchedTrainer)


def test_a_trainer_can_be_chosen() -> None:
    chosen = trainer_of(nn.Linear(6, CLASSES), trainer="sequential", threads=2)
    assert isinstance(chosen, SequentialTrainer) and chosen.workers == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_said_in_one_sentence() -> None:
    with pytest.raises(UserError, match="engine.device is 'cuda', but PyTorch sees no CUDA device"):
        Workshop().bench(small(engine={"device": "cuda"}))


def test_runs_of_two_precisions_do_not_share_a_process() -> None:
    workshop = Workshop()
    workshop.bench(small(engine={"device": "cpu", "precision": "tf32"}))
    with pytest.raises(UserError, match="engine.precision: .* the same one, not fp32, tf32"):
        workshop.bench(small(engine={"device": "cpu", "precision": "fp32"}))


def test_runs_share_what_they_have_in_common() -> None:
    workshop = Workshop()
    first, same = workshop.bench(small()), workshop.bench(small(seed=4, stop={"virtual_seconds": 5.0}))
    other = workshop.bench(small(model={"name": "mlp", "options": {"hidden": [4]}}))
    assert first is same is not other


def test_start_values_follow_from_the_seed() -> None:
    workshop = Workshop()
    starts = [workshop.start(small(seed=seed), workshop.bench(small())) for seed in (0, 0, 1)]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_a_users_module_starts_from_its_own_values() -> None:
    module = nn.Linear(6, CLASSES)
    workshop = Workshop(Own(module=module, dataset=data((6,))))
    bench = workshop.bench(small())
    for seed in (0, 1):
        start = workshop.start(small(seed=seed), bench)
        assert torch.equal(start[: 6 * CLASSES], module.weight.detach().flatten())


# Rows -----------------------------------------------------------------------------------------------------------


def rows(**settings: Any) -> Rows:
    return Rows.of(small(data=settings), load("digits"))


def test_every_chosen_sample_has_one_owner() -> None:
    found = rows(samples=200, held_out=0.2)
    everything = np.concatenate([*found.train, *found.held_out])
    assert len(everything) == len(set(everything.tolist())) == 200
    assert all(len(own) and len(held) for own, held in zip(found.train, found.held_out, strict=True))


def test_nothing_is_held_out_unless_asked_for() -> None:
    assert sum(len(held) for held in rows().held_out) == 0


def test_a_validation_set_is_apart_from_training_and_test_data() -> None:
    found = rows(samples=200, validation=0.25, test_samples=None)
    assert not found.test and len(found.evaluation) == 50
    assert not set(found.evaluation.tolist()) & set(np.concatenate(found.train).tolist())


def test_local_models_are_measured_on_some_of_the_evaluation_samples() -> None:
    found = rows(test_samples=60)
    assert found.test and len(found.evaluation) == 60
    assert len(found.local) == 40 and set(found.local.tolist()) <= set(found.evaluation.tolist())


def test_rows_follow_from_the_seed() -> None:
    dataset = load("digits")
    first, same, other = (Rows.of(small(seed=seed), dataset) for seed in (0, 0, 1))
    assert all((a == b).all() for a, b in zip(first.train, same.train, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first.train, other.train, strict=True))


def test_regression_targets_are_shared_out_too() -> None:
    x = torch.randn(120, 3)
    found = Rows.of(small(data={"samples": None, "test_samples": None}), from_user((x, x[:, 0]), (x, x[:, 0])))
    assert sum(len(own) for own in found.train) == 120


# Files that a fleet comes from ----------------------------------------------------------------------------------


def test_speeds_and_lives_come_from_files(tmp_path: Path) -> None:
    speeds, trace = tmp_path / "speeds.csv", tmp_path / "trace.csv"
    speeds.write_text("".join(f"{device},{device + 1}\n" for device in range(6)))
    trace.write_text("2,4,leave\n3,9,join\n")
    config = small(fleet={"speeds": str(speeds), "trace": str(trace)}, stop={"virtual_seconds": 12.0})
    workshop = Workshop()
    seen: list[Any] = []
    sim = workshop.simulation(
        config, Rows.of(config, load("digits")), lambda *row: seen.append((row[0].index, row[0].now))
    )
    while not sim.advance(12.0):
        workshop.queue.flush()
    times = {device: [time for index, time in seen if index == device] for device in range(6)}
    assert max(times[2], default=0.0) <= 4.0 and min(times[3], default=99.0) > 9.0
    assert len(times[0]) > 2 * len(times[5])


def test_a_gpu_gets_its_jobs_as_soon_as_there_is_one_for_each_device() -> None:
    asked = [_lookahead(devices, torch.device(kind)) for kind in ("cuda", "cpu") for devices in (10, 100, 1000)]
    assert asked == [64, 100, 256, 256, 256, 256]


@pytest.mark.parametrize(("given", "expected"), [({}, 256), ({"lookahead": 7}, 7)])
def test_lookahead_is_the_one_that_was_asked_for(given: dict[str, int], expected: int) -> None:
    config = small(engine={"device": "cpu", **given})
    workshop = Workshop()
    rows = Rows.of(config, workshop.bench(config).task.dataset)
    assert workshop.simulation(config, rows, lambda *_: None).work.lookahead == expected
