"""Runs in processes of their own: the same curves, whoever is interrupted, dies or runs out of time."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aedfl.errors import UserError
from aedfl.reproduce.plan import Cell
from aedfl.reproduce.pool import Clock, Outcome
from aedfl.reproduce.processes import ENDED, LEAD, NOT_BEGUN, Bell, Board, Desk, Processes, Voice, too_little_memory
from reproduce.fakes import Told, tiny
from reproduce.test_pool import BROKEN, METHODS, alone

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


def failing(folder: Path, error: str) -> Cell:
    (folder / "short.py").write_text(BROKEN.replace("this method gives up", error))
    return tiny(str(folder / "short.py"))


def test_a_run_without_memory_begins_anew_with_fewer_beside_it(tmp_path: Path) -> None:
    said: list[str] = []
    found = run([failing(tmp_path, "CUDA out of memory"), tiny("fedavg")], say=said.append)
    assert "out of memory" in found[0].error and not found[0].complete
    assert found[1].complete and not found[1].error
    assert [line for line in said if "out of memory" in line] and [line for line in said if "1 at once" in line]


def test_a_run_without_memory_leaves_its_error_if_it_does_not_begin_anew(tmp_path: Path) -> None:
    """The other one is far beyond what it ever gets to."""
    said, found = list[str](), dict[int, Outcome]()

    def interrupt() -> None:
        if any("out of memory" in line for line in said):
            raise KeyboardInterrupt

    cells = [failing(tmp_path, "CUDA out of memory"), tiny("fedavg", until=1e7)]
    jobs = [(i, cell.config) for i, cell in enumerate(cells)]
    with pytest.raises(KeyboardInterrupt):
        Processes(jobs, found.__setitem__, Clock(), 2, Told(5000.0, interrupt), said.append).run()
    assert "out of memory" in found[0].error
    assert found[1].rows and not found[1].complete and not found[1].error


@pytest.mark.parametrize("count", [1, 2])
def test_after_an_error_of_the_gpu_another_process_does_the_rest(tmp_path: Path, count: int) -> None:
    found = run([failing(tmp_path, "CUDA error: an illegal access"), tiny("fedavg"), tiny("fedbuff")], count)
    assert "illegal access" in found[0].error
    assert all(found[i].complete and not found[i].error for i in (1, 2))


@pytest.mark.parametrize(
    "error",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
        "RuntimeError: DefaultCPUAllocator: can't allocate memory",
        "MemoryError: ",
    ],
)
def test_words_for_too_little_memory(error: str) -> None:
    assert too_little_memory(error)
    assert not too_little_memory("ValueError: this method gives up")


def test_a_second_interrupt_ends_what_the_first_waits_for() -> None:
    """In a process of its own, since it is about signals; nothing hangs."""
    code = (
        "import os, signal, threading;"
        "from aedfl.reproduce.pool import Clock; from aedfl.reproduce.processes import Processes;"
        "from reproduce.fakes import Told, tiny;"
        "send = lambda: os.kill(os.getpid(), signal.SIGINT);"
        "tell = lambda: (threading.Timer(0.3, send).start(), send());"
        "jobs = [(0, tiny('fedavg', until=1e7).config), (1, tiny('fedbuff', until=1e7).config)];"
        "Processes(jobs, print, Clock(), 2, Told(20.0, tell)).run()"
    )
    ended = in_a_process(code)
    assert "KeyboardInterrupt" in ended.stderr and "Ctrl-C again" in ended.stdout


def test_who_ends_the_group_of_processes_ends_no_run_before_its_batch() -> None:
    code = (
        "import os, signal; from multiprocessing import active_children;"
        "from aedfl.cli.outcome import stoppable; from aedfl.reproduce.pool import Clock;"
        "from aedfl.reproduce.processes import Processes; from reproduce.fakes import Told, tiny;"
        "settled = lambda: all(os.getpgid(child.pid) == child.pid for child in active_children());"
        "tell = lambda: settled() and os.killpg(os.getpgrp(), signal.SIGTERM);"
        "save = lambda tag, outcome: print('kept', tag, bool(outcome.rows), outcome.error);"
        "jobs = [(0, tiny('fedavg', until=1e7).config), (1, tiny('fedbuff', until=1e7).config)];"
        "stop = stoppable(); stop.__enter__();"
        "Processes(jobs, save, Clock(), 2, Told(20.0, tell)).run()"
    )
    ended = in_a_process(code)
    assert "KeyboardInterrupt" in ended.stderr and "died" not in ended.stdout
    assert re.search(r"kept [01] True \n", ended.stdout)


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    """In a group of its own, since it is about signals."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    options: dict[str, Any] = {"env": env, "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run([sys.executable, "-c", code], start_new_session=True, **options)


def test_a_mistake_of_a_persons_is_theirs_to_know(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("METHOD = 3\n")
    with pytest.raises(UserError, match="broken.py"):
        run([tiny(str(tmp_path / "broken.py"))])


def test_without_time_nothing_begins() -> None:
    assert run([tiny("fedavg")], clock=Clock(0.0)) == {}


def test_who_is_interrupted_leaves_what_there_is() -> None:
    """Ctrl-C comes to the parent; the others stop after the batch that they are at."""
    found: dict[int, Outcome] = {}

    def interrupt() -> None:
        raise KeyboardInterrupt

    jobs = [(i, tiny(method, until=1e6).config) for i, method in enumerate(("fedavg", "fedbuff"))]
    with pytest.raises(KeyboardInterrupt):
        Processes(jobs, found.__setitem__, Clock(), 2, Told(60.0, interrupt)).run()
    assert found and all(one.rows and not one.complete and not one.error for one in found.values())


def test_what_was_cut_goes_on_another_time(tmp_path: Path) -> None:
    changes = "record.checkpoint_seconds=0.01", "record.checkpoint_share=1"
    cells, whole = [tiny("fedavg", until=6000.0, changes=changes)], alone(tiny("fedavg", until=6000.0).config)
    found: dict[int, Outcome] = {}

    def interrupt() -> None:
        raise KeyboardInterrupt

    jobs = [(i, cell.config) for i, cell in enumerate(cells)]
    with pytest.raises(KeyboardInterrupt):
        Processes(jobs, found.__setitem__, Clock(), 1, Told(20.0, interrupt), checkpoints=tmp_path).run()
    assert not found[0].complete and 1 < len(found[0].rows) < len(whole)
    assert found[0].rows == whole[: len(found[0].rows)]
    assert list(tmp_path.rglob("*.safetensors"))
    assert run(cells, checkpoints=tmp_path)[0].rows == whole


def test_a_limit_holds_from_when_it_was_set() -> None:
    """Starting processes counts; what has begun leaves what it has."""
    began = time.monotonic()
    found = run([tiny(method, until=1e7) for method in ("fedavg", "fedbuff")], clock=Clock(0.2))
    assert time.monotonic() - began < 60
    assert all(one.rows and not one.complete for one in found.values())


def voice(times: list[float], at: int, count: int, left: float = 100.0, on_gpu: bool = True) -> Voice:
    board = Board(len(times))
    board.far[:] = times
    return Voice(Desk(board, count, on_gpu, time.monotonic() + left), at, total=100.0)


def ahead(times: list[float], at: int, count: int) -> bool:
    return voice(times, at, count).far_ahead(times[at])


def test_on_a_gpu_with_little_time_a_run_waits_for_those_far_behind() -> None:
    slack = 100.0 * LEAD
    assert ahead([50.0, 50.0 - slack - 1], 0, 2)
    assert not ahead([50.0, 50.0 - slack], 0, 2), "not far enough"
    assert not ahead([50.0, 10.0], 1, 2), "it is behind"
    assert not ahead([50.0, ENDED], 0, 2), "the other has ended"
    assert not ahead([50.0, 10.0, NOT_BEGUN], 0, 2), "its process is wanted for the next"


@pytest.mark.parametrize("times", [[10.0, 20.0, 30.0, 40.0], [40.0, 40.0, 40.0, 40.0], [5.0, 90.0, 90.0, 90.0]])
def test_half_of_the_processes_never_wait(times: list[float]) -> None:
    assert sum(ahead(times, at, 4) for at in range(4)) <= 2


def test_waiting_ends_with_the_time_and_does_not_count_as_work() -> None:
    one = voice([50.0, 10.0], 0, 2, left=0.5)
    bell = Bell(one.desk, one)
    one.advance(50.0, None, 1, 1.0)
    assert one.waited > 0 and bell.left <= 0.0
    before, one.waited = bell.elapsed, one.waited + 100.0
    assert bell.elapsed < before - 99.0
    for other in (voice([50.0, 10.0], 0, 2, on_gpu=False), voice([50.0, 10.0], 1, 2)):
        other.advance(other.desk.board.far[other.at], 0.5, 1, 1.0)
        assert other.waited == 0.0


def test_a_process_stops_when_all_are_to_stop() -> None:
    desk = Desk(Board(1), 1, False, None)
    assert math.isinf(desk.left)
    desk.board.stopped.value = 1
    assert desk.left == 0.0


def test_processes_go_when_their_parent_is_killed() -> None:
    """Nobody is there to tell them to stop."""
    code = (
        "from aedfl.reproduce.pool import Clock; from aedfl.reproduce.processes import Processes;"
        "from reproduce.fakes import tiny;"
        "from reproduce.test_processes import Told;"
        "import multiprocessing as mp, os, sys;"
        "tell = lambda: (print(*[child.pid for child in mp.active_children()], flush=True), os.kill(os.getpid(), 9));"
        "Processes([(0, tiny('fedavg', until=1e7).config)], print, Clock(), 1, Told(20.0, tell)).run()"
    )
    ended = in_a_process(code)
    pids = [int(word) for word in ended.stdout.split()]
    assert pids, ended.stderr
    limit = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
