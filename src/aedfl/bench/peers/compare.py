"""The same work by several simulators in turn: clients and samples per second, processor time, memory.

Every client trains the same network on as many samples, an epoch in every round. Random data, set-up and a first
round are not counted. Simulators take turns, several times, because a machine's speed drifts; the ratio to ours is the
median of the ratios within a turn.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...data.cache import cache_folder
from ...errors import UserError
from ..stamp import stamp
from ..table import Figures, Tell, quiet, short
from .drivers.processes import family, pss_bytes
from .environments import RECIPES, Unavailable, interpreter, last_line, versions

DRIVERS = Path(__file__).parent / "drivers"
OURS = "aedfl"
LIMIT = 1800
"""Seconds after which a simulator is stopped."""
SAMPLING = 1.0
"""Seconds between looks at the memory."""


@dataclass(frozen=True)
class Peer:
    """How a simulator is started."""

    environment: str
    script: str
    what: str
    launcher: tuple[str, ...] = ()
    alone: bool = False
    """One process does all the work; torch may use several threads in it."""


TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
PEERS = {
    OURS: Peer(OURS, "aedfl_driver.py", "FedAvg, a thread per core"),
    "pfl-1": Peer("pfl", "pfl_driver.py", "FedAvg, one process", alone=True),
    "pfl-2": Peer("pfl", "pfl_driver.py", "FedAvg, two processes", TWO),
    "flower": Peer("flower", "flower_driver.py", "FedAvg, Ray, a core per client"),
    "fluke": Peer("fluke", "fluke_driver.py", "FedAvg, one process", alone=True),
    "gossipy": Peer("gossipy", "gossipy_driver.py", "gossip learning, one process", alone=True),
}


@dataclass(frozen=True)
class Options:
    """How much work, by whom, how often."""

    peers: tuple[str, ...] = tuple(PEERS)
    clients: int = 100
    samples: int = 600
    batch: int = 50
    rounds: int = 3
    warm_up: int = 1
    lr: float = 0.03
    repeats: int = 3
    threads: int = 1
    """Of torch in a simulator that is one process; more are slower where other work is done beside it."""
    python: str = sys.executable
    """Makes the environments."""
    folder: Path | None = None
    """Where they are; by default in the cache folder."""

    def check(self) -> None:
        unknown = [name for name in self.peers if name not in PEERS]
        if unknown or not self.peers:
            raise UserError(f"--peers has {', '.join(unknown) or 'no name'}; allowed are {', '.join(PEERS)}")


Run = dict[str, float]


def measure(options: Options, tell: Tell = quiet) -> dict[str, Any]:
    """Figures of every simulator that ran, and why the others did not."""
    options.check()
    stamped, skipped = stamp(), {}
    total = len(options.peers) * (1 + options.repeats)
    pythons: dict[str, Path] = {}
    for number, name in enumerate(options.peers):
        tell(f"environment of {name}", number, total)
        try:
            pythons[name] = _python(PEERS[name].environment, options)
        except Unavailable as error:
            skipped[name] = str(error)
    runs: dict[str, list[Run]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder), options)
        for repeat in range(options.repeats):
            for number, name in enumerate(pythons):
                tell(f"{name}, turn {repeat + 1}", len(options.peers) * (1 + repeat) + number, total)
                if name not in skipped:
                    try:
                        runs[name].append(_run(PEERS[name], pythons[name], Path(folder), options))
                    except Unavailable as error:
                        skipped[name] = str(error)
    tell("done", total, total)
    ran = {name: turns for name, turns in runs.items() if name not in skipped}
    found = {name: _figures(turns, options) | {"what": PEERS[name].what} for name, turns in ran.items()}
    for name, figures in found.items():
        figures["versions"] = _versions(PEERS[name].environment, pythons[name])
        figures["ours_over_it"] = _ratio(runs.get(OURS, []), runs[name])
    work = asdict(options) | {"folder": None, "python": Path(options.python).name}
    return stamped | {"options": work, "peers": found, "skipped": skipped}


def table(found: dict[str, Any]) -> Figures:
    """One line per simulator; memory is proportional set size, the sum over all its processes."""
    rows: list[tuple[str, ...]] = []
    for name, figures in found["peers"].items():
        ratio = figures["ours_over_it"]
        rows.append(
            (
                name,
                f"{figures['clients_per_second']:.2f}",
                short(figures["samples_per_second"]),
                "–" if ratio is None else f"{ratio:.2f}",
                f"{1e3 * figures['cpu_seconds_per_client']:.0f}",
                f"{figures['peak_pss_mib']:.0f}",
                f"{figures['set_up_seconds']:.0f}",
            )
        )
    columns = (
        "simulator", "clients/s", "samples/s", "ours / it", "CPU ms a client", "peak MiB (PSS)", "set-up s",
    )  # fmt: skip
    how = "; ".join(f"{name}: {figures['what']}" for name, figures in found["peers"].items())
    skipped = tuple(f"{name} was skipped: {reason}" for name, reason in found["skipped"].items())
    return Figures(columns, rows, (how, *skipped))


def _python(environment: str, options: Options) -> Path:
    if environment == OURS:
        return Path(sys.executable)
    folder = options.folder or cache_folder() / "peers"
    return interpreter(RECIPES[environment], folder, options.python)


def _versions(environment: str, python: Path) -> dict[str, str]:
    """Of torch and of what the recipe names; ours are in the stamp."""
    if environment == OURS:
        return {}
    named = {requirement.partition("==")[0].partition("[")[0] for requirement in RECIPES[environment].requirements}
    return {name: version for name, version in versions(python).items() if name in {"torch", "numpy", "ray", *named}}


def _prepare(folder: Path, options: Options) -> None:
    code = "import sys; from pathlib import Path; from work import prepare; "
    code += f"prepare(Path(sys.argv[1]), {options.clients}, {options.samples})"
    subprocess.run([sys.executable, "-c", code, str(folder)], env=_environment(), check=True)


def _environment() -> dict[str, str]:
    """Drivers find what they share, and ours the package; one thread unless a driver asks for more."""
    places = (str(DRIVERS), str(Path(__file__).parents[3]))
    quiet_ones = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    return os.environ | quiet_ones | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}


def _run(peer: Peer, python: Path, folder: Path, options: Options) -> Run:
    """One simulator from its start to its end, in a folder of its own, with a watch on its memory."""
    place = Path(tempfile.mkdtemp(dir=folder)) / "run"
    place.mkdir()
    out, cores = place / "found.json", os.cpu_count() or 1
    arguments = {
        "clients": options.clients, "samples": options.samples, "batch": options.batch, "rounds": options.rounds,
        "warm_up": options.warm_up, "lr": options.lr, "threads": options.threads if peer.alone else 1, "cores": cores,
        "data": folder, "out": out, "started": time.time(), "parent": os.getpid(),
    }  # fmt: skip
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    command = [str(python), *peer.launcher, str(DRIVERS / peer.script), *flags]
    with (place / "log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=place, env=_environment(), stdout=log, stderr=log, start_new_session=True
        )
        peak = _watch(process)
        log.seek(0)
        said = log.read()
    if not out.is_file():
        raise Unavailable(f"its run ended with code {process.returncode}: {last_line(said)}")
    found: Run = json.loads(out.read_text())
    return found | {"peak_pss_mib": peak / 2**20}


def _watch(process: subprocess.Popen[bytes], look: Callable[[list[int]], int] = pss_bytes) -> int:
    """Waits for the process to end; the largest sum of its family's memory that was seen."""
    peak, begin = 0, time.monotonic()
    try:
        while process.poll() is None:
            peak = max(peak, look(family(process.pid)))
            if time.monotonic() - begin > LIMIT:
                raise Unavailable(f"it was stopped after {LIMIT} seconds")
            time.sleep(SAMPLING)
    finally:
        if process.poll() is None:
            for pid in family(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()
    return peak


def _figures(turns: list[Run], options: Options) -> dict[str, Any]:
    rate = median(turn["updates"] / turn["seconds"] for turn in turns)
    return {
        "clients_per_second": rate,
        "samples_per_second": rate * options.samples,
        "cpu_seconds_per_client": median(turn["cpu_seconds"] / turn["updates"] for turn in turns),
        "peak_pss_mib": median(turn["peak_pss_mib"] for turn in turns),
        "set_up_seconds": median(turn["set_up_seconds"] for turn in turns),
        "turns": turns,
    }


def _ratio(ours: list[Run], theirs: list[Run]) -> float | None:
    """How many times as fast ours is: the median of the turns."""
    pairs = list(zip(ours, theirs, strict=False))
    return median(it["seconds"] / our["seconds"] for our, it in pairs) if pairs else None
