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
    assert "lenet5" in result.output and "end to end" in result.output and str(path.name) in result.output


def test_json_alone_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"samples_per_second": 2.0}
    whole = part | {"mean_batch": 1.5, "ratio": 0.5, "ratio_without_capture": 0.75, "capture_seconds": 3.0}
    monkeypatch.setattr(engine, "_model", lambda *_: {"bare": {"1": part, "3": part}, "end_to_end": whole})
    result = bench("engine", *TINY, "--json", "-")
    assert json.loads(result.stdout)["models"]["lenet5"]["end_to_end"]["ratio"] == 0.5
    row = table(json.loads(result.stdout)).rows[0]
    assert row == ("lenet5", "2", "2", "2", "1.5", "0.50", "0.75", "3.0")


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
