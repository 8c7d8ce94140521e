"""Run folders are never taken over, and a full disk loses nothing that was safe."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aedfl.errors import UserError
from aedfl.experiment import checkpoint
from aedfl.experiment.config import from_toml
from aedfl.experiment.run import claim, compare, run
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
    (folder / "leftover").write_text("old")
    assert run(small(seed=1), folder, force=True)["seed"] == 1
    assert not (folder / "leftover").exists() and from_toml((folder / "config.toml").read_text()).seed == 1


def test_force_does_not_replace_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not a run folder .* so --force will not replace it"):
        run(small(), tmp_path, force=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    claim(tmp_path, small(), force=False)
    assert from_toml((tmp_path / "config.toml").read_text()) == small()


def test_several_configs_run_side_by_side_and_can_be_resumed(tmp_path: Path) -> None:
    configs = [small(stop={"virtual_seconds": 8.0}, seed=seed) for seed in (0, 1)]
    out = tmp_path / "all"
    first = compare(configs, out)
    assert [summary["seed"] for summary in first] == [0, 1] and (out / "report.html").is_file()
    with pytest.raises(UserError, match="exists"):
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
