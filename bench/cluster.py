"""What Ray costs, and what follows for clusters that are not here. Prints JSON.

    python bench/cluster.py [--actors 2]

Measured on a local cluster: bytes of a training job and of its result for several models, seconds of an empty call,
bytes per second to the actors and back, seconds of a flush with and without Ray, and the simulator's own
seconds per job, which no cluster takes over. `expected` puts them into the model of docs/scaling.md, with the
throughput of a GPU and of the network as assumptions that are named beside each figure.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import platform
import time
from dataclasses import asdict, dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aedfl import models
from aedfl.data import Dataset, from_user
from aedfl.experiment.config import load
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, drive_all
from aedfl.experiment.workshop import Own, Workshop
from aedfl.training.actors import Pool
from aedfl.training.parcels import pack
from aedfl.training.plan import Plan, TrainJob, TrainResult

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "lenet5 28x28": ((1, 28, 28), 62),
    "lenet5 32x32x3": ((3, 32, 32), 10),
    "resnet8": ((3, 32, 32), 10),
    "vgg9": ((3, 32, 32), 10),
}
SAMPLES, EPOCHS = 500, 4
"""Of a device, as in the paper's settings with 100 devices."""


NETWORK = 1.25e9
"""Bytes per second between machines, an assumption: 10 Gbit/s."""
LEAN = 0.25e-3
"""Seconds per job of a simulator that merges on a GPU, an assumption: a fifth of the time at 2 million samples/s."""


@dataclass(frozen=True)
class Setting:
    """A cluster to be predicted: assumptions, not measurements."""

    name: str
    actors: int
    jobs: int
    """Jobs of a flush: about 20 per run of 100 devices."""
    samples_per_second: float
    """Of one actor."""
    network: float | None
    """Bytes per second of the link to the first machine; None if all is one machine."""
    here: float
    """The simulator's own seconds per job."""


def own(name: str) -> tuple[torch.nn.Module, Dataset]:
    shape, classes = SHAPES[name]
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (2000, *shape), dtype=np.uint8)
    y = random.integers(0, classes, 2000)
    y[:classes] = np.arange(classes)
    return models.build(name.split()[0], shape, classes, seed=0), from_user((x, y), (x[:200], y[:200]))


def config(devices: int, **changes: Any) -> Any:
    engine = {"device": "cpu", **changes.pop("engine", {})}
    settings: dict[str, Any] = {
        "data": {"name": "own"},
        "model": {"name": "own"},
        "training": {"epochs": EPOCHS, "batch_size": 50},
        "stop": {"updates": 20},
        "evaluation": {"every": 1e9, "local_devices": 1},
        "record": {"updates": False},
    }
    return load(None, (), method="aedfl-0", devices=devices, engine=engine, **settings, **changes)


def job_bytes(name: str) -> dict[str, int]:
    """A job, with a mask and without, and its result, as pickled with arrays outside the stream, Ray's way.

    Jobs that a server sends start from one model, which travels once; what is counted of it is a further job.
    """
    module, _ = own(name)
    vector = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    samples, key = np.arange(SAMPLES), (0, 3, 17, "train")

    def size(thing: Any) -> int:
        arrays: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(pack(thing), protocol=5, buffer_callback=arrays.append)
        return len(stream) + sum(array.raw().nbytes for array in arrays)

    plain = (vector, samples, key, 0.03, EPOCHS, None, None)
    masked = (vector, samples, key, 0.03, EPOCHS, vector != 0, None)
    result = (vector, torch.zeros(()), torch.zeros(()), torch.zeros(0))
    same = [size([plain] * count) for count in (1, 2)]
    return {
        "parameters": vector.numel(),
        "out": size([plain]),
        "out_with_mask": size([masked]),
        "out_of_a_server": same[1] - same[0],
        "back": size([result]),
    }


def nowhere() -> Any:
    """No task, only where tensors are to lie."""
    return SimpleNamespace(task=SimpleNamespace(device=torch.device("cpu")))


def echo(_: Any, jobs: list[Any]) -> list[tuple[Tensor, ...]]:
    return [tuple(job) for job in jobs]


def calls(pool: Pool, repeats: int = 50) -> dict[str, float]:
    """Seconds of an empty call to all actors, and bytes per second there and back together; the best of many."""
    shared = pool.share(nowhere)
    small = [(torch.zeros(()),)] * len(pool.actors)
    large = [(torch.randn(2**24),) for _ in pool.actors]

    def seconds(jobs: list[Any]) -> float:
        begin = time.perf_counter()
        pool.run(shared, echo, jobs, [1.0] * len(jobs))
        return time.perf_counter() - begin

    seconds(small), seconds(large)
    empty = [seconds(small) for _ in range(repeats)]
    moved = 2 * sum(tensor.nbytes for (tensor,) in large)
    return {
        "empty_call_seconds": min(empty),
        "empty_call_median_seconds": median(empty),
        "bytes_per_second": moved / min(seconds(large) for _ in range(10)),
    }


def processor_seconds(shop: Any, jobs: list[Any]) -> list[tuple[Tensor, ...]]:
    """What training takes of a processor, per job; other work on the machine hardly changes it."""
    begin = time.process_time()
    shop.trainer.train(Plan(epochs=1), [TrainJob(*job) for job in jobs])
    return [(torch.tensor((time.process_time() - begin) / len(jobs)),)] * len(jobs)


def flush(pool: Pool, name: str, jobs: int) -> dict[str, Any]:
    """Seconds of one flush's training, the best of three: on one thread, on as many as actors, and by the actors."""
    module, dataset = own(name)
    settings: dict[str, dict[str, Any]] = {
        "one_thread": {"threads": 1},
        "threads": {"threads": len(pool.actors)},
        "actors": {"ray": pool.address},
    }
    found: dict[str, list[float]] = {key: [] for key in settings}
    with Workshop(Own(module, dataset), pool) as shop:
        benches = {key: shop.bench(config(4, engine=engine)) for key, engine in settings.items()}
        start, rows = benches["threads"].task.start, np.arange(SAMPLES)
        work = [TrainJob(start, rows, (0, n, "train"), 0.03, 1) for n in range(jobs)]
        for repeat in range(4):
            for key, bench in benches.items():
                begin = time.perf_counter()
                bench.trainer.train(Plan(epochs=1), work)
                if repeat:
                    found[key].append(time.perf_counter() - begin)
        sent = [(start, rows, (0, n, "train"), 0.03, 1) for n in range(jobs)]
        there = benches["actors"].trainer.remote.run(processor_seconds, sent, [1.0] * jobs)  # type: ignore[attr-defined]
        used = {
            "here": float(processor_seconds(benches["one_thread"], sent)[0][0]),
            "actor": float(np.mean([float(seconds) for (seconds,) in there])),
        }
    wall = {key: min(times) for key, times in found.items()}
    return {"jobs": jobs, "samples_per_job": SAMPLES, "processor_seconds_per_job": used, "wall_seconds": wall}


class NoTraining:
    """Gives every model back as it is, so that what is left is the simulator."""

    def train(self, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        zero = torch.zeros(())
        return [TrainResult(job.vector.clone(), zero, zero, torch.zeros(0)) for job in jobs]


def simulator(name: str, devices: int = 100) -> float:
    """Processor seconds per job of everything but training, aedfl-0 on a CPU: events, selection, merging."""
    module, dataset = own(name)
    shop = Workshop(Own(module, dataset))
    run = Run(config(devices), shop, None, Silent())
    run.sim.trainer = NoTraining()
    begin = time.process_time()
    drive_all([run], shop)
    return (time.process_time() - begin) / run.sim.updates


def expected(setting: Setting, call: float, store: float, size: float) -> dict[str, Any]:
    """The model of docs/scaling.md: seconds of a flush by one trainer without Ray, on the cluster, and their ratio."""
    one = SAMPLES * EPOCHS / setting.samples_per_second
    alone = setting.jobs * (setting.here + one)
    moving = setting.jobs * size * (1 / store + (1 / setting.network if setting.network else 0.0))
    there = setting.jobs * setting.here + call + moving + math.ceil(setting.jobs / setting.actors) * one
    return asdict(setting) | {"alone_seconds": alone, "ray_seconds": there, "speed_up": alone / there}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--actors", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    own_seconds = simulator("lenet5 32x32x3")
    begin = time.perf_counter()
    pool = Pool("local", arguments.actors)
    start = time.perf_counter() - begin
    measured = calls(pool)
    sizes = {name: job_bytes(name) for name in SHAPES}
    size = sizes["lenet5 32x32x3"]["out"] + sizes["lenet5 32x32x3"]["back"]
    flushes = {name: flush(pool, name, jobs) for name, jobs in (("lenet5 32x32x3", 12), ("resnet8", 4))}
    core = SAMPLES / flushes["lenet5 32x32x3"]["processor_seconds_per_job"]["here"]
    settings = [
        Setting(f"{machines} x 8 {unit}", 8 * machines, jobs, rate, NETWORK if machines > 1 else None, here)
        for here in (own_seconds, LEAN)
        for machines in (1, 10)
        for unit, rate in (("cores", core), ("GPUs", 0.3e6), ("GPUs", 2e6))
        for jobs in (20, 100, 480)
    ]
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "actors": len(pool.actors),
        "start_seconds": start,
        "job_bytes": sizes,
        **measured,
        "simulator_seconds_per_job": own_seconds,
        "flush": flushes,
        "expected": [
            expected(one, measured["empty_call_seconds"], measured["bytes_per_second"], size) for one in settings
        ],
    }
    pool.close()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
