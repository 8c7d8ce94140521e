"""What is under way when a run ends is not computed, and the record does not show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aedfl.experiment.config import RunConfig
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, claim, drive_all
from aedfl.experiment.workshop import Workshop
from aedfl.sim.simulation import Simulation
from experiment.small import record, small


def trained_and_counted(config: RunConfig, folder: Path) -> tuple[int, int, dict[str, Any]]:
    """Samples that went through the trainer, samples of finished local updates, and the record."""
    claim(folder, config, force=False)
    workshop = Workshop()
    run = Run(config, workshop, folder, Silent())
    trainer, trained = run.sim.trainer, 0
    train = trainer.train

    def counted(plan: Any, jobs: Any) -> Any:
        nonlocal trained
        trained += sum(len(job.samples) * job.epochs for job in jobs)
        return train(plan, jobs)

    trainer.train = counted  # type: ignore[method-assign]
    drive_all([run], workshop)
    return trained, run.sim.samples, record(folder)


@pytest.mark.parametrize("method", ["aedfl", "fedbuff", "fedavg"])
def test_training_under_way_at_the_end_is_left_out(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(method, stop={"virtual_seconds": 10.0}, fleet={"slowest": 1.0})
    trained, counted, found = trained_and_counted(config, tmp_path / "ended")
    assert trained <= counted  # less where a device is between its training and what it makes of it
    monkeypatch.setattr(Simulation, "end", lambda self: None)
    more, again, whole = trained_and_counted(config, tmp_path / "whole")
    assert more > again == counted
    assert found == whole
