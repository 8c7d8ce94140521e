"""A run whose work is done by Ray actors writes the record of one that does it alone, byte for byte."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aedfl.algorithms import METHODS
from aedfl.errors import UserError
from aedfl.experiment.compare import compare
from aedfl.experiment.config import RunConfig, config_hash, elsewhere
from aedfl.experiment.progress import Silent
from aedfl.experiment.run import Run, claim, resume, run
from aedfl.experiment.workshop import Own, Workshop
from aedfl.graph import Op
from aedfl.ops import WeightedMean
from experiment.small import interrupted, pruning, record, small, whole

OWN_MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 6), nn.Linear(6, classes)

    def forward(self, x):
        return self.b(self.a(x.flatten(1)).tanh())
"""
OWN_METHOD = """
from dataclasses import dataclass

from aedfl import Context, Method
from aedfl.ops import HeldOut

@dataclass(frozen=True)
class Mine(HeldOut):
    '''An op that only this file knows, on the task's data.'''

@dataclass(frozen=True)
class Hyper:
    '''None.'''

async def device(ctx: Context, hyper: Hyper) -> None:
    model = ctx.initial()
    while ctx.running:
        trained = await ctx.train(model)
        model = trained.model
        loss, _ = await ctx.compute(Mine(ctx.task), model.vector, None, ctx.batch(5, "look"), flops=1e4, purpose="look")
        ctx.publish(model, loss=loss)

METHOD = Method("mine", "looks at five samples", Hyper(), device)
"""


@pytest.fixture(scope="module")
def pool(cluster: str) -> Iterator[Any]:
    """Two actors, started once."""
    import ray

    from aedfl.training.actors import Pool

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    pool = Pool(cluster)
    yield pool
    pool.close()


def on(cluster: str, config: RunConfig) -> RunConfig:
    return elsewhere(config, cluster)


def mixed() -> RunConfig:
    """Momentum, a proximal term, decay and clipping; convolutions, one model at a time."""
    return small(
        "fedprox",
        hyper={"mu": 0.1},
        model={"name": "cnn", "options": {}},
        training={"weight_decay": 0.01, "clip_norm": 1.0},
        engine={"trainer": "sequential", "threads": 1},
        stop={"virtual_seconds": 15.0},
    )


CONFIGS = {"pruning": pruning, "fedavg": lambda: small("fedavg"), "mixed": mixed}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_record_is_that_of_one_process(name: str, pool: Any, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    with Workshop(pool=pool) as workshop:
        run(on(pool.address, config), tmp_path / "run", workshop=workshop)
    assert record(tmp_path / "run") == whole(config)
    wall = json.loads((tmp_path / "run" / "wall.json").read_text())
    assert (wall["actors"], wall["actors_replaced"]) == (2, pool.replaced)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_the_record_of_one_process(method: str, pool: Any, tmp_path: Path) -> None:
    early = {"update": 3} if method in ("hap", "hrank", "fedap") else {}
    config = small(method, hyper=early, model={"name": "cnn", "options": {}}, data={"held_out": 0.1})
    with Workshop(pool=pool) as workshop:
        run(on(pool.address, config), tmp_path / "run", workshop=workshop)
    assert record(tmp_path / "run") == whole(config)


def test_the_cluster_is_no_part_of_the_fingerprint() -> None:
    config = small()
    there = small(engine={"ray": "somewhere:6379", "actors": 7})
    assert there.engine.ray == "somewhere:6379" and config_hash(there) == config_hash(config)
    assert elsewhere(there, "none").engine.ray is None


def test_a_comparison_shares_the_actors_and_says_how_many(pool: Any, tmp_path: Path) -> None:
    labels: list[str] = []

    class Watcher(Silent):
        def start(self, label: str, total_virtual: float | None) -> None:
            labels.append(label)

    configs = [small("aedfl-0"), small("fedbuff")]
    with Workshop(pool=pool) as shop:
        compare([on(pool.address, c) for c in configs], tmp_path, progress=Watcher(), workshop=shop)
    assert labels == ["2 runs on 2 Ray actors, best"]
    assert [record(tmp_path / f"{config.method}-seed0") for config in configs] == [whole(c) for c in configs]


def test_a_run_goes_on_at_a_cluster_and_without_one(pool: Any, tmp_path: Path) -> None:
    config, folder = pruning(), tmp_path / "torn"
    claim(folder, config, force=False)
    assert not interrupted(folder, 3)
    with Workshop(pool=pool) as workshop:
        one = Run(on(pool.address, config), workshop, folder, Silent())
        steps = one.drive()
        for _ in range(3):
            next(steps)
            workshop.queue.flush()
        one.record.close()
    resume(folder, ray="none")
    assert record(folder) == whole(config)


class Deadly:
    """A loss that kills the process that first uses it after there is such a file; not the process it was made in."""

    def __init__(self, path: Path) -> None:
        self.path, self.home = path, os.getpid()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != self.home:
            with suppress(FileNotFoundError):
                self.path.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, target)


def test_an_actor_killed_in_the_middle_of_its_jobs_leaves_no_trace(pool: Any, tmp_path: Path) -> None:
    weapon = tmp_path / "weapon"
    own, config = Own(loss=Deadly(weapon)), small("fedavg", stop={"virtual_seconds": 8.0})
    run(config, tmp_path / "alone", workshop=Workshop(own))
    claim(tmp_path / "run", config, force=False)
    before = pool.replaced
    with Workshop(own, pool) as workshop:
        one = Run(on(pool.address, config), workshop, tmp_path / "run", Silent())
        steps = one.drive()
        for _ in range(3):
            next(steps)
            workshop.queue.flush()
        weapon.touch()
        while next(steps, one) is not one:
            workshop.queue.flush()
        one.finish()
    assert not weapon.exists() and pool.replaced == before + 1
    assert record(tmp_path / "run") == record(tmp_path / "alone")


@dataclass(frozen=True)
class Where(Op):
    """Which process ran it; with a task, on its data."""

    task: Any
    outputs: ClassVar[int] = 1

    def run(self, jobs: Any) -> list[tuple[Tensor, ...]]:
        return [(torch.tensor([os.getpid(), len(self.task.dataset.train)]),) for _ in jobs]


def test_what_looks_at_data_leaves_and_arithmetic_stays(pool: Any) -> None:
    with Workshop(pool=pool) as workshop:
        bench = workshop.bench(on(pool.address, small()))
        other = Workshop().bench(small())
        count = len(bench.task.dataset.train)
        (there,) = workshop.queue.submit(Where(bench.task), (), (0,))
        (here,) = workshop.queue.submit(Where(other.task), (), (1,))
        (mean,) = workshop.queue.submit(WeightedMean(), ((torch.ones(1), torch.zeros(1)), (1.0, 1.0)), (2,))
        workshop.queue.flush()
        assert here.get().tolist() == [os.getpid(), count] and mean.get().tolist() == [0.5]
        assert there.get()[0] != os.getpid() and there.get()[1] == count


def test_models_and_ops_of_a_users_file_travel(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(OWN_MODEL)
    (tmp_path / "mine.py").write_text(OWN_METHOD)
    model = {"name": f"{tmp_path / 'net.py'}:Net", "options": {}}
    config = small(str(tmp_path / "mine.py"), model=model, stop={"virtual_seconds": 4.0})
    with Workshop(pool=pool) as workshop:
        run(on(pool.address, config), tmp_path / "run", workshop=workshop)
    assert record(tmp_path / "run") == whole(config)


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("ray", "actors"):
        monkeypatch.delitem(sys.modules, f"aedfl.training.{name}", raising=False)
        monkeypatch.delattr(f"aedfl.training.{name}", raising=False)
    with pytest.raises(UserError, match=r"engine.ray needs the extra 'ray' \(pip install 'aedfl\[ray\]'\)"):
        Workshop().bench(small(engine={"ray": "local"}))


def aedfl(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from aedfl.cli import main; main()", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_cluster_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    process = aedfl("run", "digits", "--ray", "127.0.0.1:1", "--out", str(tmp_path / "run"))
    out, err = process.communicate()
    assert process.returncode == 2 and out == ""
    assert err == "error: engine.ray = '127.0.0.1:1': no Ray cluster answers there: Connection refused\n"


SETTINGS = ("--set", "stop.virtual_seconds=60", "--method", "aedfl", "--set", "hyper.prune_start=2", "--quiet")


def actors_below(root: int) -> list[int]:
    """Processes of Ray actors that descend from `root`, and so from no cluster but its own."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(pid), int(parent), args) for pid, parent, args in (line.split(None, 2) for line in found.splitlines())]
    below = {root}
    for _ in range(4):
        below |= {pid for pid, parent, _ in rows if parent in below}
    return [pid for pid, _, args in rows if pid in below and re.search(r"ray::Actor\b", args)]


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, str]]:
    """Another process with a cluster of two workers: its number and the address; the token is the test's own."""
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    code = """
import ray, sys
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
        process.communicate()


@pytest.mark.slow
def test_a_cluster_with_another_token_ends_with_a_sentence(
    head: tuple[int, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    process = aedfl("run", "digits", "--ray", head[1], "--out", str(tmp_path / "run"))
    out, err = process.communicate()
    assert process.returncode == 2 and out == ""
    *rays_own, sentence = err.splitlines()
    assert all(re.match(r"\[.*gcs_client", line) for line in rays_own), "Ray tells each try; nothing else is told"
    assert sentence.startswith("error: engine.ray = ") and "is RAY_AUTH_TOKEN the cluster's token?" in sentence


@pytest.mark.slow
@pytest.mark.parametrize("place", ["here", "there"])
def test_kill_9_of_an_actor_from_outside(place: str, head: tuple[int, str], tmp_path: Path) -> None:
    """The command as a user gives it; an actor is killed as soon as there are metrics."""
    alone = aedfl("run", "digits", *SETTINGS, "--out", str(tmp_path / "alone"))
    assert alone.wait() == 0
    address = "local" if place == "here" else head[1]
    process = aedfl("run", "digits", *SETTINGS, "--out", str(tmp_path / "run"), "--ray", address)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    os.kill(actors_below(process.pid if place == "here" else head[0])[0], signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0 and out == f"{tmp_path / 'run'}\n"
    assert re.fullmatch(r"a Ray actor died; its \d+ jobs are run again\n", err)
    assert record(tmp_path / "run") == record(tmp_path / "alone")
    assert json.loads((tmp_path / "run" / "wall.json").read_text())["actors_replaced"] == 1
