"""What pruning saves and what it costs, measured here and now.

Saved: local training (SGD, batch 50) of LeNet-5, ResNet-8 and VGG-9 with every other unit of every layer taken
out, against the full network, side by side in one run, as the median over interleaved repeats. Cost: one pruning
step (scores of all units, Lanczos, Lipschitz constant) on 50 samples, in local updates of 500 samples x 4 epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ..models import build
from ..sparsity import (
    ChannelGroups,
    curvature,
    draw,
    flat_loss,
    gap_rate,
    lanczos,
    lipschitz,
    prune,
    rademacher,
    saliency,
    shrink,
)
from ..sparsity.job import Budget
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
        cost = found["cost"].get(name, {}).get("in_local_updates_time")
        times = (f"{saved['full_ms_per_step']:.2f}", f"{saved['half_ms_per_step']:.2f}", f"{saved['speed_up']:.2f}")
        less = (f"{saved['macs_ratio']:.2f}", f"{saved['bytes_ratio']:.2f}", "–" if cost is None else f"{cost:.2f}")
        rows.append((name, *times, *less))
    columns = ("model", "full ms", "half ms", "times faster", "fewer MACs", "fewer bytes", "a pruning step, in updates")
    return Figures(columns, rows, (f"a step of {BATCH} samples, {found['options']['threads']} thread(s)",))


def _train(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.03)
    for number in range(steps):
        rows = slice(number * BATCH % len(x), number * BATCH % len(x) + BATCH)
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _look(module: nn.Module, groups: ChannelGroups, initial: Tensor, x: Tensor, y: Tensor, budget: Budget) -> Tensor:
    """One whole pruning step; the mask."""
    m = groups.layout.flatten(module)
    objective = flat_loss(module, groups.layout, x[: budget.samples], y[: budget.samples])
    at = curvature(objective, m, chunk=8)
    signs = draw(0, groups, budget.samples, CLASSES, budget.probes, budget.draws)
    scores = saliency(objective, m, groups, signs, at=at).score
    spectrum = lanczos(at.hessian, rademacher(1, (len(m),)), budget.steps)
    gap_rate(spectrum, lipschitz(objective, m, initial, budget.points, at))
    return prune(scores, groups, 0.3)


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


def _cost(name: str, repeats: int) -> dict[str, Any]:
    """A pruning step in local updates."""
    budget, module = Budget(), build(name, (3, 32, 32), CLASSES, seed=0)
    x, y = torch.randn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % CLASSES
    groups = ChannelGroups.of(module, x[:1])
    initial = groups.layout.flatten(module)
    _train(module, x, y, 20)
    steps = EPOCHS * SAMPLES // BATCH
    works: dict[str, Callable[[], object]] = {
        "prune": lambda: _look(module, groups, initial, x, y, budget),
        "update": lambda: _train(module, x, y, steps),
    }
    times, counted = _interleaved(works, repeats), {kind: _flops(work) for kind, work in works.items()}
    macs = float(groups.macs(groups.full()))
    return {
        "prune_s": round(times["prune"], 3),
        "local_update_s": round(times["update"], 3),
        "in_local_updates_time": round(times["prune"] / times["update"], 2),
        "in_local_updates_flops_counted": round(counted["prune"] / counted["update"], 2),
        "in_local_updates_flops_model": round(budget.macs(macs) / (3 * macs * SAMPLES * EPOCHS), 2),
    }
