"""Where the Parquet files of a data set are: a given directory, AEDFL_DATA, or the Hugging Face hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Source:
    """Names of a data set's folder, of its repository on the hub, and of its two splits."""

    folder: str
    hub: str
    train: str = "train"
    test: str = "test"


@dataclass(frozen=True)
class Files:
    """The Parquet files of a data set, in row order."""

    train: tuple[Path, ...]
    test: tuple[Path, ...]

    @property
    def all(self) -> tuple[Path, ...]:
        return self.train + self.test


def data_directory(directory: PathLike | None = None) -> Path | None:
    """The argument, or else the variable AEDFL_DATA, or else None: download."""
    chosen = directory or os.environ.get("AEDFL_DATA")
    return Path(chosen).expanduser() if chosen else None


def find(name: str, source: Source, directory: PathLike | None = None, local_only: bool = False) -> Files:
    """The files of a data set; a directory that was given is never left for the hub in silence."""
    root = data_directory(directory)
    bases = _bases(root, name, source) if root else [download(name, source, local_only)]
    inside = (".", "plain_text", "data", source.folder.replace("_", "-"))  # the hub's own layouts
    places = [base / sub for base in bases for sub in inside]
    return Files(_split(name, source.train, places), _split(name, source.test, places))


def _bases(root: Path, name: str, source: Source) -> list[Path]:
    """Folders that may be the data set's own; `root` may be it too, if it is called so."""
    names = dict.fromkeys((source.folder, name))
    return [root / n for n in names] + ([root] if root.name in names else [])


def _split(name: str, split: str, places: list[Path]) -> tuple[Path, ...]:
    """The split's files in the first place that has any: `split.parquet`, or all its shards."""
    for place in places:
        if (place / f"{split}.parquet").is_file():
            return (place / f"{split}.parquet",)
        if place.is_dir() and (shards := _shards(name, split, place)):
            return shards
    raise UserError(
        f"data set '{name}': neither {split}.parquet nor {split}-*-of-*.parquet was found in "
        + " or ".join(dict.fromkeys(str(place) for place in places))
    )


def _shards(name: str, split: str, place: Path) -> tuple[Path, ...]:
    """Files such as `train-00000-of-00002.parquet` (the hub may add a hash), complete or an error."""
    pattern = re.compile(rf"{re.escape(split)}-(\d+)-of-(\d+)(-\w+)?\.parquet")
    found = [(match, path) for path in sorted(place.iterdir()) if (match := pattern.fullmatch(path.name))]
    present = {int(match[1]) for match, _ in found}
    for match, path in found:
        if missing := set(range(int(match[2]))) - present:
            gone = f"{split}-{min(missing):05}-of-{match[2]}.parquet"
            raise UserError(f"data set '{name}': {gone} is missing in {place}, where {path.name} is")
    return tuple(path for _, path in found)


def download(name: str, source: Source, local_only: bool = False) -> Path:
    """The folder of the hub's copy, downloaded unless it is there already."""
    help_ = "give a directory that holds it, or set AEDFL_DATA"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"data set '{name}' cannot be downloaded because huggingface_hub is not installed: {help_}, "
            "or install aedfl[hub]"
        ) from None
    patterns = [f"*{split}*.parquet" for split in (source.train, source.test)]
    try:
        return Path(
            snapshot_download(
                source.hub, repo_type="dataset", allow_patterns=patterns, local_files_only=local_only
            )
        )
    except Exception as error:  # its own errors, the HTTP library's and the system's have no common class
        if local_only:
            raise UserError(f"data set '{name}' has not been downloaded yet from {source.hub}") from error
        raise UserError(
            f"data set '{name}' could not be downloaded from the Hugging Face hub ({source.hub}, "
            f"{type(error).__name__}): {help_}"
        ) from error
