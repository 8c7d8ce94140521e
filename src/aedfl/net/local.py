"""A whole run on this machine for a first try: a coordinator here, and every device a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..algorithms import get
from ..context import SERVER, Model
from ..errors import AedflError, UserError
from ..experiment.config import RunConfig
from ..rules.merge import weighted_mean
from . import state
from .coordinator import Coordinator
from .credentials import Tls
from .identity import COORDINATOR, Authority
from .kit import gather
from .protocol_pb2 import Status
from .watch import Watch

Progress = Callable[[Status], None]


class Local:
    """A folder with the run's certificates, the coordinator's state, and one folder per device."""

    def __init__(self, config: RunConfig, folder: Path, extra: Sequence[str] = (), beat: float = 1.0) -> None:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"folder {folder} is not empty; name a new one with --out")
        self.config, self.folder, self.extra, self.beat = config, folder, list(extra), beat
        self.has_server = get(config.method).server is not None
        self.names = [f"device-{index}" for index in range(config.devices)] + ["server"] * self.has_server
        authority = Authority.create(folder / "tls")
        for name in (COORDINATOR, *self.names):
            authority.issue(name, ["127.0.0.1"], days=30)
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, watch: str | None = None) -> None:
        self.coordinator = Coordinator(
            self.config, self.folder / COORDINATOR, Tls(self.folder / "tls" / COORDINATOR), beat=self.beat,
            with_server=self.has_server,
        )  # fmt: skip
        self.token = self.coordinator.ledger.new_token(24.0, len(self.names))
        self.port = await self.coordinator.start("127.0.0.1:0")
        self.watch = Watch(self.coordinator) if watch else None
        if self.watch is not None and watch:
            await self.watch.start(watch)
        for name in self.names:
            await self.launch(name)

    async def launch(self, name: str) -> None:
        """Starts (again) the process of that name."""
        role, extra = ("server", []) if name == "server" else ("device", ["--index", name.partition("-")[2]])
        command = [sys.executable, "-c", "from aedfl.cli import main; main()", role, *extra]
        command += ["--coordinator", f"127.0.0.1:{self.port}", "--tls", str(self.folder / "tls" / name)]
        command += ["--out", str(self.folder / name), "--token-file", str(self._token_file())]
        if self.config.method.endswith(".py"):
            command += ["--method", self.config.method]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.folder.joinpath(name).mkdir(exist_ok=True)
        with (self.folder / name / "output.txt").open("ab") as output:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *command, *(self.extra if role == "device" else ()), stdin=asyncio.subprocess.DEVNULL, stdout=output,
                stderr=output, env=environment,
            )  # fmt: skip

    def _token_file(self) -> Path:
        path = self.folder / COORDINATOR / "token"
        if not path.exists():
            path.touch(0o600)
            path.write_text(self.token)
        return path

    async def wait(self, progress: Progress = lambda _: None) -> None:
        """Until every process has ended; one that fails ends the run with what it said."""
        waiting = {asyncio.ensure_future(process.wait()): name for name, process in self.processes.items()}
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            progress(self.coordinator.status())
            for task in done:
                name = waiting.pop(task)
                if task.result() != 0:
                    said = (self.folder / name / "output.txt").read_text().strip().splitlines()
                    raise AedflError(f"{name} ended with code {task.result()}: {said[-1] if said else 'no output'}")

    async def close(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self.processes.values()))
        if self.watch is not None:
            await self.watch.close()
        await self.coordinator.close()

    def summary(self) -> dict[str, Any]:
        """The mean model's accuracy, as the simulator measures it, and what the devices say of themselves."""
        rows = [json.loads((self.folder / name / "summary.json").read_text()) for name in self.names]
        devices = [row for row in rows if row["index"] != SERVER]
        local = [row["accuracy"] for row in devices if row["accuracy"] is not None]
        found = {
            "method": self.config.method, "devices": len(devices), "seed": self.config.seed,
            "accuracy": measure(self.config, [self.folder / name for name in self.names]),
            "local_accuracy": float(np.mean(local)) if local else None,
            "updates": sum(row["updates"] for row in devices), "seconds": max(row["seconds"] for row in rows),
            "bytes_sent": sum(row["bytes_sent"] for row in rows),
            "messages_lost": sum(row["messages_lost"] for row in rows), "refused": sum(row["refused"] for row in rows),
        }  # fmt: skip
        (self.folder / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
        return found


def measure(config: RunConfig, folders: Sequence[Path]) -> float:
    """Accuracy of the server's model, or of the devices' mean model, on the test data of a public set."""
    kit = gather(config)
    assert kit.rows is not None
    find = state.finder({})
    snapshots = [shot for folder in folders if (shot := _snapshot(folder, find)) is not None]
    served = [shot["model"] for shot in snapshots if shot["index"] == SERVER and shot["model"] is not None]
    local = [shot for shot in snapshots if shot["index"] != SERVER and shot["model"] is not None]
    models: list[Model] = served or [shot["model"] for shot in local]
    weights = [1.0] if served else [float(len(kit.rows.train[shot["index"]])) for shot in local]
    vectors = [model.vector.get() for model in models]
    masks = None
    if any(model.mask is not None for model in models):
        ones = torch.ones_like(vectors[0], dtype=torch.bool)
        masks = [ones if model.mask is None else model.mask.get() for model in models]
    mean = weighted_mean(vectors, weights, masks)
    return kit.evaluator.score([mean], kit.rows.evaluation, kit.rows.test)[0][0]


def _snapshot(folder: Path, find: state.Find) -> Any:
    """A device's last state, without what its program keeps for itself."""
    return state.read(folder / "state.safetensors", find, ("index", "update", "model"))
