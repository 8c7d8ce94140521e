"""Runs many configs in processes of their own, side by side; the parent alone keeps their outcomes.

On a CPU each process has its share of the cores; on a GPU processes keep it busy where one is held up by Python.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ..experiment.config import RunConfig
from ..experiment.progress import Progress, Silent, Together
from .pool import Clock, Outcome, Pool

Tag = TypeVar("Tag")

MPS = "/tmp/nvidia-mps"
"""Where CUDA's service for several processes listens unless it is told otherwise."""
LEAD = 0.04
"""Share of its length by which a run may be ahead of the last one when time is short."""
EVERY = 0.2
"""Seconds between two looks at how far the runs are."""
WAITING, ENDED = -1.0, float("inf")
"""How far a run is that has not begun, and one that goes no further."""


class Board:
    """What processes tell each other: how far each run is, its updates, accuracy and speed, and whether to stop."""

    def __init__(self, runs: int) -> None:
        context = get_context("spawn")
        self.times = context.Array("d", [WAITING] * runs)
        self.figures = context.Array("d", 3 * runs)
        self.stop = context.Event()

    def write(self, at: int, time: float, updates: int, accuracy: float | None, speed: float) -> None:
        self.times[at] = time
        self.figures[3 * at : 3 * at + 3] = [float(updates), WAITING if accuracy is None else accuracy, speed]

    def tell(self, at: int, voice: Progress) -> None:
        now, (updates, accuracy, speed) = self.times[at], self.figures[3 * at : 3 * at + 3]
        if 0 <= now < ENDED:
            voice.advance(now, None if accuracy == WAITING else accuracy, int(updates), speed)


@dataclass
class Processes(Generic[Tag]):
    """Runs `jobs` as `Pool` does, at most `count` at once; tells `save` about each one that ended, in whatever way."""

    jobs: Sequence[tuple[Tag, RunConfig]]
    save: Callable[[Tag, Outcome], None]
    clock: Clock
    count: int
    progress: Progress = field(default_factory=Silent)
    say: Callable[[str], None] = print
    checkpoints: Path | None = None

    def run(self) -> None:
        left = dict(enumerate(self.jobs))
        voices = self._voices(Together(self.progress, len(self.jobs)))
        count = min(self.count, len(left))
        if torch.cuda.is_available() and not Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS)).exists():
            self.say("  processes take turns on the GPU; started before, nvidia-cuda-mps-control -d lets them share it")
        while left and self.clock.left > 0:
            try:
                self._sitting(left, count, voices)
            except BrokenProcessPool:
                if count == 1:
                    number, (tag, _) = next(iter(left.items()))
                    del left[number]
                    self.save(tag, Outcome([], False, error="its process died; there may be too little memory"))
                else:
                    count = max(1, count // 2)
                    self.say(f"  a process died, perhaps of too little memory; the rest goes on, {count} at once")
            else:
                break
        self.progress.finish()

    def _voices(self, together: Together) -> list[Progress]:
        voices = [together.one() for _ in self.jobs]
        for voice, (_, config) in zip(voices, self.jobs, strict=True):
            voice.start("", config.stop.virtual_seconds)
        return voices

    def _sitting(self, left: dict[int, tuple[Tag, RunConfig]], count: int, voices: list[Progress]) -> None:
        """Runs what is left; what has ended is left no more, also when a process dies in the middle."""
        context, runs = get_context("spawn"), list(left.items())
        board, places = Board(len(runs)), context.SimpleQueue()
        for place in range(count):
            places.put(place)
        limit = None if self.clock.left == float("inf") else self.clock.left
        with ProcessPoolExecutor(count, context, _settle, (places, count, board, limit)) as executor:
            waiting = {
                executor.submit(_work, at, config, self.checkpoints): number
                for at, (number, (_, config)) in enumerate(runs)
            }
            try:
                while waiting:
                    self._gather(waiting, left, 2 * EVERY)
                    for at, (number, _) in enumerate(runs):
                        board.tell(at, voices[number])
            except BaseException:
                board.stop.set()
                executor.shutdown(wait=True, cancel_futures=True)
                self._gather({future: number for future, number in waiting.items() if _went_well(future)}, left, 0.0)
                raise

    def _gather(
        self, waiting: dict[Future[list[Outcome]], int], left: dict[int, tuple[Tag, RunConfig]], seconds: float
    ) -> None:
        """Saves what has ended within these seconds; it is not waited for any more."""
        done, _ = wait(waiting, seconds, FIRST_COMPLETED)
        for future in done:
            outcomes = future.result()
            tag, _ = left.pop(waiting.pop(future))
            for outcome in outcomes:
                self.save(tag, outcome)


def _went_well(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


@dataclass
class _Voice:
    """Writes on the board where this process' run is; where time is short, a run that is far ahead waits here."""

    board: Board
    at: int
    count: int
    hurry: bool
    total: float = 0.0

    def start(self, label: str, total_virtual: float | None) -> None:
        self.total = total_virtual or 0.0
        self.board.write(self.at, 0.0, 0, None, 0.0)

    def advance(self, virtual_time: float, accuracy: float | None, updates: int, updates_per_second: float) -> None:
        self.board.write(self.at, virtual_time, updates, accuracy, updates_per_second)
        while self.hurry and not self.board.stop.is_set() and self._far_ahead(virtual_time):
            time.sleep(EVERY)

    def _far_ahead(self, now: float) -> bool:
        """Whether half of the processes run what began before it, or with it, and is behind; those never wait."""
        earlier = self.board.times[: max(self.count, self.at)]
        behind = [other for other in earlier if WAITING < other < now - LEAD * self.total]
        return 2 * len(behind) >= self.count

    def finish(self) -> None:
        self.board.times[self.at] = ENDED


class _Bell(Clock):
    """Is up when the time is, or when everybody is to stop."""

    def __init__(self, board: Board, until: float | None) -> None:
        super().__init__()
        self._board, self._until = board, until

    @property
    def left(self) -> float:
        if self._board.stop.is_set():
            return 0.0
        return float("inf") if self._until is None else self._until - time.monotonic()


@dataclass
class _Desk:
    """What a process knows of the others."""

    board: Board
    count: int
    until: float | None


_DESKS: list[_Desk] = []


def _settle(places: Any, count: int, board: Board, limit: float | None) -> None:
    """A process begins: the parent alone is interrupted, and each has cores of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = places.get()
    if hasattr(os, "sched_setaffinity") and not torch.cuda.is_available():
        cores = sorted(os.sched_getaffinity(0))
        if count <= len(cores):
            os.sched_setaffinity(0, cores[place::count])
            torch.set_num_threads(len(cores[place::count]))
    _DESKS.append(_Desk(board, count, None if limit is None else time.monotonic() + limit))


def _work(at: int, config: RunConfig, checkpoints: Path | None) -> list[Outcome]:
    """One run in this process: its outcome, or none if there was no time to begin."""
    desk, outcomes = _DESKS[-1], list[Outcome]()
    voice = _Voice(desk.board, at, desk.count, desk.until is not None)

    def keep(_: int, outcome: Outcome) -> None:
        outcomes.append(outcome)

    pool = Pool([(at, config)], keep, _Bell(desk.board, desk.until), 1, voice)
    pool.checkpoints = checkpoints
    try:
        pool.run()
    finally:
        voice.finish()
    return outcomes
