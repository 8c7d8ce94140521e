"""What pruning saves and what it costs, measured here and now: prints one JSON object.

    python bench/pruning.py [--threads 1] [--repeats 7]

Saved: local training (SGD, batch 50) of LeNet-5, ResNet-8 and VGG-9 with every other unit of every layer taken
out, against the full network, side by side in one run, as the median over interleaved repeats. Cost: one pruning
step (scores of all units, Lanczos, Lipschitz constant) on 50 samples, in local updates of 500 samples x 4 epochs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from aedfl.models import build
from aedfl.sparsity import (
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
from aedfl.sparsity.job import Budget

MODELS = {"lenet5": 8, "resnet8": 2, "vgg9": 2}
"""With the steps per measurement."""
BATCH, SAMPLES, EPOCHS, CLASSES = 50, 500, 4, 10


def train(module: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.03)
    for number in range(steps):
        rows = slice(number * BATCH % len(x), number * BATCH % len(x) + BATCH)
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def look(module: nn.Module, groups: ChannelGroups, initial: Tensor, x: Tensor, y: Tensor, budget: Budget) -> Tensor:
    """One whole pruning step; the mask."""
    m = groups.layout.flatten(module)
    objective = flat_loss(module, groups.layout, x[: budget.samples], y[: budget.samples])
    at = curvature(objective, m, chunk=8)
    signs = draw(0, groups, budget.samples, CLASSES, budget.probes, budget.draws)
    scores = saliency(objective, m, groups, signs, at=at).score
    spectrum = lanczos(at.hessian, rademacher(1, (len(m),)), budget.steps)
    gap_rate(spectrum, lipschitz(objective, m, initial, budget.points, at))
    return prune(scores, groups, 0.3)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def flops(work: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def interleaved(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, after one round to warm up."""
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(repeats + 1)][1:]
    return {name: median(r[name] for r in rounds) for name in works}


def saved(name: str, repeats: int) -> dict[str, Any]:
    """The full network against the one with half of every layer's units."""
    module = build(name, (3, 32, 32), CLASSES, seed=0)
    x, y = torch.randn(4 * BATCH, 3, 32, 32), torch.arange(4 * BATCH) % CLASSES
    groups = ChannelGroups.of(module, x[:1])
    mask = groups.full()
    for units in groups.layers.values():
        mask[units][1::2] = False
    small = shrink(module, groups, groups.layout.flatten(module), mask).module
    works: dict[str, Callable[[], object]] = {
        "full": lambda: train(module, x, y, MODELS[name]),
        "half": lambda: train(small, x, y, MODELS[name]),
    }
    times = interleaved(works, repeats)
    kept, full = int(groups.kept_entries(mask)), groups.layout.size
    return {
        "full_ms_per_step": round(1e3 * times["full"] / MODELS[name], 2),
        "half_ms_per_step": round(1e3 * times["half"] / MODELS[name], 2),
        "speed_up": round(times["full"] / times["half"], 2),
        "macs_ratio": round(float(groups.macs(groups.full()) / groups.macs(mask)), 2),
        "bytes_ratio": round(4 * full / (4 * kept + -(-full // 8)), 2),
    }


def cost(name: str, repeats: int) -> dict[str, Any]:
    """A pruning step in local updates."""
    budget, module = Budget(), build(name, (3, 32, 32), CLASSES, seed=0)
    x, y = torch.randn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % CLASSES
    groups = ChannelGroups.of(module, x[:1])
    initial = groups.layout.flatten(module)
    train(module, x, y, 20)
    steps = EPOCHS * SAMPLES // BATCH
    works: dict[str, Callable[[], object]] = {
        "prune": lambda: look(module, groups, initial, x, y, budget),
        "update": lambda: train(module, x, y, steps),
    }
    times, counted = interleaved(works, repeats), {kind: flops(work) for kind, work in works.items()}
    macs = float(groups.macs(groups.full()))
    return {
        "prune_s": round(times["prune"], 3),
        "local_update_s": round(times["update"], 3),
        "in_local_updates_time": round(times["prune"] / times["update"], 2),
        "in_local_updates_flops_counted": round(counted["prune"] / counted["update"], 2),
        "in_local_updates_flops_model": round(budget.macs(macs) / (3 * macs * SAMPLES * EPOCHS), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    result = {
        "torch": torch.__version__,
        "threads": options.threads,
        "repeats": options.repeats,
        "saved": {name: saved(name, options.repeats) for name in MODELS},
        "cost": {name: cost(name, max(1, options.repeats // 2)) for name in ("lenet5", "resnet8")},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
