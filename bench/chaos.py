"""Chaos: devices in network namespaces of their own, and a fault every few seconds.

`python bench/chaos.py --seconds 600`. Everything happens inside namespaces that this script makes for itself (Linux,
unprivileged user namespaces; no traffic leaves the machine). Faults: kill -9 of a device or of the coordinator and its
return, stop and continue, a device's link cut, the two halves of the network cut apart. At the end: does every
device have a whole, finite model? Was every model that was received one that was sent, checksum by checksum? Are
the records without gaps? Did the accuracy go on rising?
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

NET = "10.77.0"
CLI = [sys.executable, "-c", "from aedfl.cli import main; main()"]


def sh(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


class Member:
    """One process in its namespace, started and killed again and again."""

    def __init__(self, name: str, number: int, side: int, folder: Path, command: list[str]) -> None:
        self.name, self.number, self.folder, self.command = name, number, folder, command
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.holder = subprocess.Popen(["unshare", "-n", "sleep", "100000"])
        self.link = f"h{number}"
        time.sleep(0.1)
        sh("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder.pid))
        sh("ip", "link", "set", self.link, "master", f"br{side}", "up")
        for words in (("addr", "add", f"{NET}.{number}/24", "dev", "eth0"), ("link", "set", "eth0", "up"),
                      ("link", "set", "lo", "up")):  # fmt: skip
            sh("nsenter", "-t", str(self.holder.pid), "-n", "ip", *words)

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "output.txt").open("ab") as output:
            command = ["nsenter", "-t", str(self.holder.pid), "-n", *self.command]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def cut(self, cut: bool) -> None:
        sh("ip", "link", "set", self.link, "down" if cut else "up")


class Chaos:
    """The network, its members, and what befalls them."""

    def __init__(self, folder: Path, devices: int, seconds: float, seed: int) -> None:
        self.folder, self.rng, self.seconds = folder, np.random.default_rng(seed), seconds
        for side in (0, 1):
            sh("ip", "link", "add", f"br{side}", "type", "bridge")
            sh("ip", "link", "set", f"br{side}", "up")
        sh("ip", "link", "add", "x0", "type", "veth", "peer", "name", "x1")
        for side in (0, 1):
            sh("ip", "link", "set", f"x{side}", "master", f"br{side}", "up")
        names = [f"device-{index}" for index in range(devices)]
        sh(*CLI, "certs", "init", str(folder / "tls"), *names)
        config = ["--set", f"devices={devices}", "--set", f"stop.virtual_seconds={seconds + 40}", "--method", "aedfl",
                  "--set", "training.epochs=1", "--set", "evaluation.every=10"]  # fmt: skip
        places = ["--listen", f"{NET}.1:7700", "--state", str(folder / "c"), "--watch", "127.0.0.1:0", "--beat", "1"]
        coordinator = [*CLI, "coordinator", "digits", *config, *places, "--tls", str(folder / "tls" / "coordinator")]
        self.coordinator = Member("coordinator", 1, 0, folder / "c", coordinator)
        self.devices = [
            Member(name, 10 + i, i % 2, folder / name, [
                *CLI, "device", "--coordinator", f"{NET}.1:7700", "--tls", str(folder / "tls" / name), "--out",
                str(folder / name), "--token-file", str(folder / "c" / "token"), "--listen", f"{NET}.{10 + i}:7701",
                "--index", str(i),
            ])
            for i, name in enumerate(names)
        ]  # fmt: skip
        self.pending: list[tuple[float, Any]] = []
        self.faults: Counter[str] = Counter()
        self.broken_states = 0
        self.curve: list[float] = []

    def run(self) -> None:
        self.coordinator.start()
        while not (self.folder / "c" / "token").exists():
            time.sleep(0.2)
        for device in self.devices:
            device.start()
        while not all((device.folder / "updates.jsonl").exists() for device in self.devices):
            time.sleep(0.5)
        begin = time.monotonic()
        while time.monotonic() - begin < self.seconds:
            if time.monotonic() - begin >= self.seconds / 10 * (1 + len(self.curve)):
                self.measure()
            self.fault()
            end = time.monotonic() + float(self.rng.uniform(2.0, 5.0))
            while time.monotonic() < end:
                self.mend(time.monotonic())
                time.sleep(0.1)
        self.mend(float("inf"))
        for device in self.devices:
            self.wait(device)
        self.measure()

    def measure(self) -> None:
        """Accuracy of the mean of what the devices have on their disks at this moment."""
        from aedfl.experiment.config import load
        from aedfl.net.local import measure

        config = load("digits", [f"devices={len(self.devices)}"], method="aedfl")
        self.curve.append(round(measure(config, [device.folder for device in self.devices]), 4))

    def wait(self, device: Member) -> None:
        assert device.process is not None
        try:
            device.process.wait(300)
        except subprocess.TimeoutExpired:
            print(f"{device.name} did not end by itself")
            device.kill()

    def later(self, action: Any, low: float, high: float) -> None:
        self.pending.append((time.monotonic() + float(self.rng.uniform(low, high)), action))

    def mend(self, now: float) -> None:
        due = [action for when, action in self.pending if when <= now]
        self.pending = [(when, action) for when, action in self.pending if when > now]
        for action in due:
            action()

    def fault(self) -> None:
        device = self.devices[int(self.rng.integers(len(self.devices)))]
        kind = str(self.rng.choice(["kill", "kill", "stop", "cut", "cut", "halves", "coordinator"]))
        self.faults[kind] += 1
        if kind == "kill":
            device.kill()
            self.look(device)
            self.later(device.start, 1, 6)
        elif kind == "stop":
            device.signal(signal.SIGSTOP)
            self.later(lambda: device.signal(signal.SIGCONT), 1, 8)
        elif kind == "cut":
            device.cut(True)
            self.later(lambda: device.cut(False), 1, 8)
        elif kind == "halves":
            sh("ip", "link", "set", "x0", "down")
            self.later(lambda: sh("ip", "link", "set", "x0", "up"), 3, 10)
        else:
            self.coordinator.kill()
            self.later(self.coordinator.start, 1, 8)

    def look(self, device: Member) -> None:
        """After a kill the state on the disk must be a whole one."""
        from aedfl.net import state

        path = device.folder / "state.safetensors"
        try:
            state.read(path, state.finder({}), ("index", "update", "model"))
        except Exception as error:
            self.broken_states += 1
            print(f"{device.name}: {error}")

    def close(self) -> None:
        for member in (*self.devices, self.coordinator):
            member.kill()
            member.holder.kill()

    def verdict(self) -> dict[str, Any]:
        logs = {device.number - 10: _log(device.folder) for device in self.devices}
        offered = {
            (source, line["to"], line["boot"], line["number"]): line["checksum"]
            for source, lines in logs.items() for line in lines if line.get("event") == "offered"
        }  # fmt: skip
        received = [
            ((line["from"], target, line["boot"], line["number"]), line["checksum"])
            for target, lines in logs.items() for line in lines if line.get("event") == "received"
        ]  # fmt: skip
        mixed = sum(offered.get(key) != checksum for key, checksum in received)
        return {
            "seconds": self.seconds, "devices": len(self.devices), "faults": dict(self.faults),
            "restarts": sum(device.starts - 1 for device in self.devices),
            "coordinator_restarts": self.coordinator.starts - 1, "broken_states": self.broken_states,
            "valid_models": sum(_valid(device.folder) for device in self.devices),
            "received": len(received), "mixed": mixed, "twice": len(received) - len({key for key, _ in received}),
            "gaps": sum(_gaps(device.folder) for device in self.devices),
            "updates": [len(_rows(device.folder / "updates.jsonl")) for device in self.devices],
            "accuracy_of_the_mean_model": self.curve,
        }  # fmt: skip


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def _log(folder: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("log.jsonl*")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue  # a line that a kill has cut
    return lines


def _valid(folder: Path) -> bool:
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    return path.exists() and all(bool(part.isfinite().all()) for part in load_file(path).values())


def _gaps(folder: Path) -> int:
    numbers = [row["update"] for row in _rows(folder / "updates.jsonl")]
    return sum(b != a + 1 for a, b in zip([0, *numbers], numbers, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.inside:
        os.execvp("unshare", ["unshare", "-rn", sys.executable, __file__, "--inside", *sys.argv[1:]])
    sh("ip", "link", "set", "lo", "up")
    with tempfile.TemporaryDirectory() as scratch:
        chaos = Chaos(Path(scratch), given.devices, given.seconds, given.seed)
        try:
            chaos.run()
        finally:
            chaos.close()
        text = json.dumps(chaos.verdict(), indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
