"""Runs many configs in processes of their own, side by side; the parent alone keeps their outcomes.

On a CPU each process has its share of the cores; on a GPU processes keep it busy where one is held up by Python.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ..experiment.config import RunConfig
from ..experiment.progress import Progress, Silent, Together
from .pool import Clock, Outcome, Pool

Tag = TypeVar("Tag")
Waiting = dict[Future[list[Outcome] | None], int]
"""What has been given to the processes, and the number of the job."""
Handler = Callable[[int, Any], Any] | signal.Handlers

MPS = "/tmp/nvidia-mps"
"""Where CUDA's service for several processes listens unless it is told otherwise."""
LEAD = 0.04
"""Share of its length by which a run may be ahead of others on the same GPU when time is short."""
EVERY = 0.2
"""Seconds between two looks at how far the runs are."""
NOT_BEGUN, ENDED = -1.0, float("inf")
"""How far a run is that has not begun, and one that goes no further."""
UNKNOWN = -1.0
"""Stands for an accuracy that is not measured yet."""
TOO_LITTLE = ("out of memory", "outofmemory", "alloc_failed", "memoryerror", "allocate memory")
"""Words for too little memory, of PyTorch and of the libraries that it calls."""


class Board:
    """What processes tell each other: how far each run is, and whether to stop. There are no locks, which one that dies
    might hold for ever: a place has one who writes to it, and a number is written whole."""

    def __init__(self, runs: int) -> None:
        context = get_context("spawn")
        self.far = context.RawArray("d", [NOT_BEGUN] * runs)
        self.figures = context.RawArray("d", [0.0, 0.0, UNKNOWN, 0.0] * runs)
        """Of each run: virtual time, updates, accuracy, updates per second."""
        self.stopped = context.RawValue("b", 0)

    def write(self, at: int, time: float, updates: int, accuracy: float | None, speed: float) -> None:
        self.far[at] = time
        self.figures[4 * at : 4 * at + 4] = [time, float(updates), UNKNOWN if accuracy is None else accuracy, speed]

    def tell(self, at: int, voice: Progress) -> None:
        if self.far[at] != NOT_BEGUN:
            now, updates, accuracy, speed = self.figures[4 * at : 4 * at + 4]
            goes_on = self.far[at] != ENDED
            voice.advance(now, None if accuracy == UNKNOWN else accuracy, int(updates), speed if goes_on else 0.0)


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
    _short: dict[int, list[Outcome]] = field(default_factory=dict, init=False)
    """What runs left that had too little memory and are to begin anew."""

    def run(self) -> None:
        left = dict(enumerate(self.jobs))
        if self._on_gpu and not Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS)).exists():
            self.say("  processes take turns on the GPU; started before, nvidia-cuda-mps-control -d lets them share it")
        try:
            self._sittings(left, self._voices())
        finally:
            for number, outcomes in self._short.items():
                self._save(number, outcomes)
            self.progress.finish()

    def _sittings(self, left: dict[int, tuple[Tag, RunConfig]], voices: list[Progress]) -> None:
        count = most = min(self.count, len(left))
        while left and self.clock.left > 0:
            died = False
            try:
                self._sitting(left, count, voices)
            except BrokenProcessPool:
                died = True
                self.say("  a process died, perhaps of too little memory")
            if not left or self.clock.left <= 0:
                break
            if count > 1 and (died or self._short):
                count = max(1, min(count // 2, len(left)))
                self.say(f"  {len(left)} runs begin anew, {count} at once")
            elif died:
                number, _ = next(iter(left.items()))
                del left[number]
                self._save(number, [Outcome([], False, error="its process died; there may be too little memory")])
                count = min(most, len(left))

    def _save(self, number: int, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self.save(self.jobs[number][0], outcome)

    @property
    def _on_gpu(self) -> bool:
        return torch.cuda.is_available() and any(config.engine.device != "cpu" for _, config in self.jobs)

    def _voices(self) -> list[Progress]:
        together = Together(self.progress, len(self.jobs))
        voices = [together.one() for _ in self.jobs]
        for voice, (_, config) in zip(voices, self.jobs, strict=True):
            voice.start("", config.stop.virtual_seconds)
        return voices

    def _sitting(self, left: dict[int, tuple[Tag, RunConfig]], count: int, voices: list[Progress]) -> None:
        """Runs what is left; what has ended is left no more, also when a process dies in the middle. What a GPU had no
        memory for stays."""
        context, runs = get_context("spawn"), list(left.items())
        board, places = Board(len(runs)), context.SimpleQueue()
        for place in range(count):
            places.put(place)
        desk = Desk(board, count, self._on_gpu, _deadline(self.clock))
        executor, waiting = ProcessPoolExecutor(count, context, _settle, (places, desk)), Waiting()
        self._short.clear()
        try:
            # What processes inherit: a terminal tells them all, and the parent decides.
            with _handled(signal.SIG_IGN, signal.SIGINT):
                for at, (number, (_, config)) in enumerate(runs):
                    waiting[executor.submit(_work, at, config, self.checkpoints)] = number
            while waiting:
                self._gather(waiting, left, count, 2 * EVERY)
                for at, (number, _) in enumerate(runs):
                    board.tell(at, voices[number])
        except KeyboardInterrupt:
            self.say("  stopping after the batches that are under way; Ctrl-C again ends them at once")
            raise
        finally:
            board.stopped.value = 1
            with _handled(_kill, signal.SIGINT, signal.SIGTERM):
                executor.shutdown(wait=True, cancel_futures=True)
                self._gather({one: number for one, number in waiting.items() if _went_well(one)}, left, count, 0.0)

    def _gather(self, waiting: Waiting, left: dict[int, tuple[Tag, RunConfig]], count: int, seconds: float) -> None:
        """Saves what has ended within these seconds; it is not waited for any more. What had too little memory beside
        others stays among what is left."""
        done, _ = wait(waiting, seconds, FIRST_COMPLETED)
        for future in done:
            number, outcomes = waiting[future], future.result()
            if outcomes is not None and count > 1 and any(too_little_memory(one.error) for one in outcomes):
                self.say(f"  {outcomes[-1].error[:100]}")
                self._short[number] = outcomes
            elif outcomes is not None:
                self._save(number, outcomes)
                del left[number]
            del waiting[future]


def too_little_memory(error: str) -> bool:
    return any(word in error.lower() for word in TOO_LITTLE)


def _deadline(clock: Clock) -> float | None:
    """The moment when time is up; all processes of a machine have the same clock."""
    return None if clock.left == float("inf") else time.monotonic() + clock.left


def _went_well(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


@contextmanager
def _handled(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Something else happens at these signals than that this program stops."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = dict[signal.Signals, Any]()
    try:
        for number in numbers:
            before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _kill(*_: object) -> None:
    for child in active_children():
        child.kill()


@dataclass
class Desk:
    """What a process knows of the others, and of itself."""

    board: Board
    count: int
    on_gpu: bool
    until: float | None
    begins: float = 0.0
    """Seconds that a run took to begin here; when less is left, no other one does."""
    spoilt: bool = False
    """After an error of the GPU, all that this process asks of it fails; another one does what is left."""

    @property
    def left(self) -> float:
        if self.board.stopped.value:
            return 0.0
        return float("inf") if self.until is None else self.until - time.monotonic()


_DESKS: list[Desk] = []


@dataclass
class Voice:
    """Writes on the board where this process' run is. Where processes share a GPU and time is short, a run that is far
    ahead waits here, so that those behind have more of it."""

    desk: Desk
    at: int
    total: float = 0.0
    waited: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def start(self, label: str, total_virtual: float | None) -> None:
        self.total = total_virtual or 0.0
        self.desk.board.write(self.at, 0.0, 0, None, 0.0)

    def advance(self, virtual_time: float, accuracy: float | None, updates: int, updates_per_second: float) -> None:
        if not self.desk.begins:
            self.desk.begins = time.monotonic() - self.began
        self.desk.board.write(self.at, virtual_time, updates, accuracy, updates_per_second)
        while self.desk.on_gpu and self.desk.until is not None and self.desk.left > 0 and self.far_ahead(virtual_time):
            began = time.monotonic()
            time.sleep(EVERY)
            self.waited += time.monotonic() - began

    def far_ahead(self, now: float) -> bool:
        """Whether as many as half of the processes are at work on runs that are behind; those never wait. Nor does
        anybody while there are runs that have no process yet."""
        others = self.desk.board.far[:]
        behind = [other for other in others if NOT_BEGUN < other < now - LEAD * self.total]
        return NOT_BEGUN not in others and 2 * len(behind) >= self.desk.count

    def finish(self) -> None:
        self.desk.board.far[self.at] = ENDED


class Bell(Clock):
    """Is up when the time is, or when everybody is to stop. That a run waited does not make its batches long."""

    def __init__(self, desk: Desk, voice: Voice) -> None:
        super().__init__()
        self._desk, self._voice = desk, voice

    @property
    def elapsed(self) -> float:
        return super().elapsed - self._voice.waited

    @property
    def left(self) -> float:
        return self._desk.left


def _settle(places: Any, desk: Desk) -> None:
    """A process begins: it has cores of its own, and goes when its parent is gone. A signal to the parent's group, as
    `timeout` and schedulers send it, is for the parent to act on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    place = places.get()
    if hasattr(os, "sched_setaffinity") and not desk.on_gpu:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[place :: desk.count] or [cores[place % len(cores)]])
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _DESKS.append(desk)


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work(at: int, config: RunConfig, checkpoints: Path | None) -> list[Outcome] | None:
    """One run in this process: its outcome, none if there was no time to begin; None if another process must do it."""
    desk, outcomes = _DESKS[-1], list[Outcome]()
    voice = Voice(desk, at)

    def keep(_: int, outcome: Outcome) -> None:
        outcomes.append(replace(outcome, wall=outcome.wall - voice.waited))

    pool = Pool([(at, config)], keep, Bell(desk, voice), 1, voice, checkpoints=checkpoints)
    try:
        if desk.spoilt:
            return None
        if desk.left > desk.begins:
            pool.run()
    finally:
        voice.finish()
    desk.spoilt = any("CUDA error" in outcome.error for outcome in outcomes)
    return outcomes
