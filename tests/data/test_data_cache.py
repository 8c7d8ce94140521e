"""The cache: as a whole or not at all, whoever else is at it."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from aedfl import data
from aedfl.data import cache
from aedfl.errors import UserError


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_second_load_reads_the_cache_only(
    small_cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.load("cifar10", small_cifar, tmp_path / "c")
    monkeypatch.setattr("aedfl.data.hubsets.decode_files", None)
    second = data.load("cifar10", small_cifar, tmp_path / "c")
    assert torch.equal(first.train.x, second.train.x)
    assert first.scale == second.scale


def test_the_folder_comes_from_argument_or_variable(small_cifar: Path, tmp_path: Path) -> None:
    data.load("cifar10", small_cifar)
    assert len(entries(tmp_path / "default-cache")) == 1
    data.load("cifar10", small_cifar, tmp_path / "other")
    assert len(entries(tmp_path / "other")) == 1


def test_changed_files_are_decoded_anew(small_cifar: Path, tmp_path: Path) -> None:
    data.load("cifar10", small_cifar, tmp_path / "c")
    shard = small_cifar / "cifar10" / "test.parquet"
    os.utime(shard, (1, 1))
    data.load("cifar10", small_cifar, tmp_path / "c")
    assert len(entries(tmp_path / "c")) == 1  # times do not count
    shard.write_bytes((small_cifar / "cifar10" / "train-00000-of-00002.parquet").read_bytes())
    assert len(data.load("cifar10", small_cifar, tmp_path / "c").test) == 25


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(small_cifar: Path, tmp_path: Path) -> None:
    loaded = data.load("cifar10", small_cifar, tmp_path / "c")
    before = loaded.train.x[0].clone()
    loaded.train.x[0] = 0
    assert torch.equal(data.load("cifar10", small_cifar, tmp_path / "c").train.x[0], before)


@pytest.mark.parametrize("damage", ["cut", "missing", "json"])
def test_a_damaged_entry_is_built_anew(small_cifar: Path, tmp_path: Path, damage: str) -> None:
    good = data.load("cifar10", small_cifar, tmp_path / "c").train.x.clone()
    (entry,) = (tmp_path / "c").glob("cifar10-*")
    if damage == "cut":
        os.truncate(entry / "train_x.npy", 1000)
    elif damage == "missing":
        (entry / "test_y.npy").unlink()
    else:
        (entry / "meta.json").write_text("{")
    assert torch.equal(data.load("cifar10", small_cifar, tmp_path / "c").train.x, good)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files may not grow past 40 kB, which fails a write as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_leaves_nothing(small_cifar: Path, tmp_path: Path, small_files: None) -> None:
    with pytest.raises(
        UserError, match=r"'cifar10' cannot be kept in .*: File too large; make room"
    ) as error:
        data.load("cifar10", small_cifar, tmp_path / "c")
    assert "\n" not in str(error.value)
    assert entries(tmp_path / "c") == []


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="No space left on device; make room or choose"):
        cache.cached(tmp_path, "toy", "0", build, lambda folder: (folder / "half").read_text())
    assert entries(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(small_cifar: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be kept in"):
        data.load("cifar10", small_cifar, tmp_path / "file")


def test_what_a_killed_process_left_is_removed(small_cifar: Path, tmp_path: Path) -> None:
    (tmp_path / "c" / ".cifar10-0123-ab.part").mkdir(parents=True)
    data.load("cifar10", small_cifar, tmp_path / "c")
    assert len(entries(tmp_path / "c")) == 1


PROGRAM = """
import sys, time
from pathlib import Path
from aedfl.data.cache import cached

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    (folder / "a").write_text("x" * 10)
    time.sleep(0.3)
    (folder / "b").write_text("y" * 10)

print(cached(Path(sys.argv[1]), "toy", "k", build, lambda f: (f / "a").read_text() + (f / "b").read_text()))
"""


def test_processes_at_once_build_one_entry(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), str(tmp_path / "log")]
    source = str(Path(cache.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    crowd = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in crowd] == ["x" * 10 + "y" * 10] * 2
    assert (tmp_path / "log").read_text() == "built\n"
    assert entries(tmp_path / "c") == ["toy-k"]


def test_rows_that_do_not_add_up_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 rows instead of the 3"):
        cache.write_npy(tmp_path / "x.npy", [np.zeros((2, 2))], 3)
