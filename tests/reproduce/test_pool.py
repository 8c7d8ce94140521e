"""Many runs in one batch: each one's curve is its own, whatever happens to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aedfl.errors import UserError
from aedfl.experiment.config import RunConfig
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, drive_all
from aedfl.experiment.workshop import Workshop
from aedfl.graph import Queue
from aedfl.reproduce.plan import Cell, Wish, cell
from aedfl.reproduce.pool import Clock, Outcome, Pool
from reproduce.fakes import tiny

BROKEN = """
from dataclasses import dataclass
from aedfl.context import Method

@dataclass(frozen=True)
class Hyper: ...

async def device(ctx, hyper):
    for _ in range(3):
        await ctx.train(ctx.initial())
    raise ValueError("this method gives up")

METHOD = Method("broken", "fails", Hyper(), device)
"""


def alone(config: RunConfig) -> list[dict[str, Any]]:
    with Workshop() as workshop:
        run = Run(config, workshop, None, Silent())
        drive_all([run], workshop)
    return list(run.record.read("metrics"))


class Countdown(Clock):
    """Is up after so many batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches

    @property
    def left(self) -> float:
        self.batches -= 1
        return 1e9 if self.batches > 0 else 0.0


def pooled(cells: list[Cell], **options: Any) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    Pool([(i, cell.config) for i, cell in enumerate(cells)], found.__setitem__, **options).run()
    return found


METHODS = [("fedavg", 1), ("aedfl-0", 1), ("fedbuff", 2)]


@pytest.fixture(params=["false", "true"], ids=["in turn", "overlapped"])
def cells(request: pytest.FixtureRequest) -> list[Cell]:
    """With overlap, jobs are computed while the simulations go on."""
    changes = f"engine.overlap={request.param}", "engine.lookahead=2"
    return [tiny(method, seed=seed, changes=changes) for method, seed in METHODS]


@pytest.fixture(scope="module")
def curves() -> list[list[dict[str, Any]]]:
    return [alone(tiny(method, seed=seed).config) for method, seed in METHODS]


def test_curves_are_those_of_single_runs(cells: list[Cell], curves: list[Any]) -> None:
    found = pooled(cells, at_once=2)
    assert [found[i].rows for i in range(3)] == curves
    assert all(one.complete and not one.error for one in found.values())


def test_when_the_time_is_up_runs_leave_what_they_have(cells: list[Cell], curves: list[Any]) -> None:
    found = pooled(cells, clock=Countdown(7))
    assert found
    for i, one in found.items():
        assert not one.complete and not one.error
        assert 1 < len(one.rows) < len(curves[i])
        assert one.rows == curves[i][: len(one.rows)]


def test_runs_stay_together_but_wait_for_no_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous run needs many flushes for the time in which FedAvg does one round."""
    flush, prepare = Queue.flush, Run._prepare
    runs, times = list[Run](), list[list[float]]()

    def noted(run: Run) -> None:
        runs.append(run)
        prepare(run)

    def watched(queue: Queue) -> None:
        times.append([run.sim.time for run in runs])
        flush(queue)

    monkeypatch.setattr(Run, "_prepare", noted)
    monkeypatch.setattr(Queue, "flush", watched)
    slow = tiny("aedfl-0", until=60.0, changes=("engine.lookahead=2",))
    pooled([tiny("fedavg", until=30.0), slow, tiny("fedprox", until=60.0)], at_once=2)
    together = [row for row in times if len(row) == 2]
    assert max(abs(fedavg - slow) for fedavg, slow in together) <= 10.0, "two measurements apart at most"
    assert len(together) > 10
    later = [row for row in times if len(row) == 3]
    assert all(newcomer <= older for _, older, newcomer in later)
    assert max(older - newcomer for _, older, newcomer in later) > 20.0, "the older run went on all the same"


def test_no_run_is_made_while_jobs_of_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, computed = Run._prepare, list[bool]()

    def noted(run: Run) -> None:
        computed.append(run.workshop.queue.finished == run.workshop.queue.flushes > 0)
        prepare(run)

    monkeypatch.setattr(Run, "_prepare", noted)
    ahead = "engine.overlap=true", "engine.lookahead=2"
    pooled([tiny("aedfl-0", until=until, changes=ahead) for until in (10.0, 30.0, 10.0)], at_once=2)
    assert computed == [False, False, True]


def test_an_interrupted_sitting_leaves_what_it_has(
    cells: list[Cell], curves: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, left = Queue.flush, [6]

    def interrupted(queue: Queue) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        flush(queue)

    monkeypatch.setattr(Queue, "flush", interrupted)
    found: dict[int, Outcome] = {}
    with pytest.raises(KeyboardInterrupt):
        Pool([(0, cells[0].config)], found.__setitem__).run()
    assert not found[0].complete
    assert found[0].rows == curves[0][: len(found[0].rows)] != []


def test_no_batch_begins_that_would_not_end_in_time(cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("aedfl.reproduce.pool.time.monotonic", lambda: now[0])
    flush, flushed = Queue.flush, []

    def slow(queue: Queue) -> None:
        flushed.append(now[0])
        flush(queue)
        now[0] += 25.0

    monkeypatch.setattr(Queue, "flush", slow)
    pooled(cells, clock=Clock(minutes=1.4))
    assert flushed == [0.0, 25.0, 50.0], "a fourth one would end at 100 s, past the 84 s there are"


def test_one_that_fails_leaves_its_error_and_the_others_go_on(
    cells: list[Cell], curves: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    bad = tiny(str(tmp_path / "broken.py"))
    found = pooled([cells[0], bad, cells[1]])
    assert "gives up" in found[1].error
    assert not found[1].complete
    assert [found[0].rows, found[2].rows] == curves[:2]


def test_a_batch_too_large_is_tried_in_halves(
    cells: list[Cell], curves: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, said = Queue.flush, list[str]()
    pool: Pool[int]

    def small_memory(queue: Queue) -> None:
        if pool.at_once > 1:
            raise RuntimeError("out of memory")
        flush(queue)

    monkeypatch.setattr(Queue, "flush", small_memory)
    found: dict[int, Outcome] = {}
    jobs = [(i, cell.config) for i, cell in enumerate(cells)]
    pool = Pool(jobs, found.__setitem__, at_once=3, say=said.append)
    pool.run()
    assert [found[i].rows for i in range(3)] == curves
    assert "out of memory" in said[0]


def test_a_run_that_has_ended_does_not_begin_anew_because_a_batch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    step, flush, prepare = Pool._step, Queue.flush, Run._prepare
    ended, made = list[float](), list[float]()

    def stepped(pool: Pool[int], one: Any) -> bool:
        went = step(pool, one)
        ended.extend([one.config.stop.virtual_seconds] if one.ended else [])
        return went

    def fails_then(queue: Queue) -> None:
        if len(ended) == 1 and len(made) == 3:
            raise RuntimeError("out of memory")
        flush(queue)

    def noted(run: Run) -> None:
        made.append(run.config.stop.virtual_seconds or 0.0)
        prepare(run)

    monkeypatch.setattr(Pool, "_step", stepped)
    monkeypatch.setattr(Queue, "flush", fails_then)
    monkeypatch.setattr(Run, "_prepare", noted)
    found = pooled([tiny("aedfl-0", until=until) for until in (10.0, 30.0, 31.0)], say=lambda line: None)
    assert made == [10.0, 30.0, 31.0, 30.0, 31.0]
    assert all(one.complete for one in found.values())


def test_a_batch_of_one_that_fails_is_that_runs_fault(cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(queue: Queue) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Queue, "flush", never)
    found = pooled(cells, at_once=2, say=lambda line: None)
    assert {one.error for one in found.values()} == {"RuntimeError: out of memory"}
    assert len(found) == 3


def test_unfinished_runs_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    one = tiny("aedfl-0", changes=("record.checkpoint_seconds=1e-9", "record.checkpoint_share=1"))
    first = pooled([one], clock=Countdown(9), checkpoints=tmp_path)
    assert not first[0].complete
    (folder,) = tmp_path.iterdir()
    assert list((folder / "checkpoints").iterdir())
    again = pooled([one], checkpoints=tmp_path)
    assert again[0].complete
    assert again[0].rows == alone(one.config)
    assert not list(tmp_path.iterdir()), "nothing is left of a finished run"


def test_a_checkpoint_of_a_run_with_another_end_is_left_alone(tmp_path: Path) -> None:
    often = ("record.checkpoint_seconds=1e-9", "record.checkpoint_share=1")
    longer, shorter = tiny("aedfl-0", until=60.0, changes=often), tiny("aedfl-0", until=20.0, changes=often)
    assert longer.identity == shorter.identity
    assert not pooled([longer], clock=Countdown(9), checkpoints=tmp_path)[0].complete
    assert pooled([shorter], checkpoints=tmp_path)[0].complete
    assert len(list(tmp_path.iterdir())) == 1, "what the longer one left is still there"
    again = pooled([longer], checkpoints=tmp_path)
    assert again[0].complete and again[0].rows == alone(longer.config)


def test_a_persons_mistake_is_no_cells_failure(tmp_path: Path) -> None:
    missing = cell("emnist-lenet", "fedavg", 1, Wish(data=str(tmp_path)), (), "table1", {})
    with pytest.raises(UserError, match="emnist"):
        pooled([missing])
