"""What pruning saves and what it costs, measured here and now.

Saved: local training (SGD, batch 50) of LeNet-5, ResNet-8 and VGG-9 with every other unit of every layer taken
out, against the full network, side by side in one run, as the median over interleaved repeats. Cost: one pruning
step of AEDFL with its defaults, and one with the paper's gap rule (Lanczos, Lipschitz constant) under more probes, in
local updates of 500 samples x 4 epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ..algorithms import get
from ..data import Dataset, Split
from ..graph import Job
from ..models import build
from ..sparsity import ChannelGroups, shrink
from ..sparsity.job import Budget, Prune
from ..task import Task
from .stamp import stamp
from .table import Figures, Tell, quiet

MODELS = {"lenet5": 8, "resnet8": 2, "vgg9": 2}
"""With the steps per measurement."""
COSTED = ("lenet5", "resnet8")
BATCH, SAMPLES, EPOCHS, CLASSES = 50, 500, 4, 10


@dataclass(frozen=True)
class Options:
    threads: int = 1
    repeats: int = 7


def measure(options: Options, tell: Tell = quiet) -> dict[str, Any]:
    stamped, total = stamp(), len(MODELS) + len(COSTED)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    saved, cost = {}, {}
    for number, name in enumerate(MODELS):
        tell(f"{name}: training at half its units", number, total)
        saved[name] = _saved(name, options.repeats)
    for number, name in enumerate(COSTED):
        tell(f"{name}: a pruning step", len(MODELS) + number, total)
        cost[name] = _cost(name, max(1, options.repeats // 2))
    return stamped | {"options": asdict(options), "saved": saved, "cost": cost}


def table(found: dict[str, Any]) -> Figures:
    rows: list[tuple[str, ...]] = []
    for name, saved in found["saved"].items():
        costs = [found["cost"].get(name, {}).get(way, {}).get("in_local_updates_time") for way in _ways()]
        times = (f"{saved['full_ms_per_step']:.2f}", f"{saved['half_ms_per_step']:.2f}", f"{saved['speed_up']:.2f}")
        less = (f"{saved['macs_ratio']:.2f}", f"{saved['bytes_ratio']:.2f}")
        rows.append((name, *times, *less, *("–" if cost is None else f"{cost:.2f}" for cost in costs)))
    columns = ("model", "full ms", "half ms", "times faster", "fewer MACs", "fewer bytes", "a pruning step, in updates",
               "by the gap rule")  # fmt: skip
    return Figures(columns, rows, (f"a step of {BATCH} samples, {found['options']['threads']} thread(s)",))


def _train(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.03)
    for number in range(steps):
        rows = slice(number * BATCH % len(x), number * BATCH % len(x) + BATCH)
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _flops(work: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def _interleaved(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, after one round to warm up."""
    rounds = [{name: _seconds(work) for name, work in works.items()} for _ in range(repeats + 1)][1:]
    return {name: median(r[name] for r in rounds) for name in works}


def _saved(name: str, repeats: int) -> dict[str, Any]:
    """The full network against the one with half of every layer's units."""
    module = build(name, (3, 32, 32), CLASSES, seed=0)
    x, y = torch.randn(4 * BATCH, 3, 32, 32), torch.arange(4 * BATCH) % CLASSES
    groups = ChannelGroups.of(module, x[:1])
    mask = groups.full()
    for units in groups.layers.values():
        mask[units][1::2] = False
    small = shrink(module, groups, groups.layout.flatten(module), mask).module
    works: dict[str, Callable[[], object]] = {
        "full": lambda: _train(module, x, y, MODELS[name]),
        "half": lambda: _train(small, x, y, MODELS[name]),
    }
    times = _interleaved(works, repeats)
    kept, full = int(groups.kept_entries(mask)), groups.layout.size
    return {
        "full_ms_per_step": round(1e3 * times["full"] / MODELS[name], 2),
        "half_ms_per_step": round(1e3 * times["half"] / MODELS[name], 2),
        "speed_up": round(times["full"] / times["half"], 2),
        "macs_ratio": round(float(groups.macs(groups.full()) / groups.macs(mask)), 2),
        "bytes_ratio": round(4 * full / (4 * kept + -(-full // 8)), 2),
    }


def _ways() -> dict[str, tuple[Budget, Any]]:
    """What a pruning step looks at and how it finds its rate."""
    hyper = get("aedfl").hyper
    return {
        "default": (Budget(hyper.hessian_samples, hyper.probes, steps=0), hyper.rate),
        "gap_rule": (Budget(), "gap"),
    }


def _cost(name: str, repeats: int) -> dict[str, Any]:
    """Pruning steps in local updates."""
    module = build(name, (3, 32, 32), CLASSES, seed=0)
    x, y = torch.randn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % CLASSES
    task = Task(module, Dataset("random", Split(x, y), Split(x, y), CLASSES))
    initial, units = task.start.clone(), task.filters.count
    _train(module, x, y, 20)
    vector, one = task.layout.flatten(module), torch.ones(1)

    def job(budget: Budget) -> Job:
        rows = torch.arange(budget.samples).numpy()
        kept = torch.ones(units, dtype=torch.bool)
        return vector, initial, rows, 0, torch.zeros(()), one, (), 0.3, torch.zeros(units), kept

    works: dict[str, Callable[[], object]] = {
        way: partial(Prune(task, budget, rate=rate).run, [job(budget)]) for way, (budget, rate) in _ways().items()
    }
    works["update"] = lambda: _train(module, x, y, EPOCHS * SAMPLES // BATCH)
    times, counted = _interleaved(works, repeats), {kind: _flops(work) for kind, work in works.items()}
    macs = float(task.groups.macs(task.groups.full()))
    return {"local_update_s": round(times["update"], 3)} | {
        way: {
            "seconds": round(times[way], 3),
            "in_local_updates_time": round(times[way] / times["update"], 2),
            "in_local_updates_flops_counted": round(counted[way] / counted["update"], 2),
            "in_local_updates_flops_model": round(budget.macs(macs) / (3 * macs * SAMPLES * EPOCHS), 2),
        }
        for way, (budget, _) in _ways().items()
    }
