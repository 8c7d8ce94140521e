"""The figures of a run, and the model it leaves."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aedfl import models
from aedfl.data import load
from aedfl.experiment.record import read_rows
from aedfl.experiment.summary import summarise, time_to_target
from aedfl.experiment.workshop import Rows
from experiment.small import rows as stream
from experiment.small import simple_run, small, whole

KEYS = {
    "method", "preset", "seed", "devices", "accuracy", "best_accuracy", "local_accuracy", "target_accuracy",
    "time_to_target", "virtual_seconds", "wall_seconds", "updates", "samples", "bytes_sent", "mmacs",
}  # fmt: skip


def rows(*accuracies: float) -> list[dict[str, Any]]:
    names = ("local_accuracy", "worst_tenth", "loss", "samples", "bytes_sent", "mmacs", "consensus", "costs")
    rest: dict[str, Any] = {name: 0.0 for name in names}
    return [{"time": 5.0 * n, "accuracy": a, "updates": n, **rest} for n, a in enumerate(accuracies)]


def test_time_to_target_is_that_of_the_first_evaluation_there() -> None:
    found = rows(0.1, 0.6, 0.4, 0.7)
    assert time_to_target(found, 0.6) == 5.0 and time_to_target(found, 0.65) == 15.0
    assert time_to_target(found, 0.9) is None and time_to_target(found, None) is None


def test_the_summary_is_that_of_the_last_row() -> None:
    summary = summarise(small(stop={"target_accuracy": 0.5}), rows(0.1, 0.6, 0.4), "accuracy", 1.25)
    assert summary["accuracy"] == 0.4 and summary["best_accuracy"] == 0.6 and summary["time_to_target"] == 5.0
    assert summary["virtual_seconds"] == 10.0 and summary["updates"] == 2 and summary["wall_seconds"] == 1.25


def test_a_run_leaves_a_summary_and_a_model_that_reproduces_it(tmp_path: Path) -> None:
    config = small(seed=2)
    simple_run(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary) >= KEYS
    assert (summary["method"], summary["seed"], summary["devices"]) == ("aedfl-0", 2, 6)
    dataset = load("digits")
    module = models.build("mlp", dataset.input_shape, 10, hidden=[8])
    module.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    chosen = torch.from_numpy(Rows.of(config, dataset).evaluation)
    with torch.no_grad():
        hits = module(dataset.test.x[chosen]).argmax(1) == dataset.test.y[chosen]
    assert hits.float().mean().item() == pytest.approx(summary["accuracy"])


def test_measures_agree_with_each_other() -> None:
    metrics = stream(whole(small()), "metrics")
    assert metrics[0]["consensus"] == 0.0 and metrics[-1]["consensus"] > 0.0
    assert metrics[0]["accuracy"] == pytest.approx(metrics[0]["local_accuracy"], abs=0.2)
    assert all(row["worst_tenth"] <= row["local_accuracy"] for row in metrics)
    assert all(later["bytes_sent"] >= row["bytes_sent"] for row, later in pairwise(metrics))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[0]["mmacs"] == pytest.approx((64 * 8 + 8 * 10) / 1e6)


def test_staleness_is_that_of_the_models_merged_since_the_last_row() -> None:
    metrics, updates = (stream(whole(small()), name) for name in ("metrics", "updates"))
    for before, row in pairwise(metrics):
        merged = [u["merged"] for u in updates if before["time"] < u["time"] <= row["time"]]
        ages = [age for some in merged for _, age in some]
        assert row["staleness"] == pytest.approx(np.mean(ages) if ages else 0.0)


# When a run ends ------------------------------------------------------------------------------------------------


def finish(folder: Path, **stop: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = simple_run(small(stop=stop, evaluation={"every": 1.0}), folder)
    return found["summary"], read_rows(folder / "metrics.jsonl")


def test_a_run_ends_at_its_target(tmp_path: Path) -> None:
    summary, metrics = finish(tmp_path / "run", target_accuracy=0.2, stop_at_target=True)
    assert metrics[-1]["accuracy"] >= 0.2 > max(row["accuracy"] for row in metrics[:-1])
    assert summary["time_to_target"] == summary["virtual_seconds"] == metrics[-1]["time"] < 20.0


def test_a_target_alone_ends_nothing(tmp_path: Path) -> None:
    summary, _ = finish(tmp_path / "run", target_accuracy=0.2)
    assert summary["virtual_seconds"] == 20.0 and summary["time_to_target"] < 20.0


def test_a_run_ends_after_its_updates(tmp_path: Path) -> None:
    summary, metrics = finish(tmp_path / "run", virtual_seconds=None, updates=3)
    assert summary["updates"] == 18
    last = max(row["time"] for row in read_rows(tmp_path / "run" / "updates.jsonl"))
    assert summary["virtual_seconds"] == metrics[-1]["time"] == last


def test_a_run_ends_in_consensus(tmp_path: Path) -> None:
    summary, metrics = finish(tmp_path / "run", consensus=1e9)
    assert metrics[-1]["updates"] > 0 and all(row["updates"] == 0 for row in metrics[:-1])
    assert summary["virtual_seconds"] < 5.0
