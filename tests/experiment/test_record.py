"""What a run writes follows from its config, to the last byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aedfl.errors import UserError
from aedfl.experiment.progress import Silent
from aedfl.experiment.record import Record, read_rows
from aedfl.experiment.run import Run, claim, drive_all
from aedfl.experiment.workshop import Workshop
from aedfl.graph import Value
from experiment.small import NOSY, pruning, record, rows, simple_run, small, whole

CONFIGS = {"aedfl-0": small, "nosy": lambda: small(NOSY), "aedfl": pruning}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_runs_of_one_seed_are_identical(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    first = simple_run(config, tmp_path / "first")
    assert first == whole(config)
    assert len(first["updates.jsonl"].splitlines()) == first["summary"]["updates"] > 20


def test_another_seed_is_another_run() -> None:
    first, other = whole(small()), whole(small(seed=1))
    assert first["metrics.jsonl"] != other["metrics.jsonl"] and first["updates.jsonl"] != other["updates.jsonl"]


@pytest.mark.parametrize("lookahead", [1, 7])
def test_the_record_does_not_depend_on_lookahead(lookahead: int, tmp_path: Path) -> None:
    for number, method in enumerate(("aedfl-0", NOSY)):
        near = simple_run(small(method, engine={"lookahead": lookahead}), tmp_path / str(number))
        assert near == whole(small(method))


def test_the_record_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    engines = [{"trainer": "sequential", "threads": threads} for threads in (1, 2)]
    first, second = (simple_run(small(engine=engine), tmp_path / str(number)) for number, engine in enumerate(engines))
    assert first == second


def test_runs_that_share_a_queue_are_the_same_as_alone(tmp_path: Path) -> None:
    """Two methods and two seeds, of which some read values, in batches of each other's jobs."""
    configs = [small(), small(NOSY), small(seed=1), pruning()]
    alone = [whole(config) for config in configs]
    folders = [tmp_path / f"shared{number}" for number in range(len(configs))]
    for folder, config in zip(folders, configs, strict=True):
        claim(folder, config, force=False)
    workshop = Workshop()
    runs = [Run(config, workshop, folder, Silent()) for folder, config in zip(folders, configs, strict=True)]
    drive_all(runs, workshop)
    assert [record(folder) for folder in folders] == alone
    assert max(workshop.queue.batches) > 6


def test_metrics_and_updates_have_their_columns() -> None:
    metrics, updates = (rows(whole(small()), name) for name in ("metrics", "updates"))
    assert [row["time"] for row in metrics] == [2.0 * number for number in range(11)]
    wanted = {"accuracy", "loss", "local_accuracy", "worst_tenth", "updates", "bytes_sent", "mmacs", "consensus"}
    assert wanted | {"staleness", "samples", "costs"} <= set(metrics[0])
    assert metrics[-1]["updates"] == len(updates)
    assert {"time", "start", "device", "update", "loss", "merged", "samples"} <= set(updates[0])
    assert [row["time"] for row in updates] == sorted(row["time"] for row in updates)
    for device in range(6):
        assert [row["update"] for row in updates if row["device"] == device][:3] == [1, 2, 3]


def test_updates_can_be_left_out(tmp_path: Path) -> None:
    full = whole(small())
    short = simple_run(small(record={"updates": False}), tmp_path / "short")
    assert short["updates.jsonl"] == b"" and short["metrics.jsonl"] == full["metrics.jsonl"]


def test_traffic_counts_what_was_sent() -> None:
    found = whole(small())
    traffic = json.loads(found["traffic.json"])
    assert sum(count for _, _, count, _ in traffic["edges"]) == traffic["sent"] == found["summary"]["updates"]
    assert sum(size for *_, size in traffic["edges"]) == found["summary"]["bytes_sent"]
    assert 0 < traffic["lost"] < traffic["sent"]


# The streams themselves -----------------------------------------------------------------------------------------


def test_rows_are_written_once_their_values_are_known(tmp_path: Path) -> None:
    made = Record(tmp_path)
    value = Value(None)
    made.add("metrics", {"a": value})
    value.data = torch.tensor([1.5, 2.0])
    made.settle()
    assert made.read("metrics") == [{"a": [1.5, 2.0]}]
    made.close()


@pytest.mark.parametrize("folder", [True, False])
def test_numbers_come_back_as_they_were(folder: bool, tmp_path: Path) -> None:
    row: dict[str, Any] = {"f": 0.1 + 0.2, "n": np.int64(3), "x": np.float32(0.5), "a": np.arange(2), "t": (1, "x")}
    made = Record(tmp_path if folder else None)
    made.add("metrics", row)
    made.settle()
    assert made.read("metrics") == [{"f": 0.1 + 0.2, "n": 3, "x": 0.5, "a": [0, 1], "t": [1, "x"]}]
    made.close()


def test_a_record_is_cut_back_to_a_length(tmp_path: Path) -> None:
    made = Record(tmp_path)
    made.add("metrics", {"a": 1})
    offsets = made.settle()
    made.add("metrics", {"a": 2, "longer": "than what replaces it"})
    made.settle()
    made.close()
    again = Record(tmp_path, offsets)
    again.add("metrics", {"a": 3})
    again.settle()
    again.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"a": 1}, {"a": 3}]


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a":1}\n{"a":')
    assert read_rows(path) == [{"a": 1}]
    assert read_rows(tmp_path / "nothing.jsonl") == []


def test_a_record_that_is_too_short_is_refused_and_left_alone(tmp_path: Path) -> None:
    for name in ("metrics", "updates"):
        (tmp_path / f"{name}.jsonl").write_text('{"a":1}\n{"a":2}\n')
    with pytest.raises(UserError, match=r"updates.jsonl is shorter than when the checkpoint was made"):
        Record(tmp_path, {"metrics": 8, "updates": 99, "journal": 0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"a":1}\n{"a":2}\n'
