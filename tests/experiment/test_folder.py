"""Run folders are never taken over, and a full disk loses nothing that was safe."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aedfl.errors import UserError
from aedfl.experiment import checkpoint
from aedfl.experiment.compare import compare
from aedfl.experiment.config import from_toml
from aedfl.experiment.folder import ASIDE, CONFIG, LOCK, entries, held, set_aside
from aedfl.experiment.run import claim, resume, run
from aedfl.experiment.workshop import Workshop
from experiment.small import NOSY, interrupted, record, simple_run, small, whole


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(small(), folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError) as error:
        run(small(seed=1), folder)
    sentence = f"run folder {folder} exists; use --resume to go on with it, or --force to replace it"
    assert str(error.value) == sentence
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_force_replaces_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(small(), folder)
    (folder / "summary.partial").write_text("old")
    assert run(small(seed=1), folder, force=True)["seed"] == 1
    assert not (folder / "summary.partial").exists() and from_toml((folder / CONFIG).read_text()).seed == 1
    assert sorted(folder.iterdir()) == entries(folder)


def test_force_does_not_replace_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not a run folder .* so --force will not replace it"):
        run(small(), tmp_path, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_force_does_not_replace_a_folder_with_files_of_ones_own(tmp_path: Path) -> None:
    run(small(), tmp_path)
    (tmp_path / "thesis.tex").write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"holds 'thesis.tex', which no run writes, so --force will not replace it"):
        run(small(seed=1), tmp_path, force=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("text", ['[tool]\nname = "mine"\n', "no TOML", "\0"])
def test_force_does_not_replace_a_folder_with_a_config_of_something_else(text: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(UserError, match="is not a run folder .* so --force will not replace it"):
        run(small(), tmp_path, force=True)
    assert tree(tmp_path) == {CONFIG: text.encode()}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "devices": {"devices": 500},
    "data": {"data": {"name": "cifar10", "directory": "/nowhere"}},
    "topology": {"topology": {"kind": "file", "path": "/nowhere"}},
    "trackers": {"record": {"trackers": ["nothing"]}},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_run_that_cannot_begin_replaces_nothing_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    run(small(), tmp_path / "run")
    before = tree(tmp_path)
    for folder in ("run", "new/one"):
        with pytest.raises(UserError):
            run(small(**IMPOSSIBLE[name]), tmp_path / folder, force=True)
        assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_is_interrupted_before_it_begins_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(small(), tmp_path)
    before = tree(tmp_path)

    def bench(*_: Any) -> None:
        assert (tmp_path / ASIDE / "summary.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(Workshop, "bench", bench)
    with pytest.raises(KeyboardInterrupt, match="had not begun"):
        run(small(seed=1), tmp_path, force=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("moved", [0, 1, 3, None])
def test_what_a_killed_process_had_set_aside_comes_back(moved: int | None, tmp_path: Path) -> None:
    """Killed after so many files were moved, or when all were and the new run's were there too."""
    summary = run(small(), tmp_path)
    before = tree(tmp_path)
    if moved is None:
        set_aside(tmp_path)
        for name in (CONFIG, "metrics.jsonl"):
            (tmp_path / name).write_text("new")
    else:
        (tmp_path / ASIDE).mkdir()
        for path in [path for path in entries(tmp_path) if path.name != CONFIG][:moved]:
            path.rename(tmp_path / ASIDE / path.name)
    with held(tmp_path):
        pass
    assert tree(tmp_path) == before and resume(tmp_path) == summary


def test_a_comparison_of_which_one_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    configs = [small(), small(seed=1), small(seed=2, devices=500)]
    with pytest.raises(UserError, match="devices = 500"):
        compare(configs, tmp_path / "new" / "all")
    assert not list(tmp_path.iterdir())


def test_a_comparison_that_goes_on_keeps_the_runs_it_had(tmp_path: Path) -> None:
    first, wrong = small(stop={"virtual_seconds": 8.0}), small(seed=1, devices=500)
    (summary,) = compare([first], tmp_path)
    before = tree(tmp_path)
    with pytest.raises(UserError, match="devices = 500"):
        compare([first, wrong], tmp_path, resume=True)
    assert tree(tmp_path) == before and compare([first], tmp_path, resume=True) == [summary]


def test_two_methods_do_not_share_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"two methods would run in .*aedfl-0-seed0; give their files different names"):
        compare([small(), small(devices=3)], tmp_path)


# Folders in use -------------------------------------------------------------------------------------------------


def test_a_folder_that_a_run_is_in_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "aedfl-0-seed0"
    claim(folder, config := small(), force=False)
    assert not interrupted(folder, 10)
    before = tree(folder)
    with held(folder):
        for begin in (
            lambda: run(config, folder, force=True),
            lambda: resume(folder),
            lambda: compare([config], tmp_path, resume=True),
        ):
            with pytest.raises(UserError, match=f"run folder {folder} is in use") as error:
                begin()
            assert "\n" not in str(error.value)
    assert tree(folder) == before
    assert resume(folder)["seed"] == 0


def test_a_folder_is_free_again_when_its_process_dies(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from aedfl.experiment.folder import held
with held(Path({str(tmp_path)!r})):
    print(1, flush=True)
    input()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        with pytest.raises(UserError, match="is in use"), held(tmp_path):
            pass
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with held(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def test_where_there_are_no_locks_runs_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr("aedfl.experiment.folder.fcntl.flock", flock)
    with held(tmp_path), held(tmp_path):
        claim(tmp_path, small(), force=False)
    assert (tmp_path / "config.toml").is_file()


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    claim(tmp_path, small(), force=False)
    assert from_toml((tmp_path / "config.toml").read_text()) == small()


def test_several_configs_run_side_by_side_and_can_be_resumed(tmp_path: Path) -> None:
    configs = [small(stop={"virtual_seconds": 8.0}, seed=seed) for seed in (0, 1)]
    out = tmp_path / "all"
    first = compare(configs, out)
    assert [summary["seed"] for summary in first] == [0, 1] and (out / "report.html").is_file()
    with pytest.raises(UserError, match="exists; use --resume to go on with it, or choose another --out"):
        compare(configs, out)
    assert compare(configs, out, resume=True) == first


# Full disks -----------------------------------------------------------------------------------------------------


def torn(folder: Path) -> dict[str, bytes]:
    """A run that was dropped after a few checkpoints, and its files then."""
    claim(folder, small(NOSY), force=False)
    assert not interrupted(folder, 10)
    return files(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.folder(folder).iterdir()}


def no_space(*_: Any, **__: Any) -> None:
    raise checkpoint.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_checkpoint_that_does_not_fit_leaves_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(small(NOSY))
    before = torn(tmp_path / "torn")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", no_space)
        with pytest.raises(OSError, match="No space left") as error:
            interrupted(tmp_path / "torn", 10_000)
    assert error.value.errno == errno.ENOSPC and str(tmp_path / "torn") in str(error.value.filename)
    assert files(tmp_path / "torn") == before
    assert interrupted(tmp_path / "torn", 10_000)
    assert record(tmp_path / "torn") == expected


def test_a_record_that_does_not_fit_is_completed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is written, then the disk is full."""
    from aedfl.experiment import record as streams

    expected = whole(small(NOSY))
    before = torn(tmp_path / "torn")
    real, written = streams._line, []

    def line(row: Any) -> bytes:
        written.append(row)
        if len(written) == 20:
            with (tmp_path / "torn" / "updates.jsonl").open("ab") as file:
                file.write(real(row)[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(row)

    with monkeypatch.context() as patched:
        patched.setattr(streams, "_line", line)
        with pytest.raises(OSError, match="No space left"):
            interrupted(tmp_path / "torn", 10_000)
    assert files(tmp_path / "torn").keys() & before.keys()
    assert interrupted(tmp_path / "torn", 10_000)
    assert record(tmp_path / "torn") == expected


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 KiB, where mounting one is allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(place)]
    if os.name != "posix" or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_fills_up_loses_nothing_that_was_safe(tiny_disk: Path, tmp_path: Path) -> None:
    """Once there is space again, the run goes on to the very end."""
    config = small(NOSY, model={"name": "mlp", "options": {"hidden": [4]}})
    expected = whole(config)
    folder = tiny_disk / "run"
    with pytest.raises(OSError, match="No space left"):
        simple_run(config, folder)
    assert files(folder), "no checkpoint was written before the disk was full"
    assert not [name for name in files(folder) if name.endswith(".partial")]
    subprocess.run(["mount", "-o", "remount,size=8m", str(tiny_disk)], check=True)
    assert interrupted(folder, 10_000)
    assert record(folder) == expected
