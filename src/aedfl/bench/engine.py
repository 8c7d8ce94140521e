"""How fast models are trained: the bare training step, and a whole simulation around it.

Bare: local training of N models side by side, long enough that the time is that of the steps. End to end: a
simulation of AEDFL without pruning, with selection, merging, learning, evaluation and the record on disk. The ratio of
the two, at the batch size the simulation had, is what the rest of the simulator costs: for the whole simulation, what
happens once included, and for the second half of it, when that is over. A profile says where the time goes. Data are
random, of the shape and size of the real sets.
"""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from ..data import Dataset, Split
from ..data.text import LENGTH, VOCABULARY
from ..data.types import Normalisation
from ..errors import UserError
from ..experiment.config import load
from ..experiment.progress import Silent
from ..experiment.run import Run, drive_all
from ..experiment.sections import RunConfig
from ..experiment.workshop import Bench, Own, Workshop
from ..replay import CAPTURES
from ..training.plan import Plan, Trainer, TrainJob
from ..training.sequential import SequentialTrainer
from .stamp import stamp
from .table import Figures, Tell, optional, quiet, short
from .timing import Course, Instant, Point, watch

DEVICES = 100


@dataclass(frozen=True)
class Case:
    """Shape and size of the data that a model is measured on."""

    shape: tuple[int, ...]
    classes: int
    train: int
    test: int
    words: int | None = None


CASES = {
    "lenet5": Case((1, 28, 28), 26, 124_800, 20_800),
    "resnet8": Case((3, 32, 32), 10, 50_000, 10_000),
    "vgg9": Case((3, 32, 32), 10, 50_000, 10_000),
    "textcnn": Case((LENGTH,), 2, 25_000, 25_000, VOCABULARY + 2),
}
"""EMNIST letters, CIFAR-10 twice, IMDb."""


@dataclass(frozen=True)
class Options:
    """What is measured. Zero stands for a default that depends on the device."""

    device: str = "cpu"
    models: tuple[str, ...] = tuple(CASES)
    jobs: tuple[int, ...] = (1, 20, 100)
    bf16: bool = False
    trainer: str = "auto"
    samples: int = 0
    """Of each device of the fleet."""
    epochs: int = 4
    exchange: int = 0
    """Epochs after which the method exchanges models; 0: after a whole local update, as in the paper."""
    steps: int = 0
    """Of the bare training."""
    seconds: float = 20.0
    """About how long the simulation of a model goes on."""
    runs: int = 1
    """Seeds that are simulated together."""
    repeats: int = 3
    profile: bool = False
    """Time every op of the simulation, which slows it down a little."""
    overlap: bool | None = None
    """Compute in a thread of its own while the simulation goes on; by default on a GPU."""

    def check(self) -> None:
        unknown = [name for name in self.models if name not in CASES]
        if unknown or not self.models:
            raise UserError(f"--models has {', '.join(unknown) or 'no name'}; allowed are {', '.join(CASES)}")
        if not self.jobs or min(self.jobs) < 1:
            raise UserError(f"--jobs is {','.join(map(str, self.jobs))}; allowed are whole numbers from 1 on")
        if self.bf16 and self.device != "cuda":
            raise UserError("--bf16 needs --device cuda; on a CPU training is in full precision")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device is 'cuda', but PyTorch sees no CUDA device here; use 'cpu'")


def measure(options: Options, tell: Tell = quiet) -> dict[str, Any]:
    """Figures of every model, with the machine and the command."""
    options.check()
    stamped = stamp(options.device)
    parts = len(options.jobs) + 2
    total = parts * len(options.models)
    found = {}
    for place, name in enumerate(options.models):
        done = place * parts

        def told(what: str, part: int, name: str = name, done: int = done) -> None:
            tell(f"{name}: {what}", done + part, total)

        found[name] = _model(name, options, told)
    tell("done", total, total)
    return stamped | {"options": asdict(options), "models": found}


def table(found: dict[str, Any]) -> Figures:
    """Samples per second; the ratios are to the bare step at the simulation's own batch size."""
    options = found["options"]
    rows = []
    for name, figures in found["models"].items():
        bare, whole = figures["bare"], figures["end_to_end"]
        rows.append(
            (
                name,
                *(short(bare[str(count)]["samples_per_second"]) for count in options["jobs"]),
                optional(bare[str(options["jobs"][-1])].get("times_as_fast_as_without_kernels"), 2),
                short(whole["samples_per_second"]),
                f"{whole['mean_batch']:.1f}",
                f"{whole['ratio']:.2f}",
                optional(whole["steady_ratio"], 2),
                f"{whole['captures']['seconds']:.1f}",
                f"{whole['first_evaluation_seconds']:.1f}",
            )
        )
    heads = tuple(f"bare, {count} {'job' if count == 1 else 'jobs'}" for count in options["jobs"])
    simulated = "end to end*" if options["profile"] else "end to end"
    columns = ("model", *heads, "kernels", simulated, "batch", "ratio", "steady ratio", "capture s", "first eval. s")
    precision = "bf16" if options["bf16"] else "TF32" if options["device"] == "cuda" else "FP32"
    notes = (
        f"samples/s, {precision}; {DEVICES} devices, {options['runs']} run(s) together",
        "kernels: how many times as fast the last bare step is as without them, by turns (on a CPU; –: none fits)",
        "ratio: of the whole simulation to the bare step, captures and the first evaluation included; steady ratio: "
        "of its second half, from the evaluation in the middle on (–: too short to have one)",
    )
    marked = ("*: profiled, with every op timed, which costs some speed",) if options["profile"] else ()
    return Figures(columns, rows, notes + marked)


def profile(found: dict[str, Any]) -> Figures | None:
    """Where the time of the simulations went, if they were profiled."""
    rows: list[tuple[str, ...]] = []
    notes = ["Python s: wall time of the thread inside; GPU s: on its stream between begin and end, gaps included"]
    for name, figures in found["models"].items():
        whole = figures["end_to_end"]
        for kind, line in whole.get("breakdown", {}).items():
            counts = ("–" if line[key] is None else f"{line[key]:,}" for key in ("calls", "jobs"))
            seconds = (optional(line[key], 3) for key in ("python_seconds", "gpu_seconds"))
            rows.append((name, kind, *counts, *seconds))
        if whole["profiled"]:
            notes.append(f"{name}: {whole['wall_seconds']:.2f} s; " + _training_note(whole["training"]))
    columns = ("model", "op", "calls", "jobs", "Python s", "GPU s")
    return Figures(columns, rows, tuple(notes), names=2) if rows else None


def _training_note(found: dict[str, Any]) -> str:
    used = found["useful_samples"] / max(1, found["slots_of_useful_steps"])
    bare = found["bare_seconds"]
    return (
        f"training of {found['useful_steps']:,} model-steps by {found['run_steps']:,} that were run, {used:.0%} of the "
        f"sample slots of the former in use; at the bare step's speed {bare['useful_samples']:.2f} s for the samples, "
        f"{bare['slots_of_useful_steps']:.2f} s for the steps, {bare['slots_run']:.2f} s with padding"
    )


def _model(name: str, options: Options, tell: Any) -> dict[str, Any]:
    config = _config(name, options, 1.0, 0)
    dataset = _dataset(name, options)
    workshop = Workshop(Own(dataset=dataset))
    bench = workshop.bench(config)
    bare = {}
    for part, count in enumerate(options.jobs):
        tell(f"bare step, {count} jobs", part)
        bare[str(count)] = _bare(bench, count, options)
    tell("simulation", len(options.jobs))
    guess = max(figures["samples_per_second"] for figures in bare.values())
    whole = _end_to_end(name, options, dataset, _virtual_seconds(options, dataset, guess))
    tell("bare step at the simulation's batch", len(options.jobs) + 1)
    batch = max(1, round(whole["mean_batch"]))
    reference = bare.get(str(batch)) or _bare(bench, batch, options)
    rate = reference["samples_per_second"]
    whole["bare_at_batch"] = rate
    whole["ratio"] = whole["samples_per_second"] / rate
    without = whole["wall_seconds"] - whole["capture_seconds"]
    whole["ratio_without_capture"] = whole["samples"] / without / rate
    steady = whole["steady_samples_per_second"]
    whole["steady_ratio"] = None if steady is None else steady / rate
    if options.profile:
        slots = ("useful_samples", "slots_of_useful_steps", "slots_run")
        whole["training"]["bare_seconds"] = {key: whole["training"][key] / rate for key in slots}
    return {"trainer": type(bench.trainer).__name__, "bare": bare, "end_to_end": whole}


def _config(name: str, options: Options, virtual_seconds: float, seed: int) -> RunConfig:
    """The paper's setting; with less training, evaluation shrinks alike, so that it keeps its weight."""
    gpu = options.device == "cuda"
    share = _samples(name, options) * options.epochs / (CASES[name].train / DEVICES * Plan().epochs)
    return load(
        None,
        (),
        method="aedfl",
        hyper={"pruning": False, "exchange": options.exchange},
        seed=seed,
        devices=DEVICES,
        data={"name": "own"},
        model={"name": name},
        training={"epochs": options.epochs},
        stop={"virtual_seconds": virtual_seconds},
        evaluation={"local_samples": max(1, round(1000 * share))},
        engine={
            "device": options.device,
            "trainer": options.trainer,
            "precision": "bf16" if options.bf16 else "tf32" if gpu else "fp32",
            "overlap": options.overlap,
        },
    )


def _dataset(name: str, options: Options) -> Dataset:
    """Random data, with as many test samples for each training sample as in the real set."""
    case, random = CASES[name], np.random.default_rng(0)
    train = _samples(name, options) * DEVICES
    test = max(DEVICES, case.test * train // case.train)
    high, kind = (case.words, np.int16) if case.words else (256, np.uint8)
    x = torch.from_numpy(random.integers(0, high, (train + test, *case.shape), dtype=kind))
    y = torch.from_numpy(random.integers(0, case.classes, train + test))
    scale = None if case.words else Normalisation((0.5,) * case.shape[0], (0.25,) * case.shape[0])
    parts = Split(x[:train], y[:train]), Split(x[train:], y[train:])
    return Dataset("random", *parts, case.classes, scale, vocabulary=case.words)


def _samples(name: str, options: Options) -> int:
    return options.samples or (CASES[name].train // DEVICES if options.device == "cuda" else 200)


def _virtual_seconds(options: Options, dataset: Dataset, rate: float) -> float:
    """How long the fleet must run for about the wanted wall time; never shorter than a few updates of each device."""
    updates_per_second = DEVICES * float(np.log(15.0)) / 14.0  # of devices that take 1 to 15 s, uniformly
    per_update = len(dataset.train) / DEVICES * options.epochs * options.runs
    return max(5.0, options.seconds * rate / (per_update * updates_per_second))


def _bare(bench: Bench, count: int, options: Options) -> dict[str, Any]:
    """Local training of `count` models; the first call, which captures or warms up, is not counted."""
    plan, task = Plan(), bench.task
    steps = options.steps or (400 if options.device == "cuda" else 4)
    samples = len(task.dataset.train)
    vector = task.start.to(task.device)
    size = steps * plan.batch_size
    jobs = [
        TrainJob(vector, np.arange(own * size, (own + 1) * size) % samples, (0, own), plan.lr, 1)
        for own in range(count)
    ]
    begin = _capture_seconds(bench.trainer)
    first = _seconds(bench.trainer, plan, jobs)
    captured = _capture_seconds(bench.trainer) - begin
    plain = _without_kernels(bench.trainer)
    if plain is not None:
        _seconds(plain, plan, jobs)
    again, ratios = [], []
    for _ in range(options.repeats):
        again.append(_seconds(bench.trainer, plan, jobs))
        ratios += [_seconds(plain, plan, jobs) / again[-1]] if plain is not None else []
    return {
        "samples_per_second": count * size / median(again),
        "fastest": count * size / min(again),
        "first_seconds": first,
        "capture_seconds": captured,
        "times_as_fast_as_without_kernels": median(ratios) if ratios else None,
    }


def _without_kernels(trainer: Trainer) -> Trainer | None:
    """The same trainer by PyTorch's functions alone, where a CPU's kernels are in use."""
    if not isinstance(trainer, SequentialTrainer) or not (trainer.recipe or trainer.fusion):
        return None
    return SequentialTrainer(trainer.task, trainer.workers, kernels=False)


def _seconds(trainer: Trainer, plan: Plan, jobs: list[TrainJob]) -> float:
    gpu = jobs[0].vector.is_cuda
    if gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.no_grad():
        trainer.train(plan.shape(), jobs)
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _capture_seconds(trainer: Trainer) -> float:
    """What the trainer has spent on compiling and capturing so far; 0 for one that does neither."""
    return float(getattr(trainer, "capture_seconds", 0.0)) + float(getattr(trainer, "compile_seconds", 0.0))


def _end_to_end(name: str, options: Options, dataset: Dataset, virtual_seconds: float) -> dict[str, Any]:
    """A simulation from nothing: its own trainer, its own captures, its folder on disk."""
    gpu, captured = options.device == "cuda", CAPTURES.now()
    with tempfile.TemporaryDirectory() as folder, Workshop(Own(dataset=dataset)) as workshop:
        configs = [_config(name, options, virtual_seconds, seed) for seed in range(options.runs)]
        for config in configs:
            (Path(folder) / str(config.seed)).mkdir()
        runs = [Run(config, workshop, Path(folder) / str(config.seed), Silent()) for config in configs]
        overlapped = workshop.queue.ahead
        ledger = watch(workshop.queue, True, gpu) if options.profile else None
        course = Course(runs, workshop.queue, gpu, ledger)
        begin = Instant(gpu)
        drive_all(runs, workshop)
        if gpu:
            torch.cuda.synchronize()
        last = course.mark(virtual_seconds)
        if gpu:
            torch.cuda.synchronize()
    samples, batches, wall = sum(run.sim.samples for run in runs), workshop.queue.batches, last.at.python_since(begin)
    found: dict[str, Any] = {
        "virtual_seconds": virtual_seconds,
        "updates": sum(run.sim.updates for run in runs),
        "samples": samples,
        "wall_seconds": wall,
        "samples_per_second": samples / wall,
        "profiled": options.profile,
        "overlapped": overlapped,
        "mean_batch": sum(batches) / max(1, len(batches)),
        "capture_seconds": _capture_seconds(workshop.bench(configs[0]).trainer),
        "captures": asdict(CAPTURES.since(captured)),
        "first_evaluation_seconds": course.seconds[0],
        "later_evaluation_seconds": course.later_seconds,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_gpu_mib": torch.cuda.max_memory_allocated() / 2**20 if gpu else None,
    }
    if ledger is not None:
        found |= {"breakdown": ledger.breakdown(begin, last.at), "training": ledger.training()}
    return found | _steady(course.half(virtual_seconds), last, samples / max(1, found["updates"]))


def _steady(half: Point | None, last: Point, samples: float) -> dict[str, Any]:
    """The rate from an evaluation in the middle to the end, what happens once being over, with so many samples a job.

    Jobs that were run are counted, not samples of updates that ended: at an evaluation, training under way is done
    but does not count yet, while a run that ends leaves it undone.
    """
    if half is None or last.jobs == half.jobs:
        return {"steady": None, "steady_samples_per_second": None}
    jobs, seconds = last.jobs - half.jobs, last.at.stream_since(half.at)
    span = {"from_virtual": half.virtual, "jobs": jobs, "seconds": seconds}
    return {"steady": span, "steady_samples_per_second": jobs * samples / seconds}
