"""Runs: from a config to a folder with a record, a summary and a report; resumable at any moment."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from .. import __version__
from ..context import SERVER
from ..errors import UserError
from ..sim.context import SimContext
from ..transfer import Later
from . import checkpoint
from .config import RunConfig, config_hash, elsewhere, from_toml, to_toml
from .folder import CONFIG, beginning, ended, entries, held, read_summary, set_aside, strangers
from .measure import Measure, Moment
from .progress import Progress, Silent
from .record import STREAMS, Record, read_rows
from .summary import summarise
from .workshop import Rows, Workshop

if TYPE_CHECKING:
    from ..report.trackers import Trackers

Summary = dict[str, Any]

TURN = 2e-4
"""Seconds after which another thread may go on."""


class Taken(NamedTuple):
    """A moment to be measured when the queue is through with that flush, and the rows of the record before it."""

    moment: Moment
    flush: int
    rows: int


class Run:
    """One simulation with its measurements, record and checkpoints."""

    def __init__(self, config: RunConfig, workshop: Workshop, folder: Path | None, progress: Progress) -> None:
        self.config, self.folder, self.progress = config, folder, progress
        self.fingerprint = config_hash(config)
        bench = workshop.bench(config)
        self.rows = Rows.of(config, bench.task.dataset)
        self.sim = workshop.simulation(config, self.rows, self._observe)
        self.measure = Measure(config, self.sim, bench.evaluator, self.rows)
        self.task = bench.task
        self.workshop = workshop
        self.summary: Summary = {}
        self._evaluations = 0
        self._taken: deque[Taken] = deque()
        self._under_way: Later[dict[str, Any]] | None = None
        self._began = time.monotonic()
        self._saved = self._began
        self._saving = 0.0
        self._wall = 0.0
        self._resume_at: tuple[checkpoint.Position, Path] | None = None
        if folder is not None:
            self._resume_at = checkpoint.latest(folder, self.fingerprint)
        self.trackers = _trackers(config, folder)
        self._prepare()

    def _prepare(self) -> None:
        """Opens the record; after a kill, cuts it back to the last checkpoint and sets up the replay."""
        position = self._resume_at[0] if self._resume_at else None
        if position is not None and self.folder is not None:
            answers = read_rows(self.folder / "journal.jsonl", position.offsets["journal"])
            self.sim.journal.answers = iter(answers)
        self.record = Record(self.folder, position.offsets if position else None)
        if position is not None:
            self.sim.work.replaying = self.record.replaying = True
            self._wall = position.wall
        self.sim.journal.record = lambda answer: self.record.add("journal", answer)

    def _observe(self, context: SimContext, since: float, metrics: dict[str, Any]) -> None:
        self.measure.staleness(metrics.get("merged", ()))
        if self.config.record.updates and context.index != SERVER:
            row = {"time": context.now, "start": since, "device": context.index, "update": context.update}
            self.record.add("updates", {**row, "samples": context.samples, **metrics})

    def drive(self) -> Iterator[None]:
        """Runs to the end; yields whenever the queue has to be flushed before it can go on."""
        stop, every = self.config.stop, self.config.evaluation.every
        limit = float("inf") if stop.virtual_seconds is None else stop.virtual_seconds
        self.progress.start(f"{self.config.method} seed {self.config.seed}{self.workshop.place}", limit)
        while True:
            due = min(limit, self._evaluations * every)
            while not self.sim.advance(due):
                yield
                self._evaluate_computed()
            ended, saving = self.sim.done or due >= limit, self._saving_due()
            if ended:
                self.sim.end()
            if not self._skip():
                self._taken.append(Taken(self.measure.take(), self.workshop.queue.flushes + 1, self.record.added))
                while self._taken and (ended or saving or self._decisive):
                    yield
                    self._evaluate_computed()
                ended = ended or self.sim.stopped
            self._evaluations += 1
            if ended:
                break
            if saving:
                self._checkpoint()
        self._finish_evaluation()
        self.progress.finish()

    def _skip(self) -> bool:
        """While replaying, evaluations before the checkpoint were done already; at it, the tensors come back."""
        if self._resume_at is None:
            return False
        position, path = self._resume_at
        if self._evaluations + 1 < position.evaluations:
            self.measure.forget()
            return True
        if self.sim.work.asked != position.values:
            raise UserError(f"checkpoint {path} was made by another version of the method; use --force to begin anew")
        self.sim.work.restore(checkpoint.tensors(path, str(self.task.device)))
        self.record.replaying, self._resume_at = False, None
        self.measure.forget()
        return True

    @property
    def _decisive(self) -> bool:
        """Whether the simulation waits for an evaluation: it may be the last one, or there is nothing to gain."""
        stop = self.config.stop
        return not self.workshop.queue.ahead or stop.stop_at_target or stop.consensus is not None

    def _evaluate_computed(self) -> None:
        """Evaluates the moments whose models have been computed by now."""
        while self._taken and self._taken[0].flush <= self.workshop.queue.finished:
            self._evaluate()

    def _evaluate(self) -> None:
        """Begins one row of metrics, then finishes the one before.

        An accelerator has the new one's work to do meanwhile. Where the row is there at once, or decides whether the
        run goes on, it is finished too.
        """
        taken = self._taken.popleft()
        row = self.measure.begin(taken.moment)
        self.record.begin(taken.rows, ("metrics", row))
        self._finish_evaluation()
        self._under_way = row
        if row.ready or self.config.stop.stop_at_target or self.config.stop.consensus is not None:
            self._finish_evaluation()

    def _finish_evaluation(self) -> None:
        """Shows the row that is under way, if there is one, and heeds it."""
        if self._under_way is None:
            return
        row, self._under_way = self._under_way.get(), None
        if self.trackers is not None:
            self.trackers.log(row)
        elapsed = max(1e-9, time.monotonic() - self._began)
        self.progress.advance(row["time"], row["accuracy"], row["updates"], row["updates"] / elapsed)
        stop = self.config.stop
        reached = stop.stop_at_target and row["accuracy"] >= (stop.target_accuracy or float("inf"))
        agreed = stop.consensus is not None and row["updates"] > 0 and row["consensus"] <= stop.consensus
        self.sim.stopped = bool(reached or agreed)

    def _saving_due(self) -> bool:
        """Whether the next evaluation is followed by a checkpoint."""
        record, waited = self.config.record, time.monotonic() - self._saved
        due = waited >= max(record.checkpoint_seconds, self._saving * (1 / record.checkpoint_share - 1))
        return self.folder is not None and due and not self.record.replaying

    def _checkpoint(self) -> None:
        assert self.folder is not None
        self._finish_evaluation()
        began = time.monotonic()
        offsets = self.record.settle()
        asked = self.sim.work.asked
        position = checkpoint.Position(self._evaluations, offsets, self.wall(), self.fingerprint, asked)
        checkpoint.write(self.folder, position, self.sim.work, self.config.record.keep_checkpoints)
        self._saved = time.monotonic()
        self._saving = self._saved - began

    def wall(self) -> float:
        return self._wall + time.monotonic() - self._began

    def finish(self) -> None:
        """Writes what is derived from the record, and closes it."""
        self.record.settle()
        self.summary = summarise(self.config, self.record.read("metrics"), self.task.metric_name, self.wall())
        if self.folder is not None:
            self._write(self.folder)
        if self.trackers is not None:
            self.trackers.close()
        self.record.close()

    def final_model(self) -> nn.Module:
        """A copy of the module with the mean (or the server's) weights."""
        return self.task.module_with(self.measure.global_vector())

    def _write(self, folder: Path) -> None:
        network, pool = self.sim.network, self.workshop.pool
        edges = [[source, target, *counts] for (source, target), counts in sorted(network.edges.items())]
        _dump(folder / "traffic.json", {"edges": edges, "sent": network.sent, "lost": network.lost})
        _dump(
            folder / "wall.json",
            {
                "wall_seconds": self.wall(),
                "device": str(self.task.device),
                "batches": _batch_sizes(self.sim.work.queue.batches),
                "version": __version__,
                **({} if pool is None else {"actors": len(pool.actors), "actors_replaced": pool.replaced}),
            },
        )
        weights = self.final_model().state_dict()
        weights = {name: part.clone().contiguous() for name, part in weights.items()}
        checkpoint.save(weights, folder / "model.safetensors")
        _dump(folder / "summary.json", self.summary)
        shutil.rmtree(checkpoint.folder(folder), ignore_errors=True)


def _trackers(config: RunConfig, folder: Path | None) -> Trackers | None:
    if folder is None or not config.record.trackers:
        return None
    from ..report.trackers import make_trackers

    return make_trackers(config.record.trackers, folder, config.model_dump())


def _batch_sizes(batches: list[int]) -> dict[str, float]:
    return {
        "count": len(batches),
        "mean": sum(batches) / max(1, len(batches)),
        "largest": max(batches, default=0),
    }


def _dump(path: Path, content: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def behind(runs: Sequence[Run], earlier: Sequence[Run] = ()) -> list[bool]:
    """Which runs may go on: none gets far ahead of the others or of earlier ones, so that batches stay large."""
    slowest = min((run.sim.env.now for run in (*runs, *earlier)), default=0.0)
    return [run.sim.env.now <= slowest + run.config.evaluation.every for run in runs]


@contextmanager
def undisturbed() -> Iterator[None]:
    """The garbage collector leaves alone what is there already (PyTorch, data, fleets), instead of walking it often.

    And threads take turns often: that of the queue must not wait long before it asks a GPU for the next step.
    """
    interval = sys.getswitchinterval()
    gc.freeze()
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()


def drive_all(runs: Sequence[Run], workshop: Workshop) -> None:
    """Advances runs in turn until each one waits for results, then computes all queued work as one batch."""
    driving = [(run, run.drive()) for run in runs]
    with undisturbed():
        while driving:
            turn = behind([run for run, _ in driving])
            driving = [
                (run, steps)
                for (run, steps), goes in zip(driving, turn, strict=True)
                if not goes or next(steps, run) is not run
            ]
            workshop.queue.flush()
        workshop.queue.wait()
    for run in runs:
        run.finish()


def run(
    config: RunConfig,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    workshop: Workshop | None = None,
) -> Summary:
    """Runs a config. With `out`, into that folder, which must be new or empty unless `force` is given.

    What `force` replaces goes only once the run can begin.
    """
    with nullcontext(workshop) if workshop else Workshop() as shop, held(out):
        if out is not None:
            claim(out, config, force)
        return _begun(config, out, progress or Silent(), shop).summary


def resume(
    path: Path, progress: Progress | None = None, workshop: Workshop | None = None, ray: str | None = None
) -> Summary:
    """Goes on with a run that was interrupted; the finished record is that of an uninterrupted run.

    With `ray`, on that cluster (or with 'none' on no cluster), wherever it ran before.
    """
    file = path / CONFIG
    with held(path if path.is_dir() and not ended(path) else None):
        if not file.is_file():
            raise UserError(f"{path} is not a run folder: {file} does not exist")
        if ended(path):
            return _told(path)
        config = from_toml(file.read_text(), str(file))
        if ray is not None:
            config = elsewhere(config, ray)
        with nullcontext(workshop) if workshop else Workshop() as shop:
            return _driven(Run(config, shop, path, progress or Silent()), shop).summary


def complete(config: RunConfig, out: Path | None, progress: Progress, workshop: Workshop) -> Run:
    """Runs a config to its end, into the folder `out` if there is one, which was claimed for it."""
    with held(out):
        return _begun(config, out, progress, workshop)


def _begun(config: RunConfig, out: Path | None, progress: Progress, workshop: Workshop) -> Run:
    with beginning(out):
        one = Run(config, workshop, out, progress)
    return _driven(one, workshop)


def _driven(one: Run, workshop: Workshop) -> Run:
    drive_all([one], workshop)
    if one.folder is not None:
        _report([one.folder], one.folder / "report.html")
    return one


def claim(out: Path, config: RunConfig, force: bool) -> None:
    """Makes the run folder and puts the config into it. With `force`, a run that is there is set aside."""
    if out.exists() and entries(out):
        if not force:
            raise UserError(f"run folder {out} exists; use --resume to go on with it, or --force to replace it")
        _replaceable(out)
        set_aside(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).write_text(to_toml(config))


def _replaceable(out: Path) -> None:
    """What `force` may replace is a run, with nothing else beside it."""
    file, names = out / CONFIG, strangers(out)
    if not file.is_file():
        raise UserError(f"{out} is not a run folder (it has no {CONFIG}), so --force will not replace it")
    if names:
        raise UserError(f"{out} holds '{names[0]}', which no run writes, so --force will not replace it")
    if all((out / f"{stream}.jsonl").is_file() for stream in STREAMS):
        return
    try:
        from_toml(file.read_text(), str(file))
    except (UserError, UnicodeDecodeError):
        raise UserError(f"{out} is not a run folder ({file} is no run's), so --force will not replace it") from None


def _told(folder: Path) -> Summary:
    """The summary of a run that ended; its report is made if it is missing."""
    summary = read_summary(folder)
    if not (folder / "report.html").exists():
        _report([folder], folder / "report.html")
    return summary


def _report(folders: list[Path], out: Path) -> None:
    from ..report import write_report

    write_report(folders, out)
