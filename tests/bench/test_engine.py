"""`aedfl bench engine`: a tiny measurement for real, and what its figures must satisfy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aedfl.bench import engine
from aedfl.bench.engine import CASES, Options, _dataset, measure, table
from aedfl.cli import app
from aedfl.models import NAMES
from aedfl.native import library
from aedfl.training.plan import Plan, TrainJob, TrainResult
from aedfl.training.sequential import SequentialTrainer

TINY = ["--models", "lenet5", "--jobs", "1,3", "--samples", "4", "--epochs", "1", "--steps", "1", "--seconds", "0"]


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *args], catch_exceptions=False)


def test_a_real_measurement_has_figures_machine_date_versions_and_command(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "engine.json"
    result = bench("engine", *TINY, "--repeats", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["machine"]["cores"] >= 1 and found["versions"]["torch"] and found["command"].startswith("aedfl")
    assert found["date"].endswith("+00:00") and found["options"]["jobs"] == [1, 3]
    figures = found["models"]["lenet5"]
    whole = figures["end_to_end"]
    assert set(figures["bare"]) == {"1", "3"} and figures["trainer"] == "SequentialTrainer"
    assert whole["samples_per_second"] == pytest.approx(whole["samples"] / whole["wall_seconds"])
    assert whole["ratio"] == pytest.approx(whole["samples_per_second"] / whole["bare_at_batch"])
    assert whole["updates"] > 0 and whole["mean_batch"] > 1 and whole["capture_seconds"] == 0
    assert whole["captures"] == {"count": 0, "seconds": 0.0} and whole["first_evaluation_seconds"] > 0
    assert whole["steady_ratio"] is None, "five virtual seconds are too short"
    assert whole["overlapped"] is False
    kernels = [one["times_as_fast_as_without_kernels"] for one in figures["bare"].values()]
    assert all(one > 0 for one in kernels) if library() else kernels == [None, None]
    assert whole["profiled"] is False and "breakdown" not in whole and "GPU s" not in result.output
    assert "lenet5" in result.output and "batch" in result.output and str(path.name) in result.output


def test_json_alone_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"samples_per_second": 2.0}
    whole = part | {"mean_batch": 1.5, "ratio": 0.5, "steady_ratio": 0.75, "captures": {"seconds": 3.0}}
    whole |= {"first_evaluation_seconds": 1.25, "profiled": False}
    monkeypatch.setattr(engine, "_model", lambda *_: {"bare": {"1": part, "3": part}, "end_to_end": whole})
    result = bench("engine", *TINY, "--json", "-")
    assert json.loads(result.stdout)["models"]["lenet5"]["end_to_end"]["ratio"] == 0.5
    figures = table(json.loads(result.stdout))
    assert figures.rows[0] == ("lenet5", "2", "2", "–", "2", "1.5", "0.50", "0.75", "3.0", "1.2")
    assert any(
        "ratio: of the whole simulation" in note and "steady ratio: of its second half" in note
        for note in figures.notes
    )


def test_a_profile_says_where_the_time_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DEVICES", 10)
    monkeypatch.setattr(engine, "_virtual_seconds", lambda *_: 62.0)
    trained: list[TrainJob] = []
    train = SequentialTrainer.train

    def counted(self: SequentialTrainer, plan: Plan, jobs: list[TrainJob]) -> list[TrainResult]:
        if plan.probe:  # the simulation's; the bare step has no probe
            trained.extend(jobs)
        return train(self, plan, jobs)

    monkeypatch.setattr(SequentialTrainer, "train", counted)
    path = tmp_path / "engine.json"
    result = bench("engine", *TINY, "--repeats", "1", "--profile", "--json", str(path))
    assert result.exit_code == 0, result.output
    whole = json.loads(path.read_text())["models"]["lenet5"]["end_to_end"]
    kinds, training = whole["breakdown"], whole["training"]
    assert whole["profiled"] and {"Train", "Evaluate", "programs and clock"} < set(kinds)
    assert sum(kind["python_seconds"] for kind in kinds.values()) == pytest.approx(whole["wall_seconds"])
    assert all(kind["python_seconds"] > 0 and kind["gpu_seconds"] is None for kind in kinds.values())
    assert kinds["Train"]["jobs"] == len(trained)
    assert whole["updates"] <= len(trained) <= whole["updates"] + 10, "a device has one update under way"
    assert kinds["Evaluate"] | {"python_seconds": 0} == {
        "calls": 6, "jobs": 66, "python_seconds": 0, "gpu_seconds": None,
    }, "the mean model and ten of devices, every 15 virtual seconds and at the end"  # fmt: skip
    assert training["useful_samples"] == sum(len(job.samples) * job.epochs for job in trained) >= whole["samples"]
    assert training["useful_steps"] == training["run_steps"] == len(trained), "one step each, one model at a time"
    assert training["bare_seconds"]["useful_samples"] == pytest.approx(
        training["useful_samples"] / whole["bare_at_batch"]
    )
    steady, mean = whole["steady"], whole["samples"] / whole["updates"]
    assert steady["from_virtual"] == 30.0 and len(trained) / 3 < steady["jobs"] < len(trained) * 2 / 3
    assert 0 < steady["seconds"] < whole["wall_seconds"]
    assert whole["steady_samples_per_second"] == pytest.approx(mean * steady["jobs"] / steady["seconds"])
    assert whole["steady_ratio"] == pytest.approx(whole["steady_samples_per_second"] / whole["bare_at_batch"])
    assert "*: profiled" in result.output and "programs and clock" in result.output


def test_progress_goes_from_nothing_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    def model(_: str, options: Options, tell: object) -> dict[str, object]:
        for part in range(len(options.jobs) + 2):
            tell("part", part)  # type: ignore[operator]
        return {}

    monkeypatch.setattr(engine, "_model", model)
    measure(Options(models=("lenet5", "vgg9"), jobs=(1,)), lambda _, done, total: told.append((done, total)))
    assert told == [(done, 6) for done in range(7)]


def test_cases_are_built_in_models_on_data_of_their_shape() -> None:
    for name, case in CASES.items():
        dataset = _dataset(name, Options(samples=2))
        assert name in NAMES and dataset.input_shape == case.shape and len(dataset.train) == 200
        assert int(dataset.train.y.max()) < case.classes and len(dataset.test) >= 33
    assert int(_dataset("textcnn", Options(samples=2)).train.x.max()) < (CASES["textcnn"].words or 0)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--models", "lenet"], "--models has lenet; allowed are lenet5, resnet8, vgg9, textcnn"),
        (["--models", ","], "--models has no name"),
        (["--jobs", "1,x"], "--jobs is '1,x'; allowed are whole numbers from 1 on"),
        (["--device", "tpu"], "--device is 'tpu'; allowed are cpu, cuda"),
        (["--trainer", "fast"], "--trainer is 'fast'; allowed are auto, sequential, batched"),
        (["--bf16"], "--bf16 needs --device cuda"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(args: list[str], words: str) -> None:
    result = bench("engine", *args)
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""
