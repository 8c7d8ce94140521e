"""`aedfl bench scale`, `wire`, `overhead` and `pruning`: small measurements for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from aedfl.bench import overhead, pruning, scale
from aedfl.bench.timing import watch
from aedfl.cli import app
from aedfl.graph import Queue, Value
from aedfl.ops import WeightedMean


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *args], catch_exceptions=False)


def test_fleets_of_two_sizes_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    result = bench("scale", "--devices", "5,10", "--updates", "40", "--json", str(path))
    assert result.exit_code == 0, result.output
    first, second = json.loads(path.read_text())["fleets"]
    assert (first["devices"], second["devices"]) == (5, 10)
    assert first["cost_ratio"] == 1 and first["exponent"] is None
    ratio = second["cpu_microseconds_per_update"] / first["cpu_microseconds_per_update"]
    assert 2 ** (second["exponent"] - 1) == pytest.approx(ratio)
    for fleet in (first, second):
        assert 20 < fleet["updates"] < 80 and set(fleet["share"]) == set(scale.PARTS)
        assert sum(fleet["share"].values()) == pytest.approx(1.0) and min(fleet["share"].values()) > 0


def test_ops_are_timed_without_a_change_to_what_they_compute() -> None:
    queue = Queue()
    ledger = watch(queue)
    one, two = Value(torch.tensor([1.0, 3.0])), Value(torch.tensor([3.0, 5.0]))
    jobs = [
        queue.submit(WeightedMean(), ((one, two), weights), [number]) for number, weights in enumerate([(1, 1), (3, 1)])
    ]
    queue.flush()
    assert [value.get().tolist() for (value,) in jobs] == [[2.0, 4.0], [1.5, 3.5]]
    assert set(ledger.kinds) == {"WeightedMean"}
    kind = ledger.kinds["WeightedMean"]
    assert (kind.calls, kind.jobs, kind.heavy) == (1, 2, False) and kind.seconds > kind.aside == 0


def test_overhead_is_the_simulation_over_the_faster_bare_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_simulated", lambda name, rounds, data: 3.0 * rounds)
    monkeypatch.setattr(overhead, "_bare", lambda name, steps, data, threads: {1: 4.0, 2: 8.0}[threads])
    found = overhead.measure(overhead.Options(updates=45, repeats=1, threads=(1, 2)))
    assert found["sgd_steps"] == 400 and found["overhead"] == 1.5
    assert overhead.table(found).rows[0] == ("simulation", "6.00", "1.00")


def test_overhead_is_measured_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "SAMPLES", 50)
    monkeypatch.setattr(overhead, "SHAPE", (1, 8, 8))
    result = bench("overhead", "--model", "cnn", "--updates", "20", "--repeats", "1", "--json", "-")
    found = json.loads(result.stdout)
    assert found["sgd_steps"] == 20 and min(found["seconds"].values()) > 0


def test_pruning_is_measured_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "MODELS", {"lenet5": 1})
    monkeypatch.setattr(pruning, "COSTED", ())
    threads = torch.get_num_threads()
    try:
        found = pruning.measure(pruning.Options(repeats=1))
    finally:
        torch.set_num_threads(threads)
    assert found["saved"]["lenet5"]["macs_ratio"] == 2.59 and found["cost"] == {}
    assert pruning.table(found).rows[0][0] == "lenet5"


@pytest.mark.slow
def test_models_travel_for_real(tmp_path: Path) -> None:
    path = tmp_path / "wire.json"
    small = ["--parameters", "5000", "--messages", "1", "--small", "2", "--large", "0", "--repeats", "1"]
    result = bench("wire", *small, "--json", str(path))
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    for way in ("tls", "plaintext"):
        assert found[way]["ratio"] == pytest.approx(found[way]["bytes_per_second"] / found[way]["bare_grpc"])
        assert found[f"small_{way}"]["per_second"] > 0
    assert "of a bare socket" in result.output and "large" not in found


def test_wire_without_grpc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in [name for name in sys.modules if name.startswith(("aedfl.bench.wire", "aedfl.net."))]:
        monkeypatch.delitem(sys.modules, name)
    import aedfl.bench

    monkeypatch.delattr(aedfl.bench, "wire", raising=False)
    result = bench("wire")
    assert result.exit_code == 2 and "pip install 'aedfl[deploy]'" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["scale", "--devices", "ten"], "--devices is 'ten'; allowed are whole numbers from 1 on"),
        (["scale", "--method", "none"], "method is 'none'"),
        (["overhead", "--model", "mlp"], "--model is 'mlp'; allowed are lenet5, resnet8, vgg9, cnn"),
        (["overhead", "--updates", "3"], "--updates is 3; allowed are whole numbers from 20 on"),
    ],
)
def test_a_mistake_is_one_sentence(args: list[str], words: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""
