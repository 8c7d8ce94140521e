"""Runs on an accelerator that is always behind: evaluations end later, and the record is the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerator import Accelerator, behind
from aedfl.experiment.config import RunConfig
from aedfl.experiment.progress import Silent
from aedfl.experiment.record import Record, read_rows
from aedfl.experiment.run import Run, claim, drive_all
from aedfl.experiment.workshop import Workshop
from aedfl.graph import Value
from experiment.small import NOSY, interrupted, pruning, record, rows, simple_run, small, whole

SELDOM = {"checkpoint_seconds": 3600.0}
CONFIGS = {
    "plain": small,
    "few checkpoints": lambda: small(record=SELDOM),
    "nosy": lambda: small(NOSY, record=SELDOM),
    "pruning": pruning,
    "server": lambda: small("fedbuff", record=SELDOM),
    "no updates": lambda: small(record=SELDOM | {"updates": False}),
}
STOPS: dict[str, dict[str, Any]] = {
    "target": {"target_accuracy": 0.3, "stop_at_target": True},
    "consensus": {"consensus": 0.45},
}


def late_run(config: RunConfig, folder: Path) -> dict[str, Any]:
    with behind() as accelerator:
        found = simple_run(config, folder)
    assert accelerator.copies and all(copy.arrived for copy in accelerator.copies)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_record_is_the_same(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    assert late_run(config, tmp_path / "run") == whole(config)


@pytest.mark.parametrize("name", STOPS)
def test_a_run_stops_at_the_same_evaluation(name: str, tmp_path: Path) -> None:
    config = small(record=SELDOM, evaluation={"every": 5.0}, stop={"virtual_seconds": 40.0} | STOPS[name])
    expected = whole(config)
    assert 2 < len(rows(expected, "metrics")) < 9, "it stops before the end, and not at once"
    assert late_run(config, tmp_path / "run") == expected


class Watched:
    """A run, driven by hand; after each evaluation, the copies that were begun by then."""

    def __init__(self, config: RunConfig, folder: Path | None, accelerator: Accelerator) -> None:
        self.workshop, self.accelerator = Workshop(), accelerator
        self.run = Run(config, self.workshop, folder, Silent())
        self.measured: list[int] = []
        evaluate = self.run._evaluate

        def noted() -> None:
            evaluate()
            self.measured.append(len(accelerator.copies))

        self.run._evaluate = noted  # type: ignore[method-assign]

    def evaluations(self) -> Iterator[int]:
        """Drives; yields how many evaluations were begun, whenever there is one more."""
        seen = 0
        for _ in self.run.drive():
            self.workshop.queue.flush()
            if len(self.measured) > seen:
                seen = len(self.measured)
                yield seen

    def under_way(self) -> int:
        """How many evaluations have copies that nobody has waited for."""
        ends, copies = [0, *self.measured], self.accelerator.copies
        parts = [copies[begin:end] for begin, end in pairwise(ends)]
        return sum(not all(copy.arrived for copy in part) for part in parts)


def test_one_evaluation_is_under_way_while_the_next_events_are_simulated(tmp_path: Path) -> None:
    with behind() as accelerator:
        watched = Watched(small(record=SELDOM), tmp_path, accelerator)
        for begun in watched.evaluations():
            assert watched.under_way() == 1
            assert len(read_rows(tmp_path / "metrics.jsonl")) == begun - 1
        assert begun == 10
        watched.run.finish()
        assert watched.under_way() == 0


def test_the_one_before_is_waited_for_when_the_next_one_has_all_its_work() -> None:
    with behind() as accelerator:
        watched = Watched(small(), None, accelerator)
        drive_all([watched.run], watched.workshop)
    ends, log = [0, *watched.measured], accelerator.log
    assert len(ends) == 12
    for begin, end, next_end in zip(ends, ends[1:], ends[2:], strict=False):
        waits = [log.index(("waited", copy)) for copy in range(begin, end)]
        assert len(waits) >= 3 and min(waits) > log.index(("begun", next_end - 1))


@pytest.mark.parametrize("folder", [True, False])
def test_whoever_reads_sees_the_evaluation_that_is_under_way(folder: bool, tmp_path: Path) -> None:
    expected = rows(whole(small(record=SELDOM)), "metrics")
    with behind() as accelerator:
        watched = Watched(small(record=SELDOM), tmp_path if folder else None, accelerator)
        for begun in watched.evaluations():
            if begun == 4:
                break
        assert watched.run.record.read("metrics") == expected[:4]
        watched.run.record.close()
        assert watched.run.record.read("metrics") == expected[:4]


def test_everything_is_shown_in_its_order() -> None:
    class Watcher(Silent):
        def __init__(self) -> None:
            self.seen: list[tuple[float, float | None, int]] = []

        def advance(self, virtual_time: float, accuracy: float | None, updates: int, _: float) -> None:
            self.seen.append((virtual_time, accuracy, updates))

        def finish(self) -> None:
            self.seen.append((-1.0, None, 0))

    watcher, workshop = Watcher(), Workshop()
    with behind():
        drive_all([Run(small(), workshop, None, watcher)], workshop)
    metrics = rows(whole(small()), "metrics")
    assert watcher.seen == [*((row["time"], row["accuracy"], row["updates"]) for row in metrics), (-1.0, None, 0)]


def test_a_run_dropped_at_any_flush_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checkpoint at every third evaluation, so that most are dropped while they are under way."""
    config = small(NOSY, stop={"virtual_seconds": 10.0})
    expected, checkpoint = whole(config), Run._checkpoint

    def every_third(run: Run) -> None:
        if run._evaluations % 3 == 0:
            checkpoint(run)

    monkeypatch.setattr(Run, "_checkpoint", every_third)
    workshop = Workshop()
    with behind():
        for flushes in range(1, 200, 3):
            folder = tmp_path / f"torn{flushes}"
            claim(folder, config, force=False)
            if killed(config, folder, flushes, workshop):
                break
            assert interrupted(folder, 10_000, workshop)
            assert record(folder) == expected
    assert flushes > 9


def killed(config: RunConfig, folder: Path, flushes: int, workshop: Workshop) -> bool:
    """Drives a run for so many flushes and leaves everything as it is; true if it got to its end before."""
    one = Run(config, workshop, folder, Silent())
    steps = one.drive()
    for _ in range(flushes):
        if next(steps, one) is one:
            return True
        workshop.queue.flush()
    return False


def test_a_settled_record_has_all_that_was_added(tmp_path: Path) -> None:
    with behind():
        made = Record(tmp_path)
        for number in range(3):
            made.add("updates", {"loss": Value(torch.tensor(0.5 + number))})
            if number == 0:
                made.begin()
                assert not read_rows(tmp_path / "updates.jsonl")
        offsets = made.settle()
    assert read_rows(tmp_path / "updates.jsonl") == [{"loss": 0.5}, {"loss": 1.5}, {"loss": 2.5}]
    assert offsets == {"metrics": 0, "updates": (tmp_path / "updates.jsonl").stat().st_size, "journal": 0}
    made.close()
