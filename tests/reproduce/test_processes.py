"""Runs in processes of their own: the same curves, whoever is interrupted, dies or runs out of time."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from aedfl.errors import UserError
from aedfl.reproduce.plan import Cell
from aedfl.reproduce.pool import Clock, Outcome
from aedfl.reproduce.processes import ENDED, LEAD, WAITING, Board, Processes, _Bell, _Voice
from reproduce.fakes import tiny
from reproduce.test_pool import METHODS, alone

FATAL = """
import os
from dataclasses import dataclass
from aedfl.context import Method

@dataclass(frozen=True)
class Hyper: ...

async def device(ctx, hyper):
    await ctx.train(ctx.initial())
    os._exit(1)

METHOD = Method("fatal", "takes its process with it", Hyper(), device)
"""


def run(cells: list[Cell], count: int = 2, clock: Clock | None = None, **options: Any) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    jobs = [(i, cell.config) for i, cell in enumerate(cells)]
    Processes(jobs, found.__setitem__, clock or Clock(), count, **options).run()
    return found


def test_curves_are_those_of_single_runs() -> None:
    cells = [tiny(method, seed=seed) for method, seed in METHODS]
    found = run(cells)
    assert [found[i].rows for i in range(3)] == [alone(cell.config) for cell in cells]
    assert all(one.complete and not one.error for one in found.values())


def test_a_run_that_takes_its_process_with_it_is_named_and_the_others_come_out(tmp_path: Path) -> None:
    """Nobody knows whose fault it was while two went on, so they begin anew, one after the other."""
    (tmp_path / "fatal.py").write_text(FATAL)
    said: list[str] = []
    found = run([tiny(str(tmp_path / "fatal.py")), tiny("fedavg")], say=said.append)
    assert "died" in found[0].error and not found[0].complete
    assert found[1].complete and not found[1].error
    assert any("1 at once" in line for line in said)


def test_a_mistake_of_a_persons_is_theirs_to_know(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("METHOD = 3\n")
    with pytest.raises(UserError, match="broken.py"):
        run([tiny(str(tmp_path / "broken.py"))])


def test_without_time_nothing_begins() -> None:
    assert run([tiny("fedavg")], clock=Clock(0.0)) == {}


def test_who_is_interrupted_leaves_what_there_is() -> None:
    """Ctrl-C comes to the parent; the others stop after the batch that they are at."""
    cells = [tiny(method, until=1e6) for method in ("fedavg", "fedbuff")]
    found: dict[int, Outcome] = {}
    told = threading.Event()

    class Told:
        def start(self, label: str, total_virtual: float | None) -> None: ...

        def advance(self, virtual_time: float, accuracy: float | None, updates: int, speed: float) -> None:
            if virtual_time > 60 and not told.is_set():
                told.set()
                os.kill(os.getpid(), signal.SIGINT)

        def finish(self) -> None: ...

    jobs = [(i, cell.config) for i, cell in enumerate(cells)]
    with pytest.raises(KeyboardInterrupt):
        Processes(jobs, found.__setitem__, Clock(), 2, Told()).run()
    assert found and all(one.rows and not one.complete and not one.error for one in found.values())


def ahead(times: list[float], at: int, count: int) -> bool:
    board = Board(len(times))
    board.times[:] = times
    voice = _Voice(board, at, count, hurry=True, total=100.0)
    return voice._far_ahead(times[at])


def test_where_time_is_short_a_run_waits_for_those_that_began_with_it() -> None:
    slack = 100.0 * LEAD
    assert ahead([50.0, 50.0 - slack - 1], 0, 2)
    assert not ahead([50.0, 50.0 - slack], 0, 2), "not far enough"
    assert not ahead([50.0, 10.0], 1, 2), "it is behind"
    assert not ahead([50.0, ENDED], 0, 2) and not ahead([50.0, WAITING], 0, 2)
    assert not ahead([50.0, ENDED, 10.0], 0, 2), "a later one is not waited for"
    assert ahead([10.0, ENDED, 50.0], 2, 2), "but it waits for earlier ones"


@pytest.mark.parametrize("times", [[10.0, 20.0, 30.0, 40.0], [40.0, 40.0, 40.0, 40.0], [5.0, 90.0, 90.0, 90.0]])
def test_half_of_the_processes_never_wait(times: list[float]) -> None:
    assert sum(ahead(times, at, 4) for at in range(4)) <= 2


def test_a_process_stops_when_all_are_to_stop() -> None:
    board = Board(1)
    bell = _Bell(board, None)
    assert math.isinf(bell.left)
    board.stop.set()
    assert bell.left == 0.0
