"""What the parts of a simulation take, seen from outside: its ops, its evaluations, and how fast it was when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..experiment.measure import Measure, Moment
from ..experiment.run import Run
from ..graph import Job, Op, Queue
from ..training.batched import BatchedTrainer, padded
from ..training.grouped import GroupedTrainer, rows_at_work
from ..training.op import Train
from ..training.plan import Trainer, TrainJob, TrainResult, in_parts, steps
from ..transfer import Later

REST = "programs and clock"
EVALUATE = "Evaluate"


class Instant:
    """Now: on this thread's clock and, on a GPU, when it has done what was asked of it so far."""

    __slots__ = ("clock", "event")

    def __init__(self, gpu: bool) -> None:
        self.event: Any = None
        if gpu:
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record()
        self.clock = time.perf_counter()

    def python_since(self, earlier: Instant) -> float:
        return self.clock - earlier.clock

    def stream_since(self, earlier: Instant) -> float:
        """Seconds on the GPU's stream; it must have come so far. Without a GPU, those of the thread."""
        if self.event is None:
            return self.python_since(earlier)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


@dataclass
class Kind:
    """What ops of one kind took so far."""

    heavy: bool = False
    calls: int = 0
    jobs: int = 0
    seconds: float = 0.0
    aside: float = 0.0
    """Seconds of these that passed in another thread than the one that watches."""
    spans: list[tuple[Instant, Instant]] = field(default_factory=list)


class Ledger:
    """Time by kind of op. A profile also has the time on a GPU, and what training was asked to do."""

    def __init__(self, profile: bool = False, gpu: bool = False) -> None:
        self.kinds: dict[str, Kind] = {}
        self.trainings: list[tuple[Train, list[TrainJob]]] = []
        self.profile, self._gpu = profile, profile and gpu
        self._thread = threading.get_ident()

    @contextmanager
    def during(self, name: str, jobs: int, heavy: bool = False) -> Iterator[None]:
        begin = Instant(self._gpu)
        yield
        end = Instant(self._gpu)
        kind = self.kinds.setdefault(name, Kind(heavy))
        kind.calls += 1
        kind.jobs += jobs
        passed = end.python_since(begin)
        kind.seconds += passed
        kind.aside += passed if threading.get_ident() != self._thread else 0.0
        if self._gpu:
            kind.spans.append((begin, end))

    def breakdown(self, begin: Instant, end: Instant) -> dict[str, dict[str, Any]]:
        """Calls, jobs and seconds by kind, and what is left of the time between; a GPU must have come to the end."""
        found: dict[str, dict[str, Any]] = {}
        for name, kind in sorted(self.kinds.items(), key=lambda item: -item[1].seconds):
            stream = sum(last.stream_since(first) for first, last in kind.spans) if self._gpu else None
            found[name] = _line(kind.calls, kind.jobs, kind.seconds, stream)
        here = sum(kind.seconds - kind.aside for kind in self.kinds.values())
        on_gpu = sum(line["gpu_seconds"] or 0.0 for line in found.values())
        idle = max(0.0, end.stream_since(begin) - on_gpu) if self._gpu else None
        return found | {REST: _line(None, None, end.python_since(begin) - here, idle)}

    def training(self) -> dict[str, int]:
        """Model-steps and sample slots that were asked for and that were run, and the samples in them."""
        useful = run = slots = slots_run = samples = 0
        for op, jobs in self.trainings:
            size = op.plan.batch_size
            asked, ran = sum(lengths(jobs, size)), steps_run(op.trainer, size, jobs)
            useful, run = useful + asked, run + ran
            slots, slots_run = slots + asked * size, slots_run + ran * size
            samples += sum(len(job.samples) * job.epochs for job in jobs)
        return {
            "useful_steps": useful,
            "run_steps": run,
            "useful_samples": samples,
            "slots_of_useful_steps": slots,
            "slots_run": slots_run,
        }


def _line(calls: int | None, jobs: int | None, python: float, gpu: float | None) -> dict[str, Any]:
    return {"calls": calls, "jobs": jobs, "python_seconds": python, "gpu_seconds": gpu}


@dataclass(frozen=True)
class Timed(Op):
    """Another op, with its time in the ledger under its name."""

    op: Op
    ledger: Ledger = field(compare=False)

    @property
    def outputs(self) -> int:  # type: ignore[override]
        return self.op.outputs

    @property
    def heavy(self) -> bool:  # type: ignore[override]
        return self.op.heavy

    def at_once(self, left: int, rounds: int) -> int:
        return self.op.at_once(left, rounds)

    def length(self, job: Job) -> float:
        return self.op.length(job)

    def run(self, jobs: Sequence[Job]) -> Sequence[tuple[Tensor, ...]]:
        with self.ledger.during(type(self.op).__name__, len(jobs), self.op.heavy):
            results = self.op.run(jobs)
        if self.ledger.profile and isinstance(self.op, Train):
            self.ledger.trainings.append((self.op, [_without_models(job) for job in jobs]))
        return results


def watch(queue: Queue, profile: bool = False, gpu: bool = False) -> Ledger:
    """Time by kind of op, from now on."""
    ledger = Ledger(profile, gpu)
    before: Any = queue.route
    queue.route = lambda op: Timed(op if before is None else before(op), ledger)
    return ledger


NOTHING = torch.zeros(0)


def _without_models(job: Job) -> TrainJob:
    """What says how long the job is; its models would fill the memory."""
    _, _, _, samples, key, lr, epochs = job
    return TrainJob(NOTHING, samples, key, lr, epochs)


def lengths(jobs: Sequence[TrainJob], batch_size: int) -> list[int]:
    return [steps(len(job.samples), job.epochs, batch_size) for job in jobs]


def steps_run(trainer: Trainer, batch_size: int, jobs: list[TrainJob]) -> int:
    """Model-steps that the trainer runs for these jobs: padded rows, and those of models that are done, count too."""
    if not isinstance(trainer, GroupedTrainer | BatchedTrainer):
        return sum(lengths(jobs, batch_size))
    gpu, run = trainer.task.device.type == "cuda", list[int]()

    def counted(part: list[TrainJob]) -> list[TrainResult]:
        asked = lengths(part, batch_size)
        grouped = isinstance(trainer, GroupedTrainer)
        run.append(sum(rows_at_work(asked)) if grouped else padded(len(part), gpu) * max(asked))
        return [TrainResult(NOTHING, NOTHING, NOTHING, NOTHING)] * len(part)

    in_parts(counted, jobs, batch_size, trainer.limit)
    return sum(run)


@dataclass(frozen=True)
class Point:
    """How many jobs of training had been run when an evaluation of that virtual time began."""

    virtual: float
    jobs: int
    at: Instant


class Course:
    """Evaluations of runs that are driven together on one queue: how long each took this thread, and how far the queue
    was when the first run's began.
    """

    def __init__(self, runs: Sequence[Run], queue: Queue, gpu: bool, ledger: Ledger | None = None) -> None:
        self.queue, self.ledger = queue, ledger
        self.seconds: list[float] = []
        self.points: list[Point] = []
        self._gpu = gpu
        for number, run in enumerate(runs):
            run.measure = Watched(run, self, first=number == 0)

    def mark(self, virtual: float) -> Point:
        return Point(virtual, sum(self.queue.batches), Instant(self._gpu))

    @contextmanager
    def evaluating(self, models: int) -> Iterator[None]:
        begin = time.perf_counter()
        with nullcontext() if self.ledger is None else self.ledger.during(EVALUATE, models):
            yield
        self.seconds.append(time.perf_counter() - begin)

    @property
    def later_seconds(self) -> float | None:
        """Of an evaluation that is not the first."""
        return median(self.seconds[1:]) if len(self.seconds) > 1 else None

    def half(self, virtual_seconds: float) -> Point | None:
        """The evaluation nearest to half of the virtual time; None if there were none but the first and the last."""
        between = [point for point in self.points if 0 < point.virtual < virtual_seconds]
        return min(between, key=lambda point: abs(point.virtual - virtual_seconds / 2), default=None)


class Watched(Measure):
    """The measurements of a run, with its evaluations told to a course."""

    def __init__(self, run: Run, course: Course, first: bool) -> None:
        super().__init__(run.config, run.sim, run.measure.evaluator, run.rows)
        self._course, self._first = course, first

    def begin(self, moment: Moment) -> Later[dict[str, Any]]:
        if self._first:
            self._course.points.append(self._course.mark(moment.known["time"]))
        with self._course.evaluating(len(self.chosen) + 1):
            return super().begin(moment)
