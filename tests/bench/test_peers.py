"""`aedfl bench peers`: environments, turns, memory and what is said about simulators that do not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aedfl.bench.peers import compare, environments
from aedfl.bench.peers.compare import DRIVERS, OURS, PEERS, Options, measure, table
from aedfl.bench.peers.drivers.processes import below, cpu_seconds, family, pss_bytes
from aedfl.bench.peers.environments import RECIPES, TORCH, Recipe, Unavailable, interpreter
from aedfl.cli import app

SMALL = Options((OURS,), clients=3, samples=10, batch=5, rounds=1, repeats=1)


def test_ours_runs_for_real_and_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SAMPLING", 0.05)
    found = measure(SMALL)
    (turn,) = found["peers"][OURS]["turns"]
    assert turn["updates"] == 3 and found["skipped"] == {} and found["peers"][OURS]["ours_over_it"] == 1.0
    assert 0 < turn["seconds"] < 100 and turn["set_up_seconds"] > 0 and turn["cpu_seconds"] >= 0
    assert 50 < turn["peak_pss_mib"] < 2000
    assert found["peers"][OURS]["samples_per_second"] == pytest.approx(10 * 3 / turn["seconds"])


def test_simulators_take_turns_and_ratios_are_within_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    seconds = {"aedfl": iter((1.0, 10.0, 2.0)), "pfl-2": iter((3.0, 20.0, 8.0))}

    def run(peer: Any, *_: Any) -> dict[str, float]:
        name = next(name for name, known in PEERS.items() if known is peer)
        order.append(name)
        took = next(seconds[name])
        return {"seconds": took, "cpu_seconds": took, "updates": 6, "peak_pss_mib": 5.0, "set_up_seconds": 1.0}

    monkeypatch.setattr(compare, "_run", run)
    monkeypatch.setattr(compare, "_python", lambda *_: Path(sys.executable))
    monkeypatch.setattr(compare, "_versions", lambda *_: {"torch": "2.13.0"})
    found = measure(replace(SMALL, peers=("aedfl", "pfl-2"), repeats=3))
    assert order == ["aedfl", "pfl-2"] * 3
    assert found["peers"]["pfl-2"]["ours_over_it"] == 3.0  # of 3, 2 and 4
    assert found["peers"]["pfl-2"]["clients_per_second"] == 6 / 8
    assert table(found).rows[1][:4] == ("pfl-2", "0.75", "7.5", "3.00")


def test_one_that_cannot_be_installed_or_run_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def python(environment: str, _: Options) -> Path:
        if environment == "fluke":
            raise Unavailable("no such package")
        return Path(sys.executable)

    broken = replace(PEERS["gossipy"], script="no_such_driver.py")
    monkeypatch.setattr(compare, "_python", python)
    monkeypatch.setitem(PEERS, "gossipy", broken)
    found = measure(replace(SMALL, peers=("fluke", "gossipy")))
    assert found["peers"] == {} and found["skipped"]["fluke"] == "no such package"
    assert "ended with code 2" in found["skipped"]["gossipy"] and "no_such_driver" in found["skipped"]["gossipy"]
    assert any(note.startswith("fluke was skipped: no such package") for note in table(found).notes)


def test_a_run_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LIMIT", 0)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(Unavailable, match="stopped after 0 seconds"):
        compare._watch(process)
    assert process.poll() is not None


def test_an_environment_is_made_once_with_torch_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def call(command: list[str]) -> str:
        calls.append(command)
        (tmp_path / "x").mkdir(exist_ok=True)
        return ""

    monkeypatch.setattr(environments, "call", call)
    recipe = Recipe("x", ("peer==1",))
    python = interpreter(recipe, tmp_path, "python9")
    assert python == tmp_path / "x" / "bin" / "python"
    assert calls[0] == ["python9", "-m", "venv", str(tmp_path / "x")]
    assert calls[1][-2:] == [TORCH, "numpy"] and calls[2][-2:] == [TORCH, "peer==1"]
    interpreter(recipe, tmp_path, "python9")
    assert len(calls) == 3
    interpreter(Recipe("x", ("peer==2",)), tmp_path, "python9")
    assert len(calls) == 6


def test_a_failing_command_says_its_last_line() -> None:
    with pytest.raises(Unavailable, match=r"-c .* failed: No matching distribution"):
        environments.call([sys.executable, "-c", "import sys; sys.exit('why\\nNo matching distribution')"])
    with pytest.raises(Unavailable, match="cannot start"):
        environments.call(["/no/such/python"])


def test_processes_are_found_with_their_children_and_what_they_use() -> None:
    child = (
        "import time; x = bytearray(80 << 20); [None for _ in range(3 * 10**6)]; print(1, flush=True); time.sleep(60)"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        pids = family(process.pid)
        assert pids[0] == process.pid and len(pids) == 2
        assert 80 << 20 < pss_bytes(pids) < 400 << 20
        assert 0 < cpu_seconds(pids) < 60
    finally:
        for pid in reversed(family(process.pid)):
            os.kill(pid, 9)
        process.wait()
    deadline = time.monotonic() + 20
    while pss_bytes(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pss_bytes(pids) == 0 and cpu_seconds([10**9]) == 0


def test_a_process_knows_the_one_that_it_was_started_with() -> None:
    inner = f"from processes import below; print(below({os.getpid()}))"
    start = f"subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
    command = [sys.executable, "-uc", f"import os, subprocess, sys; print(os.getpid()); {start}"]
    done = subprocess.run(command, env=compare._environment(), capture_output=True, text=True, check=True)
    outer, found = done.stdout.split()
    assert outer == found and below(os.getppid()) == os.getpid()


def test_every_simulator_has_a_driver_and_an_environment() -> None:
    for peer in PEERS.values():
        assert (DRIVERS / peer.script).is_file() and peer.environment in {*RECIPES, OURS}


def test_drivers_share_one_clock(tmp_path: Path) -> None:
    """Two rounds of warm-up are not counted; several rounds may end at once."""
    code = """
import time, work
given = work.given()
clock = work.Clock(given)
clock.begin()
time.sleep(0.3)
clock.end_of_round(2)
time.sleep(0.05)
clock.end_of_round()
"""
    flags = {"clients": 4, "samples": 5, "batch": 5, "rounds": 1, "warm_up": 2, "threads": 1, "cores": 1, "lr": 0.1}
    places = {"data": tmp_path, "out": tmp_path / "found.json", "started": time.time(), "parent": os.getpid()}
    args = [text for name, value in (flags | places).items() for text in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-c", code, *args], env=compare._environment(), check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["updates"] == 4 and found["warm_up_seconds"] >= 0.3 and found["seconds"] >= 0.05
    assert found["set_up_seconds"] > 0


def test_an_unknown_simulator_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "peers", "--peers", "fedml"])
    assert result.exit_code == 2 and "--peers has fedml; allowed are aedfl, pfl-1" in result.stderr
