"""The command line: what it teaches, what it passes on, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from aedfl import __version__
from aedfl.cli import app
from aedfl.errors import AedflError, UserError
from aedfl.experiment.progress import Live, Silent
from report.fakes import fake_run

SUMMARY = {"method": "aedfl-0", "preset": "digits", "seed": 0, "devices": 20, "accuracy": 0.9312}


def aedfl(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


class Runner(SimpleNamespace):
    """In the place of the runner: remembers what it was asked, or fails as told."""

    calls: list[tuple[Any, ...]]
    failure: BaseException | None

    def run(self, config: Any, out: Path, force: bool = False, progress: Any = None) -> dict[str, Any]:
        return self._answer("run", config, out, force, progress)

    def resume(self, path: Path, progress: Any = None, ray: str | None = None) -> dict[str, Any]:
        return self._answer("resume", path, progress, ray)

    def compare(self, configs: Any, out: Path, resume: bool = False, progress: Any = None) -> list[Any]:
        self._answer("compare", configs, out, resume, progress)
        return [SUMMARY | {"method": config.method, "seed": config.seed} for config in configs]

    def _answer(self, *call: Any) -> dict[str, Any]:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure
        return SUMMARY


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    fake = Runner(calls=[], failure=None)
    for name in ("run", "compare"):
        monkeypatch.setitem(sys.modules, f"aedfl.experiment.{name}", fake)
    monkeypatch.chdir(tmp_path)
    return fake


def test_help_teaches_by_example_and_is_quick() -> None:
    assert all(word in aedfl("--help").output for word in ("run", "compare", "aedfl run cifar10-lenet", "topology"))
    assert "aedfl run --resume runs/mine" in aedfl("run", "--help").output
    assert aedfl("--version").output.strip() == f"aedfl {__version__}"
    code = "import sys, aedfl.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | _path()).returncode == 0


def _path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}


def test_run_passes_everything_on(runner: Runner, tmp_path: Path) -> None:
    options = ["--seed", "3", "--method", "mine.py", "--data", "d", "--out", "o", "--force", "--ray", "head:6379"]
    result = aedfl("run", "cifar10-lenet", "--set", "training.lr=0.1", "--set", "devices=7", *options)
    assert result.exit_code == 0
    ((_, config, out, force, progress),) = runner.calls
    assert (config.preset, config.seed, config.devices, config.training.lr) == ("cifar10-lenet", 3, 7, 0.1)
    assert (config.method, config.data.directory) == (str(tmp_path / "mine.py"), str(tmp_path / "d"))
    assert config.engine.ray == "head:6379"
    assert (out, force) == (Path("o"), True) and isinstance(progress, Live)
    assert "0.9312" in result.output and "o/report.html" in result.output


def test_run_alone_takes_the_embedded_data_and_a_folder_of_its_own(runner: Runner) -> None:
    Path("runs/digits-aedfl-0-seed0").mkdir(parents=True)
    result = aedfl("run", "--quiet")
    ((_, config, out, force, progress),) = runner.calls
    assert (config.preset, out, force) == ("digits", Path("runs/digits-aedfl-0-seed0-2"), False)
    assert isinstance(progress, Silent) and result.output == "runs/digits-aedfl-0-seed0-2\n"


def test_resume_takes_a_folder_and_nothing_else_but_a_cluster(runner: Runner) -> None:
    assert aedfl("run", "--resume", "x").exit_code == 0
    assert aedfl("run", "--resume", "x", "--ray", "local").exit_code == 0
    assert [(call[:2], call[3]) for call in runner.calls] == [(("resume", Path("x")), ray) for ray in (None, "local")]
    for extra in (["digits"], ["--seed", "0"], ["--set", "a=1"], ["--force"], ["--out", "y"]):
        result = aedfl("run", "--resume", "x", *extra)
        assert result.exit_code == 2 and "cannot be given with it" in result.stderr


def test_compare_runs_every_method_with_every_seed(runner: Runner) -> None:
    options = ["--seeds", "2", "--set", "seed=5", "--out", "c", "--ray", "auto"]
    result = aedfl("compare", "digits", "--methods", "aedfl-0, b", *options)
    assert result.exit_code == 0
    ((_, configs, out, resume, _),) = runner.calls
    assert [(c.method, c.seed) for c in configs] == [("aedfl-0", 5), ("aedfl-0", 6), ("b", 5), ("b", 6)]
    assert {c.engine.ray for c in configs} == {"auto"}
    assert (out, resume) == (Path("c"), False) and "c/report.html" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "digit"], "unknown preset 'digit'; did you mean 'digits'?"),
        (["run", "--set", "devices=0"], "devices = 0: must be greater than or equal to 1"),
        (["run", "--set", "trainig.lr=1"], "unknown key 'trainig'; did you mean 'training'?"),
        (["run", "none.toml"], "cannot read the config file 'none.toml': No such file or directory"),
        (["run", "--set", "stop.target_accuracy=2.0"], "stop.target_accuracy = 2.0: must be less than or equal to 1"),
        (["compare", "digits", "--methods", ","], "--methods is empty; name at least one, such as --methods aedfl-0"),
        (["compare", "digits", "--methods", "a,a"], "--methods names a method twice: a,a"),
        (["compare", "digits", "-m", "a", "--resume"], "--resume needs --out"),
        (["report", "nowhere"], "'nowhere' is not a folder"),
        (["presets", "digit"], "unknown preset 'digit'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(runner: Runner, args: list[str], words: str) -> None:
    result = aedfl(*args)
    assert result.exit_code == 2 and runner.calls == []
    assert result.stderr.startswith("error: ") and words in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (UserError("run folder x exists"), 2, "error: run folder x exists"),
        (AedflError("device 3 waits for [4]"), 1, "error: device 3 waits for [4]"),
        (KeyboardInterrupt(), 130, "interrupted: go on with: aedfl run --resume o"),
        (OSError(errno.ENOSPC, "No space left on device", "o/metrics.jsonl"), 1, "no space left on the disk"),
        (PermissionError(errno.EACCES, "Permission denied", "o"), 1, "no permission to use 'o'"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "o"), 1, "'o' cannot be used: no such file"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "o"), 1, "'o' cannot be used: not a directory"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "o"), 1, "'o' cannot be used: is a directory"),
    ],
)
def test_failures_end_with_a_sentence_and_a_code(runner: Runner, failure: BaseException, code: int, words: str) -> None:
    runner.failure = failure
    result = aedfl("run", "digits", "--out", "o", "--quiet")
    assert result.exit_code == code and words in result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def test_a_bug_is_not_hidden(runner: Runner) -> None:
    runner.failure = OSError(errno.EINVAL, "odd")
    with pytest.raises(OSError, match="odd"):
        aedfl("run", "digits", "--out", "o")


def test_an_interrupted_comparison_says_how_to_go_on(runner: Runner) -> None:
    runner.failure = KeyboardInterrupt()
    result = aedfl("compare", "digits", "-m", "a", "--out", "c")
    assert result.exit_code == 130 and "--resume --out c" in result.stderr


def test_what_was_interrupted_before_it_began_cannot_be_gone_on_with(runner: Runner) -> None:
    runner.failure = KeyboardInterrupt("the run had not begun")
    for command in (["run", "digits"], ["compare", "digits", "-m", "a"]):
        result = aedfl(*command, "--out", "o")
        assert result.exit_code == 130 and result.stderr == "interrupted: the run had not begun\n"


def test_presets_are_listed_and_printed_as_configs(tmp_path: Path) -> None:
    assert all(name in aedfl("presets").output for name in ("digits", "emnist-lenet", "tiny-vgg9", "imdb-textcnn"))
    path = tmp_path / "mine.toml"
    path.write_text(aedfl("presets", "digits").output)
    from aedfl.experiment.config import load

    assert load(path) == load("digits")


def test_methods_and_their_hyper_parameters_are_listed() -> None:
    assert "aedfl-0" in aedfl("methods").output
    assert "reuse_merged" in aedfl("methods", "aedfl-0").output
    unknown = aedfl("methods", "aedfl-9")
    assert unknown.exit_code == 2 and "aedfl-0" in unknown.stderr


def test_data_sets_are_listed_whether_they_are_there_or_not(tmp_path: Path) -> None:
    output = aedfl("datasets", "--data", str(tmp_path)).output
    assert re.search(r"digits .* 1,\d\d\d .* built in", output) and "not found" in output


def test_a_topology_is_described_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "ring.svg"
    result = aedfl("topology", "ring", "--devices", "6", "--out", str(path))
    assert result.exit_code == 0 and "6" in result.output
    assert path.read_text().startswith("<svg")
    assert aedfl("topology", "rong").exit_code == 2


def test_report_finds_runs_and_writes_tables(tmp_path: Path) -> None:
    for method in ("a", "b"):
        fake_run(tmp_path / "c" / method, method=method, seconds=40.0, speed=2.0 if method == "a" else 1.0)
    folder = str(tmp_path / "c")
    result = aedfl("report", folder, "--table", "markdown")
    assert result.exit_code == 0 and result.output.startswith("| method | seeds | accuracy |")
    assert (tmp_path / "c" / "report.html").is_file()
    rows = json.loads(aedfl("report", folder, "-t", "json", "-o", str(tmp_path / "x.html")).output)
    assert [row["method"] for row in rows] == ["a", "b"] and rows[0]["accuracy"]["best"]
    assert (tmp_path / "x.html").is_file()


def test_a_real_run_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--set", "devices=3", "--set", "stop.virtual_seconds=20", "--set", "data.samples=60", "--quiet"]
    result = aedfl("run", "digits", *options, "--out", str(out))
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["preset"] == "digits" and summary["devices"] == 3 and (out / "report.html").is_file()
    again = aedfl("run", "digits", *options, "--out", str(out))
    assert again.exit_code == 2 and "--resume" in again.stderr and "--force" in again.stderr
