"""Runs many configs in one process and one batch; each leaves its outcome the moment it ends.

As many as fit run at once, side by side in virtual time, and the next one starts when one has ended. When the
time is up, the unfinished ones leave what they have. One that fails leaves its error, and the others go on.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ..errors import UserError
from ..experiment.config import RunConfig, config_hash
from ..experiment.progress import Progress, Silent, Together
from ..experiment.run import Run, behind, undisturbed
from ..experiment.workshop import Workshop

Tag = TypeVar("Tag")


class Clock:
    """Wall time that may run out."""

    def __init__(self, minutes: float | None = None) -> None:
        self._began = time.monotonic()
        self._limit = float("inf") if minutes is None else 60 * minutes

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return self._limit - self.elapsed


@dataclass(frozen=True)
class Outcome:
    """How far a run came."""

    rows: list[dict[str, Any]]
    """One per evaluation."""
    complete: bool
    wall: float = 0.0
    device: str = ""
    metric: str = "accuracy"
    error: str = ""


@dataclass
class _Active(Generic[Tag]):
    tag: Tag
    config: RunConfig
    run: Run
    steps: Iterator[None]
    wave: int
    """Runs that begin together have the same number."""
    ended: bool = False

    def outcome(self, complete: bool, error: str = "") -> Outcome:
        task, rows = self.run.task, self.run.record.read("metrics")
        return Outcome(rows, complete, self.run.wall(), device_name(task.device), task.metric_name, error)


@dataclass
class Pool(Generic[Tag]):
    """Runs `jobs` (a tag and a config each); tells `save` about each one that ended, in whatever way."""

    jobs: Sequence[tuple[Tag, RunConfig]]
    save: Callable[[Tag, Outcome], None]
    clock: Clock = field(default_factory=Clock)
    at_once: int = 24
    progress: Progress = field(default_factory=Silent)
    say: Callable[[str], None] = print
    checkpoints: Path | None = None
    """Where run folders are kept, from which an unfinished run goes on another time."""
    _round: float = 0.0
    """Seconds that the last batch took; when less is left, no other one begins."""

    def run(self) -> None:
        waiting = deque(self.jobs)
        together = Together(self.progress, len(waiting))
        most = self.at_once
        while waiting and self.clock.left > self._round:
            left = self._sitting(waiting, together)
            waiting.extendleft(reversed(left))
            self.at_once = max(1, len(left) // 2) if left else most
        self.progress.finish()

    def _sitting(self, waiting: deque[tuple[Tag, RunConfig]], together: Together) -> list[tuple[Tag, RunConfig]]:
        """Runs until nothing waits, or the time is up; jobs of a batch that failed come back, to be tried in halves."""
        active: list[_Active[Tag]] = []
        try:
            with Workshop() as workshop, undisturbed():
                self._drive(active, waiting, workshop, together)
        except UserError:
            raise
        except Exception as error:
            return self._failed(active, error)
        finally:
            for one in active:
                self._cut(one)
            active.clear()
            free()
        return []

    def _drive(
        self,
        active: list[_Active[Tag]],
        waiting: deque[tuple[Tag, RunConfig]],
        workshop: Workshop,
        together: Together,
    ) -> None:
        wave = 0
        while (waiting or active) and self.clock.left > self._round:
            began = self.clock.elapsed
            wave += 1
            if waiting and len(active) < self.at_once:
                workshop.queue.wait()  # a run that is made may change settings and generators of the whole process
            while waiting and len(active) < self.at_once:
                active += self._start(*waiting.popleft(), wave, workshop, together)
            turn = _turns(active)
            active[:] = [one for one, goes in zip(active, turn, strict=True) if not goes or self._step(one)]
            active[:] = self._finished(active)
            workshop.queue.flush()
            self._round = self.clock.elapsed - began

    def _start(
        self, tag: Tag, config: RunConfig, wave: int, workshop: Workshop, together: Together
    ) -> list[_Active[Tag]]:
        """The run, or nothing if it could not even begin. A person's mistake concerns all, and is theirs to know."""
        try:
            run = Run(config, workshop, self._folder(config), together.one())
        except UserError:
            raise
        except Exception as error:
            self.save(tag, Outcome([], False, error=_words(error)))
            return []
        return [_Active(tag, config, run, run.drive(), wave)]

    def _folder(self, config: RunConfig) -> Path | None:
        if self.checkpoints is None:
            return None
        folder = self.checkpoints / config_hash(config)[:16]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _step(self, one: _Active[Tag]) -> bool:
        """Advances a run until it waits for results; false if it failed."""
        try:
            one.ended = next(one.steps, one) is one
        except Exception as error:
            self.save(one.tag, one.outcome(False, _words(error)))
            return False
        return True

    def _finished(self, active: list[_Active[Tag]]) -> list[_Active[Tag]]:
        for one in active:
            if one.ended:
                self.save(one.tag, one.outcome(complete=True))
                one.run.record.close()
                if one.run.folder is not None:
                    shutil.rmtree(one.run.folder)
        return [one for one in active if not one.ended]

    def _cut(self, one: _Active[Tag]) -> None:
        outcome = one.outcome(complete=False)
        if outcome.rows and outcome.rows[-1]["time"] > 0:
            self.save(one.tag, outcome)
        one.run.record.close()

    def _failed(self, active: list[_Active[Tag]], error: Exception) -> list[tuple[Tag, RunConfig]]:
        """A batch failed, and nobody knows whose fault it was: smaller batches will show."""
        if len(active) == 1:
            one = active.pop()
            self.save(one.tag, one.outcome(False, _words(error)))
            one.run.record.close()
        elif active:
            self.say(f"  a batch of {len(active)} runs failed ({_words(error)}); they begin anew, half as many at once")
        return [(one.tag, one.config) for one in active]


def _turns(active: Sequence[_Active[Tag]]) -> list[bool]:
    """Which runs go on: none gets far ahead of one that began before it or with it; later ones are not waited for."""
    earlier, turns = list[Run](), list[bool]()
    for _, wave in groupby(active, key=lambda one: one.wave):
        runs = [one.run for one in wave]
        turns += behind(runs, earlier)
        earlier += runs
    return turns


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free() -> None:
    """Gives memory back before the next batch begins."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
