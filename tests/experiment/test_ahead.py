"""Runs whose work is computed in a thread of its own while the simulation goes on: the record is the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from accelerator import behind
from aedfl.errors import UserError
from aedfl.experiment.config import RunConfig
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, claim, drive_all
from aedfl.experiment.sections import Engine
from aedfl.experiment.workshop import Workshop, _overlaps
from aedfl.graph import Op, Queue
from experiment.small import NOSY, interrupted, pruning, record, small, whole

SELDOM = {"checkpoint_seconds": 3600.0}
CONFIGS = {
    "checkpoints": small,
    "plain": lambda: small(record=SELDOM),
    "small flushes": lambda: small(record=SELDOM, engine={"lookahead": 3}),
    "programs that read": lambda: small(NOSY, record=SELDOM, engine={"lookahead": 5}),
    "pruning": pruning,
    "server": lambda: small("fedbuff", record=SELDOM, engine={"lookahead": 4}),
    "held-out data": lambda: small(
        "aedfl", hyper={"outer": "held-out"}, data={"held_out": 0.2}, record=SELDOM, engine={"lookahead": 6}
    ),
    "convolutions, many models at once": lambda: small(
        "aedfl", model={"name": "cnn", "options": {}}, record=SELDOM, engine={"lookahead": 4, "trainer": "batched"}
    ),
    "crashes": lambda: small("aedfl", fleet={"mean_up": 6.0, "mean_down": 2.0}, record=SELDOM, engine={"lookahead": 4}),
    "a target": lambda: small(
        record=SELDOM, stop={"virtual_seconds": 40.0, "target_accuracy": 0.3, "stop_at_target": True}
    ),
}


def ahead_run(config: RunConfig, folder: Path) -> dict[str, Any]:
    claim(folder, config, force=False)
    with Workshop() as workshop:
        workshop.queue.go_ahead()
        drive_all([Run(config, workshop, folder, Silent())], workshop)
    return record(folder)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_record_is_the_same(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    assert ahead_run(config, tmp_path / "run") == whole(config)


def test_so_it_is_on_an_accelerator_that_is_behind(tmp_path: Path) -> None:
    config = small("aedfl", record=SELDOM, engine={"lookahead": 4})
    with behind():
        found = ahead_run(config, tmp_path / "run")
    assert found == whole(config)


def test_and_for_several_runs_together(tmp_path: Path) -> None:
    configs = [small("aedfl", seed=seed, record=SELDOM, engine={"lookahead": 5}) for seed in (1, 2)]
    with Workshop() as workshop:
        workshop.queue.go_ahead()
        runs = []
        for config in configs:
            claim(tmp_path / str(config.seed), config, force=False)
            runs.append(Run(config, workshop, tmp_path / str(config.seed), Silent()))
        drive_all(runs, workshop)
    for config in configs:
        assert record(tmp_path / str(config.seed)) == whole(config)


class AtOnce(ThreadPoolExecutor):
    """A thread that is done the moment it is asked."""

    def submit(self, *call: Any) -> Any:  # type: ignore[override]
        task = super().submit(*call)
        task.exception()
        return task


class AtLast(Future[None]):
    """What begins only when somebody waits for it."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call

    def result(self, timeout: float | None = None) -> None:
        self.call()


class Late(ThreadPoolExecutor):
    """A thread that is as late as can be."""

    def submit(self, *call: Any) -> Any:  # type: ignore[override]
        return AtLast(partial(*call))


@pytest.mark.parametrize("name", ["programs that read", "pruning"])
def test_no_batch_depends_on_the_pace_of_the_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU another batch may round otherwise, and the same seed gives the same record."""
    found = []
    for kind in (AtOnce, Late):
        monkeypatch.setattr("aedfl.graph.ThreadPoolExecutor", kind)
        with Workshop() as workshop:
            workshop.queue.go_ahead()
            drive_all([Run(CONFIGS[name](), workshop, None, Silent())], workshop)
        found.append(workshop.queue.batches)
    assert len(found[0]) > 10
    assert found[0] == found[1]


@pytest.mark.parametrize("flushes", [4, 9, 15])
def test_a_run_that_was_killed_goes_on_that_way(flushes: int, tmp_path: Path) -> None:
    config = small("aedfl", engine={"lookahead": 4})
    claim(tmp_path / "run", config, force=False)
    for _ in range(2):
        with Workshop() as workshop:
            workshop.queue.go_ahead()
            assert not interrupted(tmp_path / "run", flushes, workshop)
    with Workshop() as workshop:
        workshop.queue.go_ahead()
        drive_all([Run(config, workshop, tmp_path / "run", Silent())], workshop)
    assert record(tmp_path / "run") == whole(config)


def test_not_together_with_ray() -> None:
    with pytest.raises(UserError, match="engine.overlap = true: not together with engine.ray"):
        Workshop().bench(small(engine={"overlap": True, "ray": "local"}))


@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [
        ({}, "cpu", False),
        ({}, "cuda", True),
        ({"ray": "local"}, "cuda", False),
        ({"overlap": False}, "cuda", False),
        ({"overlap": True}, "cpu", True),
    ],
)
def test_a_gpu_is_asked_that_way_unless_told_otherwise(engine: dict[str, Any], device: str, expected: bool) -> None:
    assert _overlaps(Engine(**engine), device) is expected


def test_the_config_says_so(tmp_path: Path) -> None:
    config = small(record=SELDOM, engine={"overlap": True})
    claim(tmp_path / "run", config, force=False)
    with Workshop() as workshop:
        run = Run(config, workshop, tmp_path / "run", Silent())
        assert workshop.queue.ahead
        drive_all([run], workshop)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == whole(small(record=SELDOM))["metrics.jsonl"]


class Gate(Op):
    """Waits until it is opened."""

    outputs: ClassVar[int] = 1

    def __init__(self) -> None:
        self.opened, self.threads = threading.Event(), set[str]()

    def run(self, jobs: Any) -> list[tuple[torch.Tensor, ...]]:
        assert self.opened.wait(10)
        self.threads.add(threading.current_thread().name)
        return [(value + 1,) for (value,) in jobs]


def test_who_asks_goes_on_and_may_ask_for_more_of_what_is_not_there_yet() -> None:
    queue, gate = Queue(), Gate()
    queue.go_ahead()
    (first,) = queue.submit(gate, (torch.zeros(1),), [0])
    queue.flush()
    assert first.data is None and queue.finished == 0
    (second,) = queue.submit(gate, (first,), [1])
    gate.opened.set()
    queue.flush()
    assert first.get() == 1 and queue.finished == 1
    queue.wait()
    assert second.get() == 2 and queue.finished == 2
    assert gate.threads == {"aedfl-queue_0"}
    queue.close()


class Broken(Op):
    outputs: ClassVar[int] = 1

    def run(self, jobs: Any) -> list[tuple[torch.Tensor, ...]]:
        raise RuntimeError("no memory left")


def test_what_goes_wrong_is_raised_by_the_next_flush() -> None:
    queue = Queue()
    queue.go_ahead()
    lost = queue.submit(Broken(), (), [0])
    queue.flush()
    with pytest.raises(RuntimeError, match="no memory left"):
        queue.flush()
    assert lost[0].data is None
    queue.close()


def test_leaving_waits_for_one_batch_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an interrupted run, or one whose time is up, does not go on for the rest of a flush."""
    gate = Gate()

    class Opening(ThreadPoolExecutor):
        def shutdown(self, *given: Any, **named: Any) -> None:
            gate.opened.set()
            super().shutdown(*given, **named)

    monkeypatch.setattr("aedfl.graph.ThreadPoolExecutor", Opening)
    queue = Queue()
    queue.go_ahead()
    (first,) = queue.submit(gate, (torch.zeros(1),), [0])
    (second,) = queue.submit(gate, (first,), [1])
    queue.flush()
    queue.close()
    assert first.get() == 1 and second.data is None
