"""Whole runs of processes, with `kill -9`; minutes, so only with the slow tests."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aedfl.experiment.config import RunConfig, load
from aedfl.experiment.run import run as simulate
from aedfl.net.coordinator import Coordinator
from aedfl.net.credentials import Tls
from aedfl.net.local import Local

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def config(devices: int, **more: Any) -> RunConfig:
    stop = {"virtual_seconds": "none", "updates": 20, "target_accuracy": "none"}
    return load("digits", devices=devices, **{"stop": stop, **more})


def updates(local: Local, name: str) -> int:
    path = local.folder / name / "updates.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


async def reach(local: Local, name: str, count: int) -> None:
    async with asyncio.timeout(120):
        while updates(local, name) < count:  # noqa: ASYNC110 (it happens in another process)
            await asyncio.sleep(0.1)


def test_kill_9_of_a_device_and_of_the_coordinator(tmp_path: Path) -> None:
    async def test() -> Local:
        slow = {"epochs": 200}  # half a second each: nobody is done before all that is to happen has happened
        local = Local(config(3, method="aedfl-0", training=slow), tmp_path / "run")
        await local.start()
        try:
            for name in local.names:  # who has not begun when the coordinator goes would wait for it
                await reach(local, name, 4 if name == "device-1" else 1)
            port = local.port
            local.processes["device-1"].send_signal(signal.SIGKILL)
            await local.processes["device-1"].wait()
            before = updates(local, "device-1")
            await local.coordinator.close()
            await reach(local, "device-0", updates(local, "device-0") + 2)
            await local.launch("device-1")
            await reach(local, "device-1", before + 2)
            security = Tls(tmp_path / "run" / "tls" / "coordinator")
            local.coordinator = Coordinator(None, tmp_path / "run" / "coordinator", security, beat=1.0)
            await local.coordinator.start(f"127.0.0.1:{port}")
            await local.wait()
        finally:
            await local.close()
        return local

    local = asyncio.run(test())
    for index in range(3):
        folder = local.folder / f"device-{index}"
        rows = [json.loads(line) for line in (folder / "updates.jsonl").read_text().splitlines()]
        assert [row["update"] for row in rows] == list(range(1, 21)), "no update twice, none missing"
        assert {row["device"] for row in rows} == {index}
        assert all(bool(torch.isfinite(part).all()) for part in load_file(folder / "model.safetensors").values())


def real(settings: RunConfig, folder: Path) -> float:
    """Accuracy of the mean model (or the server's) of a run of processes."""

    async def run() -> float:
        local = Local(settings, folder)
        await local.start()
        try:
            await local.wait()
        finally:
            await local.close()
        return float(local.summary()["accuracy"])

    return asyncio.run(run())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("method", "count", "seeds"), [("aedfl", 8, 3), ("fedavg", 4, 1), ("fedbuff", 4, 1), ("sageflow", 4, 1)]
)
def test_a_run_of_processes_learns_as_much_as_the_simulator_says(
    tmp_path: Path, method: str, count: int, seeds: int
) -> None:
    """Not more than two points less after the same updates of each device: with and without a server.

    Devices that are processes of one machine are alike, so the simulator is given a fleet of equals. Who hears whom
    when is chance on a real machine: runs of AEDFL with one seed differ by two points and more, so means are compared.
    """
    stop = {"virtual_seconds": "none", "updates": 40, "target_accuracy": "none"}
    fleet = {"fastest": 1.0, "slowest": 1.0}
    runs = [config(count, method=method, stop=stop, fleet=fleet, seed=seed) for seed in range(seeds)]
    reached = [real(settings, tmp_path / f"run-{settings.seed}") for settings in runs]
    predicted = [float(simulate(settings)["accuracy"]) for settings in runs]
    assert mean(reached) >= mean(predicted) - 0.02, f"real {reached}, simulated {predicted}"
