"""From a config to the things a simulation is made of. Runs with the same data and model share them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor, nn

from .. import models
from ..algorithms import get
from ..data import Dataset, load
from ..data.partition import hold_out, partition, split_validation
from ..errors import UserError
from ..graph import Queue
from ..placement import Placement
from ..randomness import generator, torch_seed
from ..sim.fleet import Fleet, read_speeds, read_trace, uniform_seconds
from ..sim.network import Links
from ..sim.simulation import Observer, Simulation, Stop
from ..task import Loss, Task
from ..topology import make as make_topology
from ..training import batched, grouped
from ..training.evaluate import Evaluator, Scorer, rows_of
from ..training.plan import Indices, Plan, Trainer
from ..training.sequential import SequentialTrainer
from .config import RunConfig, make_hyper
from .sections import Engine

if TYPE_CHECKING:
    from ..training.actors import Pool
    from ..training.ray import Remote


@dataclass(frozen=True)
class Bench:
    """What runs of one setting share: the task, who trains, who evaluates."""

    task: Task
    trainer: Trainer
    evaluator: Scorer
    given: bool = False
    """True for a user's own module, whose weights are the start values whatever the seed."""


@dataclass(frozen=True)
class Own:
    """A user's own parts, given in Python instead of by name."""

    module: nn.Module | None = None
    dataset: Dataset | None = None
    loss: Loss | None = None
    metric: Loss | None = None


LOOKAHEAD = 256
SMALL = 1e5
"""Multiply-accumulates below which calls cost more than convolutions, so that a CPU gains by running many at once."""


class Workshop:
    """Builds benches once per setting, and simulations on them, all on one queue.

    With `engine.ray`, the work is done by actors, which leaving the workshop gives back; not those of a `pool`
    that was given, which may serve the next one too.
    """

    def __init__(self, own: Own | None = None, pool: Pool | None = None) -> None:
        self.own = own or Own()
        self.queue = Queue()
        self.placement: Placement | None = None
        self.pool, self._lent = pool, pool is not None
        self._remotes: list[Remote] = []
        self._benches: dict[str, Bench] = {}
        self._precisions: set[str] = set()
        """PyTorch has one setting for a whole process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.queue.close()
        for remote in self._remotes:
            remote.forget()
        if self.pool is not None and not self._lent:
            self.pool.close()

    @property
    def place(self) -> str:
        """Where the work is done, for those who watch; empty if it is done here."""
        return "" if self.pool is None else f" on {len(self.pool.actors)} Ray actors"

    def bench(self, config: RunConfig) -> Bench:
        key = json.dumps(
            [config.data.name, config.data.directory, config.model.model_dump(), config.engine.model_dump()],
            sort_keys=True,
            default=str,
        )
        if key not in self._benches:
            self._benches[key] = self._make(config)
        return self._benches[key]

    def _make(self, config: RunConfig) -> Bench:
        engine, own = config.engine, self.own
        device = _device(engine)
        self._precisions.add(engine.precision)
        if len(self._precisions) > 1:
            several = ", ".join(sorted(self._precisions))
            raise UserError(f"engine.precision: runs that share a process must have the same one, not {several}")
        dataset = own.dataset or load(config.data.name, config.data.directory)
        module = own.module or module_for(config, dataset)
        equip = partial(_equip, engine, module, own.loss, own.metric)
        bench = equip(device, engine.threads or cores(), dataset)
        if _overlaps(engine, device):
            self.queue.go_ahead()
        if engine.cache_budget_mib is not None:
            self.placement = Placement(int(engine.cache_budget_mib * 2**20), bench.task.device)
            self.queue.settled = self.placement.admit
        if engine.ray is not None:
            bench = self._elsewhere(engine, bench, equip)
        return replace(bench, given=own.module is not None)

    def _elsewhere(self, engine: Engine, bench: Bench, equip: partial[Bench]) -> Bench:
        """The bench with its work done by Ray actors, each with a bench of its own for one core or GPU."""
        try:
            from ..training import actors, ray
        except ImportError as error:
            raise UserError(f"engine.ray needs the extra 'ray' (pip install 'aedfl[ray]'): {error}") from None
        if self.pool is None:
            self.pool = actors.Pool(engine.ray or "auto", engine.actors, engine.device)
        remote = ray.Remote(self.pool, bench.task, partial(equip, self.pool.device, 1))
        self._remotes.append(remote)
        self.queue.route = partial(ray.route, self._remotes)
        return Bench(bench.task, ray.RayTrainer(remote), ray.RayScorer(remote, bench.evaluator))

    def start(self, config: RunConfig, bench: Bench) -> Tensor:
        """The start vector of that seed."""
        if bench.given:
            return bench.task.start
        return bench.task.layout.flatten(module_for(config, bench.task.dataset))

    def simulation(self, config: RunConfig, rows: Rows, observer: Observer) -> Simulation:
        bench, method = self.bench(config), get(config.method)
        training = config.training
        plan = Plan(
            training.epochs,
            training.batch_size,
            training.lr,
            training.momentum,
            training.weight_decay,
            clip_norm=training.clip_norm,
        )
        topology = config.topology
        return Simulation(
            method=method,
            hyper=make_hyper(method.hyper, config.hyper),
            task=bench.task,
            trainer=bench.trainer,
            start=self.start(config, bench),
            rows=rows.train,
            held_out=rows.held_out,
            topology=make_topology(
                topology.kind, config.devices, seed=config.seed, degree=topology.degree, path=topology.path
            ),
            fleet=_fleet(config),
            links=Links(**config.links.model_dump()),
            plan=plan,
            lr_decay=training.lr_decay,
            seed=config.seed,
            stop=Stop(config.stop.updates),
            queue=self.queue,
            lookahead=config.engine.lookahead or _lookahead(config.devices, bench.task.device),
            observer=observer,
            public=rows.public,
        )


@dataclass(frozen=True)
class Rows:
    """Which samples each device trains on and holds out, and what models are evaluated on."""

    train: list[Indices]
    held_out: list[Indices]
    evaluation: Indices
    local: Indices
    test: bool
    public: Indices
    """What the server looks at, in methods that want it to."""

    @classmethod
    def of(cls, config: RunConfig, dataset: Dataset) -> Rows:
        data, seed = config.data, config.seed
        pool = rows_of(len(dataset.train), data.samples, generator(seed, "samples"))
        test = data.validation == 0
        evaluation = rows_of(len(dataset.test), data.test_samples, generator(seed, "test"))
        if not test:
            kept, aside = split_validation(len(pool), data.validation, seed)
            pool, evaluation = pool[kept], pool[aside]
        wanted = min(get(config.method).public_samples, len(pool) // 20)
        shuffled = generator(seed, "public").permutation(pool) if wanted else pool
        public, pool = np.sort(shuffled[:wanted]), np.sort(shuffled[wanted:])
        labels = dataset.train.y.numpy()[pool]
        parts = partition(
            labels,
            config.devices,
            data.partition,
            seed,
            alpha=data.alpha,
            sigma=data.sigma,
            shards=data.shards,
        )
        pairs = [hold_out(pool[part], data.held_out, seed, device) for device, part in enumerate(parts)]
        chosen = rows_of(len(evaluation), config.evaluation.local_samples, generator(seed, "local"))
        return cls(
            [np.sort(own) for own, _ in pairs],
            [held for _, held in pairs],
            evaluation,
            evaluation[chosen],
            test,
            public,
        )


def module_for(config: RunConfig, dataset: Dataset, name: str | None = None) -> nn.Module:
    """The run's model, or another one by name, for samples of a data set; it knows the words that the data have."""
    options = dict(config.model.options) if name in (None, config.model.name) else {}
    given = {"seed": torch_seed(config.seed, "model"), "words": dataset.vocabulary, **options}
    return models.build(name or config.model.name, dataset.input_shape, dataset.classes or 1, **given)


def _device(engine: Engine) -> str:
    """Where this process computes; with Ray, actors may have the GPUs that it lacks."""
    if engine.device == "cpu" or (not torch.cuda.is_available() and (engine.device == "auto" or engine.ray)):
        return "cpu"
    if not torch.cuda.is_available():
        raise UserError("engine.device is 'cuda', but PyTorch sees no CUDA device here; use 'cpu' or 'auto'")
    return "cuda"


def _overlaps(engine: Engine, device: str) -> bool:
    """Whether jobs are computed in a thread of their own. On a CPU both threads would want the same cores."""
    if engine.overlap and engine.ray is not None:
        raise UserError("engine.overlap = true: not together with engine.ray, whose actors one thread may ask")
    return engine.overlap if engine.overlap is not None else device == "cuda" and engine.ray is None


def _equip(
    engine: Engine,
    module: nn.Module,
    loss: Loss | None,
    metric: Loss | None,
    device: str,
    workers: int,
    dataset: Dataset,
) -> Bench:
    """A task with who trains and who evaluates it, in this process, which it sets up for them."""
    if device == "cpu":
        torch.set_num_threads(1)  # parallel are jobs, not the threads of one: steady on busy cores, exact always
    torch.backends.cuda.matmul.allow_tf32 = engine.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = engine.precision != "fp32"
    torch.backends.cudnn.deterministic = True  # a run gives the same record again
    task = Task(module, dataset, loss, metric, device, engine.kernels)
    return Bench(task, _trainer(engine, task, workers), Evaluator(task))


def _trainer(engine: Engine, task: Task, workers: int) -> Trainer:
    """`auto`: many models at once on a GPU, and on a CPU unless they lose there: where kernels know the whole network
    or its convolutions, or those are of some size.

    Many at once means grouped layers on a GPU where all of them are known, else `vmap`; what neither can do is
    trained one by one.
    """
    name, gpu = engine.trainer, task.device.type == "cuda"
    if name == "auto":
        convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in task.module.modules())
        alone = None if gpu else SequentialTrainer(task, workers)
        if alone is not None and (alone.recipe or alone.fusion or (convolutions and task.macs > SMALL)):
            return alone
        name = "batched"
    if name == "batched" and gpu and grouped.supports(task):
        return grouped.GroupedTrainer(task, engine.precision == "bf16", task.kernels)
    if name == "batched" and batched.supports(task):
        return batched.BatchedTrainer(task)
    return SequentialTrainer(task, workers)


def cores() -> int:
    """Cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lookahead(devices: int, device: torch.device) -> int:
    """Jobs that are gathered. A GPU computes them while the programs go on, so it gets them early: batches of a fleet
    are no larger if more than one job of each device is waited for."""
    return min(LOOKAHEAD, max(64, devices)) if device.type == "cuda" else LOOKAHEAD


def _fleet(config: RunConfig) -> Fleet:
    fleet, count = config.fleet, config.devices
    if fleet.speeds:
        seconds = read_speeds(Path(fleet.speeds), count)
    else:
        seconds = uniform_seconds(count, fleet.fastest, fleet.slowest, config.seed)
    changes = read_trace(Path(fleet.trace), count) if fleet.trace else {}
    return Fleet(seconds, changes, fleet.mean_up, fleet.mean_down, config.seed)
