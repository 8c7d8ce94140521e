"""The work that every simulator is given, and the clock that it is measured by.

Scripts beside this one import it as `work`, in environments that have torch and numpy but not this package.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
from processes import below, cpu_seconds, family  # type: ignore[import-not-found]
from torch import Tensor, nn

CLASSES, SIDE = 26, 28


@dataclass(frozen=True)
class Work:
    """Local SGD of every client in every round; `warm_up` rounds come first and are not counted."""

    clients: int
    samples: int
    batch: int
    rounds: int
    warm_up: int
    lr: float
    threads: int
    """Of torch, where one process does all the work."""
    cores: int
    data: Path
    out: Path
    started: float
    """When the process was started, in seconds since the epoch."""
    parent: int
    """The process that measures."""

    @property
    def all_rounds(self) -> int:
        return self.warm_up + self.rounds


def given() -> Work:
    """From the command line. Torch gets the threads it may use."""
    parser = argparse.ArgumentParser()
    for name in ("clients", "samples", "batch", "rounds", "warm_up", "threads", "cores", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr", "started"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    work = Work(**vars(parser.parse_args()))
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    return work


def prepare(folder: Path, clients: int, samples: int) -> None:
    """Writes random data once; every process then maps the same files, so that they count once in memory."""
    random = np.random.default_rng(0)
    shape = (clients * samples, 1, SIDE, SIDE)
    np.save(folder / "x.npy", random.standard_normal(shape, dtype=np.float32))
    np.save(folder / "y.npy", random.integers(0, CLASSES, clients * samples))


def data(folder: Path) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] and labels [n]; client k has the k-th share of them."""
    x, y = (torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in ("x", "y"))
    return x, y


def without_torchvision() -> None:
    """Some simulators import torchvision for its data sets and networks, which are not used here.

    Where the one that is installed cannot be loaded (wheels on PyPI may be built for another torch), an empty one
    takes its place.
    """
    try:
        importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError, AttributeError, OSError):
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        sys.modules["torchvision"] = sys.modules["torchvision.models"] = MagicMock()


def share(work: Work, client: int) -> slice:
    return slice(client * work.samples, (client + 1) * work.samples)


def lenet() -> nn.Module:
    """The package's own LeNet, loaded from its file."""
    path = Path(__file__).parents[3] / "models" / "lenet5.py"
    spec = importlib.util.spec_from_file_location("lenet5", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net: nn.Module = module.lenet5(CLASSES, 1, SIDE)
    return net


@cache
def kept(folder: Path) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and the data, made once in a process that is given one client after the other."""
    torch.set_num_threads(1)
    return lenet(), *data(folder)


class Clock:
    """Told when the rounds begin and when each has ended; writes what it has seen."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.times: list[float] = []
        self.used: list[float] = []

    def begin(self) -> None:
        self.times, self.used = [time.time()], [self._used()]

    def end_of_round(self, rounds: int = 1) -> None:
        """Of the last one; or of several, where they have no ends of their own."""
        self.times += [time.time()] * rounds
        self.used += [self._used()] * rounds
        if len(self.times) == self.work.all_rounds + 1:
            self._write()

    def _write(self) -> None:
        work, warm = self.work, self.work.warm_up
        found = {
            "set_up_seconds": self.times[0] - work.started,
            "warm_up_seconds": self.times[warm] - self.times[0],
            "seconds": self.times[-1] - self.times[warm],
            "cpu_seconds": self.used[-1] - self.used[warm],
            "updates": work.rounds * work.clients,
        }
        work.out.write_text(json.dumps(found))

    def _used(self) -> float:
        """Processor time so far of everything that was started to do this work."""
        return float(cpu_seconds(family(below(self.work.parent))))
