"""What a device brings to a run: its model, its data and what computes on them, under the run's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms import get
from ..context import SERVER, Model
from ..data import Dataset, Split
from ..data import load as load_named
from ..data.adapters import as_split, from_user
from ..data.partition import hold_out
from ..data.registry import NAMES
from ..errors import UserError
from ..experiment.config import RunConfig
from ..experiment.workshop import Rows, module_for
from ..randomness import generator
from ..task import Task
from ..training.evaluate import Evaluator
from ..training.plan import Indices, Plan, Trainer
from ..training.sequential import SequentialTrainer
from .context import Part

_NONE: Indices = np.empty(0, dtype=np.int64)
ASIDE = 0.1
"""Share of a file that is kept for testing where no file of test data is given."""
TESTED = 5000
"""Test samples that a device measures its model on."""


@dataclass(frozen=True)
class Kit:
    """The task, and which of its samples are this device's."""

    config: RunConfig
    task: Task
    start: Tensor
    trainer: Trainer
    evaluator: Evaluator
    rows: Rows | None = None
    """Everybody's shares, where the data are a public set that is dealt out by index."""
    public: bool = False
    """A server's own file of public samples."""
    test_rows: Indices = field(default_factory=lambda: _NONE)

    def part(self, index: int) -> Part:
        config, training = self.config, self.config.training
        train, held = self._own(index)
        plan = Plan(
            training.epochs, training.batch_size, training.lr, training.momentum, training.weight_decay,
            clip_norm=training.clip_norm,
        )  # fmt: skip
        return Part(
            self.task, self.trainer, self.start, train, held, plan, training.lr_decay, config.seed,
            config.stop.updates, config.stop.virtual_seconds,
        )  # fmt: skip

    def _own(self, index: int) -> tuple[Indices, Indices]:
        if index == SERVER and self.rows is not None:
            return self.rows.public, _NONE
        if index == SERVER:
            return np.arange(len(self.task.dataset.train)) if self.public else _NONE, _NONE
        if self.rows is None:
            every = np.arange(len(self.task.dataset.train))
            own, held = hold_out(every, self.config.data.held_out, self.config.seed, 0)
            return np.sort(own), held
        if index >= len(self.rows.train):
            raise UserError(
                f"the run deals {self.config.data.name} out to {len(self.rows.train)} devices, and this is number "
                f"{index} (from 0); give it a data file of its own with --data"
            )
        return self.rows.train[index], self.rows.held_out[index]

    def score(self, model: Model) -> float | None:
        """The model's metric on the test samples; None without any."""
        rows = self.test_rows
        if not len(rows):
            return None
        vector = model.vector.get()
        kept = vector if model.mask is None else vector * model.mask.get()
        return self.evaluator.score([kept], rows, test=True)[0][0]


def gather(
    config: RunConfig,
    data: str | None = None,
    test: Path | None = None,
    model: str | None = None,
    classes: int | None = None,
    features: Sequence[str] | None = None,
    target: str | None = None,
    threads: int = 1,
) -> Kit:
    """For a device: `data` is a Parquet file of its own, or the name of a public set that the run deals out."""
    torch.set_num_threads(threads)
    name = data or config.data.name
    if name in NAMES:
        dataset = load_named(name, config.data.directory)
        rows: Rows | None = Rows.of(config, dataset)
    else:
        dataset, rows = _private(Path(name), test, classes, features, target), None
    return _kit(config, dataset, model, rows, np.arange(min(TESTED, len(dataset.test))))


def serve(
    config: RunConfig,
    data: str | None = None,
    model: str | None = None,
    shape: Sequence[int] = (),
    classes: int | None = None,
    features: Sequence[str] | None = None,
    target: str | None = None,
    method: str | None = None,
) -> Kit:
    """For a server: its file of public samples, or those of a public set, for a method that needs some; else none."""
    chosen = get(method or config.method)
    if data is not None:
        torch.set_num_threads(1)
        dataset = _private(Path(data), None, classes, features, target)
        kit = _kit(config, dataset, model, None, np.arange(min(TESTED, len(dataset.test))))
        return replace(kit, public=True)
    if chosen.public_samples and config.data.name in NAMES and not shape:
        return gather(config, model=model)
    if chosen.public_samples:
        raise UserError(f"method {chosen.name} needs public samples at the server; give it a file of them with --data")
    return blank(config, model, shape, classes)


def blank(config: RunConfig, model: str | None = None, shape: Sequence[int] = (), classes: int | None = None) -> Kit:
    """For a server, which has no data: one empty sample of the right shape stands for the data set."""
    torch.set_num_threads(1)
    if config.data.name in NAMES and not shape:
        known = load_named(config.data.name, config.data.directory)
        x, y = torch.zeros_like(known.train.x[:1]), torch.zeros_like(known.train.y[:1])
        empty = replace(known, train=Split(x, y), test=Split(x, y))
        return _kit(config, empty, model, None, _NONE)
    if not shape:
        raise UserError("the server needs --shape, the shape of one sample, such as --shape 1,8,8 (and --classes)")
    x = torch.zeros(1, *shape)
    y = torch.zeros(1) if classes is None else torch.zeros(1, dtype=torch.int64)
    return _kit(config, Dataset("blank", Split(x, y), Split(x, y), classes), model, None, _NONE)


def _kit(config: RunConfig, dataset: Dataset, model: str | None, rows: Rows | None, tested: Indices) -> Kit:
    is_private = dataset.name not in NAMES  # its own words are not those of all
    module = module_for(config, replace(dataset, vocabulary=None) if is_private else dataset, model)
    _check_words(module, dataset)
    task = Task(module, dataset, kernels=config.engine.kernels)
    start, trainer = task.layout.flatten(module), SequentialTrainer(task)
    return Kit(config, task, start, trainer, Evaluator(task), rows, test_rows=tested)


def _check_words(module: nn.Module, dataset: Dataset) -> None:
    """A device's own tokens must be words that the model of all has; its largest embedding is taken for that of words,
    others may be of positions."""
    words = max((layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)), default=None)
    if words is not None and dataset.vocabulary is not None and dataset.vocabulary > words:
        raise UserError(
            f"the data have token {dataset.vocabulary - 1}, but the model has {words} words, counted from 0; "
            "the run's model.options.vocabulary says how many"
        )


def _private(
    path: Path, test: Path | None, classes: int | None, features: Sequence[str] | None, target: str | None
) -> Dataset:
    """The device's own file; without a file of test data, a part of it is kept aside by chance."""
    if not path.is_file():
        raise UserError(f"data {os.fspath(path)!r} is neither a file nor one of {', '.join(NAMES)}")
    own = as_split(path, features=features, target=target)
    if test is not None:
        return from_user(own, as_split(test, features=features, target=target), classes, name=path.name)
    order = torch.from_numpy(generator("aside", len(own)).permutation(len(own)))
    count = max(1, round(ASIDE * len(own))) if len(own) > 1 else 0
    kept, aside = order[count:].sort().values, order[:count].sort().values if count else order
    return from_user((own.x[kept], own.y[kept]), (own.x[aside], own.y[aside]), classes, name=path.name)
