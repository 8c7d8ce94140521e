"""The data sets that have a name."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError
from .digits import digits
from .names import unknown
from .sources import PathLike, data_directory
from .types import Dataset

NAMES = ("digits", "cifar10", "emnist-letters", "tiny-imagenet", "imdb")


@dataclass(frozen=True)
class Row:
    """One line of `aedfl datasets`; sizes are None where the set was not found."""

    name: str
    task: str
    place: str
    found: bool
    train: int | None = None
    test: int | None = None
    problem: str = ""


def load(name: str, directory: PathLike | None = None, cache: PathLike | None = None) -> Dataset:
    """The data set of that name; files are looked for in `directory`, AEDFL_DATA, or else downloaded."""
    if name not in NAMES:
        raise unknown("data set", name, NAMES)
    if name == "digits":
        return digits()
    from .hubsets import HUB_SETS, load_hub_set

    return load_hub_set(HUB_SETS[name], directory, cache)


def describe(directory: PathLike | None = None) -> list[Row]:
    """What there is and where it was looked for; nothing is downloaded or decoded."""
    return [_describe(name, directory) for name in NAMES]


def _describe(name: str, directory: PathLike | None) -> Row:
    if name == "digits":
        task, data = "image classification, 10 classes", digits()
        return Row(name, task, "built in", True, len(data.train), len(data.test))
    from . import parquet
    from .hubsets import HUB_SETS
    from .sources import find

    spec = HUB_SETS[name]
    root = data_directory(directory)
    place = str(root / spec.source.folder) if root else f"Hugging Face hub, {spec.source.hub}"
    try:
        files = find(name, spec.source, root, local_only=True)
        return Row(name, spec.task, place, True, parquet.rows(files.train), parquet.rows(files.test))
    except UserError as error:
        return Row(name, spec.task, place, False, problem=str(error))
