import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aedfl import data
from aedfl.data.sources import Source, find
from aedfl.errors import UserError

CIFAR = Source("cifar10", "uoft-cs/cifar10")


@pytest.mark.parametrize("sub", ["plain_text", "data"])
def test_the_hubs_own_folders_are_found(small_cifar: Path, sub: str) -> None:
    home = small_cifar / "cifar10"
    shutil.copytree(home, small_cifar / "copy" / "cifar10" / sub)
    files = find("cifar10", CIFAR, small_cifar / "copy")
    assert [path.name for path in files.train] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert files.test[0].parent.name == sub


def test_names_with_a_hash_and_the_sets_own_folder(small_cifar: Path) -> None:
    test = small_cifar / "cifar10" / "test.parquet"
    test.rename(test.with_name("test-00000-of-00001-70d52db3c749a935.parquet"))
    assert len(find("cifar10", CIFAR, small_cifar / "cifar10").test) == 1


def test_the_variable_is_used_and_the_argument_wins(
    small_cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AEDFL_DATA", str(small_cifar))
    assert len(data.load("cifar10").train) == 40
    with pytest.raises(UserError, match="elsewhere"):
        data.load("cifar10", tmp_path / "elsewhere")


def test_missing_files_say_what_was_looked_for_where(small_cifar: Path) -> None:
    (small_cifar / "cifar10" / "test.parquet").unlink()
    with pytest.raises(UserError) as error:
        data.load("cifar10", small_cifar)
    assert "neither test.parquet nor test-*-of-*.parquet" in str(error.value)
    assert str(small_cifar / "cifar10" / "plain_text") in str(error.value)


def test_a_missing_shard_is_named(small_cifar: Path) -> None:
    (small_cifar / "cifar10" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(
        UserError, match=r"train-00001-of-00002.parquet is missing in .*cifar10, where train-00000"
    ):
        data.load("cifar10", small_cifar)


def test_without_a_directory_the_hub_is_asked(small_cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repo: str, **options: object) -> str:
        asked.append((repo, options["repo_type"], options["allow_patterns"]))
        return str(small_cifar / "cifar10")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert len(data.load("cifar10").test) == 10
    assert asked == [("uoft-cs/cifar10", "dataset", ["*train*.parquet", "*test*.parquet"])]


def test_offline_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **options: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(UserError, match=r"could not be downloaded.*ConnectionError.*AEDFL_DATA") as error:
        data.load("imdb")
    assert "\n" not in str(error.value)
    assert data.describe()[1].problem == "data set 'cifar10' has not been downloaded yet from uoft-cs/cifar10"


def test_without_the_hub_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"huggingface_hub is not installed.*aedfl\[hub\]"):
        data.load("tiny-imagenet")
