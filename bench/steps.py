"""How long a training step of 20 models takes, and which kernels the time goes to. On a GPU; prints JSON.

    python bench/steps.py --out steps.json

Local training as it is with the paper's larger networks (bf16, weight decay, clipping), 50 samples a model and step,
random images. A step is a fortieth of the median of three trainings, loading included; kernels are those of one
training under PyTorch's profiler, microseconds and calls a step, largest first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from aedfl.bench.stamp import stamp
from aedfl.data import Dataset, Split
from aedfl.models import build
from aedfl.task import Task
from aedfl.training.grouped import GroupedTrainer
from aedfl.training.plan import Plan, TrainJob

MODELS, BATCH, STEPS, SAMPLES = 20, 50, 40, 1000
SHOWN, WIDTH = 20, 100
"""Kernels listed, and letters of their names; those that begin alike count as one."""
DECAY, BOTH, CLIP = (
    Plan(batch_size=BATCH, weight_decay=decay, clip_norm=clip) for decay, clip in ((3e-3, None), (3e-3, 5.0), (0, 5.0))
)
CASES = {  # model, side of an image, classes, plan, whether models are masked
    "CIFAR-10 & ResNet-8": ("resnet8", 32, 10, DECAY, False),
    "CIFAR-10 & VGG-9": ("vgg9", 32, 10, BOTH, False),
    "CIFAR-10 & VGG-9, masked": ("vgg9", 32, 10, BOTH, True),
    "Tiny-ImageNet & ResNet-8": ("resnet8", 64, 200, Plan(batch_size=BATCH), False),
    "Tiny-ImageNet & VGG-9": ("vgg9", 64, 200, CLIP, False),
}


def prepared(
    name: str, side: int, classes: int, bf16: bool = True, masked: bool = False, device: str = "cuda"
) -> tuple[GroupedTrainer, list[TrainJob]]:
    """A trainer, and jobs for all models: so many steps each on random images."""
    drawn, shape = torch.Generator().manual_seed(0), (3, side, side)
    split = Split(torch.randn(SAMPLES, *shape, generator=drawn), torch.randint(0, classes, (SAMPLES,), generator=drawn))
    task = Task(build(name, shape, classes, seed=0), Dataset("random", split, split, classes, None), device=device)
    mask = torch.ones(task.layout.size, dtype=torch.bool, device=device) if masked else None
    start, rows, epochs = task.start.to(device), np.arange(SAMPLES), STEPS * BATCH // SAMPLES
    jobs = [TrainJob(start, rows, (0, i), 0.001, epochs, mask) for i in range(MODELS)]
    return GroupedTrainer(task, bf16), jobs


def measured(name: str, side: int, classes: int, plan: Plan, masked: bool) -> dict[str, Any]:
    trainer, jobs = prepared(name, side, classes, masked=masked)
    train = partial(trainer.train, plan, jobs)
    seconds = [timed(train) for _ in range(4)]
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        timed(train)
    us, calls = Counter[str](), Counter[str]()
    for event in watched.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us[event.name[:WIDTH]] += event.device_time
            calls[event.name[:WIDTH]] += 1
    kernels = {one: [round(spent / STEPS, 1), round(calls[one] / STEPS, 1)] for one, spent in us.most_common(SHOWN)}
    step = 1e6 * median(seconds[1:]) / STEPS
    speed, whole = round(1e6 * MODELS * BATCH / step), round(sum(us.values()) / STEPS)
    return {"us": round(step), "samples_per_second": speed, "all kernels": whole, "kernels": kernels}


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    found: dict[str, Any] = stamp("cuda") | {"models": MODELS, "batch": BATCH, "steps": {}}
    for label, case in CASES.items():
        found["steps"][label] = measured(*case)
        print(label, found["steps"][label]["us"], "us", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
