"""The data sets that come as Parquet files: what they are, how they get into the cache and out of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from . import emnist, parquet, text
from .cache import cache_folder, cached, fingerprint, map_npy, write_npy
from .images import Look, Pixels, decode_files
from .progress import progress
from .sources import Files, PathLike, Source, find
from .types import Dataset, Normalisation, Split

FORMAT = "1"  # part of every cache key: raise it when what is written changes


@dataclass(frozen=True)
class HubSet:
    """One data set: where it lies, its column of inputs, its labels; `look` None means text."""

    name: str
    source: Source
    columns: tuple[str, ...]
    classes: int
    look: Look | None = None
    class_names: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        return f"{'image' if self.look else 'text'} classification, {self.classes} classes"


CIFAR = "airplane automobile bird cat deer dog frog horse ship truck"
HUB_SETS = {
    s.name: s
    for s in (
        HubSet(
            "cifar10", Source("cifar10", "uoft-cs/cifar10"), ("img", "image"), 10,
            Look("RGB", (32, 32)), tuple(CIFAR.split()),
        ),
        HubSet(
            "emnist-letters", Source("emnist_letters", "tanganke/emnist_letters"), ("image", "img"), 26,
            Look("L", (28, 28)), tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        ),
        HubSet(
            "tiny-imagenet", Source("tiny_imagenet", "zh-plus/tiny-imagenet", test="valid"), ("image", "img"),
            200, Look("RGB", (64, 64)),
        ),
        HubSet("imdb", Source("imdb", "stanfordnlp/imdb"), ("text",), 2, None, ("negative", "positive")),
    )
}  # fmt: skip


def load_hub_set(spec: HubSet, directory: PathLike | None = None, cache: PathLike | None = None) -> Dataset:
    """The data set from the cache, which is filled from its Parquet files at first use."""
    files = find(spec.name, spec.source, directory)
    key = fingerprint(files.all, FORMAT, spec.name)
    build = partial(_build_images if spec.look else _build_text, spec, files)
    return cached(cache_folder(cache), spec.name, key, build, partial(_read, spec))


def _read(spec: HubSet, folder: Path) -> Dataset:
    """Splits are memory-mapped: a row is read from the disk when it is first gathered."""
    meta = json.loads((folder / "meta.json").read_text())
    train, test = (Split(*(map_npy(folder / f"{s}_{v}.npy") for v in "xy")) for s in ("train", "test"))
    scale = Normalisation(tuple(meta["mean"]), tuple(meta["std"])) if "mean" in meta else None
    names = tuple(meta["class_names"])
    return Dataset(spec.name, train, test, spec.classes, scale, names, meta.get("vocabulary"))


def _build_images(spec: HubSet, files: Files, folder: Path) -> None:
    assert spec.look is not None
    labels = {s: parquet.read_labels(p) for s, p in (("train", files.train), ("test", files.test))}
    fix: Callable[[Pixels], Pixels] = np.ascontiguousarray
    if spec.name == "emnist-letters":
        labels, fix = emnist.as_here(labels, files.train, spec.columns, spec.look)
    tally = Tally()
    with progress(f"decoding {spec.name}", sum(map(len, labels.values()))) as advance:
        for split, paths in (("train", files.train), ("test", files.test)):
            chunks = (fix(chunk) for chunk in decode_files(paths, spec.columns, spec.look))
            counted = _watched(chunks, advance, tally if split == "train" else None)
            write_npy(folder / f"{split}_x.npy", counted, len(labels[split]))
    _write_labels(spec, labels, folder)
    mean, std = tally.moments()
    _write_meta(spec, files, folder, mean=mean, std=std)


def _build_text(spec: HubSet, files: Files, folder: Path) -> None:
    labels = {s: parquet.read_labels(p) for s, p in (("train", files.train), ("test", files.test))}
    words = text.build_vocabulary(review for some in _texts(files.train, spec.columns) for review in some)
    with progress(f"reading {spec.name}", sum(map(len, labels.values()))) as advance:
        for split, paths in (("train", files.train), ("test", files.test)):
            chunks = (text.encode(some, words) for some in _texts(paths, spec.columns))
            write_npy(folder / f"{split}_x.npy", _watched(chunks, advance), len(labels[split]))
    _write_labels(spec, labels, folder)
    (folder / "vocabulary.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    _write_meta(spec, files, folder, vocabulary=len(words))


def _texts(paths: Iterable[Path], columns: Sequence[str]) -> Iterator[list[str]]:
    for path in paths:
        for array in parquet.batches(path, columns, 1024):
            yield [str(review) for review in array.to_pylist()]


class Tally:
    """Mean and standard deviation per channel in whole numbers, so that chunks do not matter."""

    def __init__(self) -> None:
        self.pixels = 0
        self.sums: Any = 0
        self.squares: Any = 0

    def add(self, chunk: Pixels) -> None:
        wide = chunk.astype(np.int64)
        self.pixels += chunk.size // chunk.shape[1]
        self.sums = self.sums + wide.sum((0, 2, 3))
        self.squares = self.squares + (wide * wide).sum((0, 2, 3))

    def moments(self) -> tuple[list[float], list[float]]:
        """For pixels scaled to [0, 1]; a channel that never changes gets the deviation 1."""
        mean = self.sums / self.pixels / 255
        std = np.sqrt(np.maximum(self.squares / self.pixels / 255**2 - mean**2, 0))
        return mean.tolist(), np.where(std > 0, std, 1.0).tolist()


def _watched(
    chunks: Iterable[NDArray[Any]], advance: Callable[[int], None], tally: Tally | None = None
) -> Iterator[NDArray[Any]]:
    for chunk in chunks:
        if tally:
            tally.add(chunk)
        yield chunk
        advance(len(chunk))


def _write_labels(spec: HubSet, labels: dict[str, NDArray[np.int64]], folder: Path) -> None:
    for split, values in labels.items():
        if not len(values) or values.min() < 0 or values.max() >= spec.classes:
            seen = f"{values.min()} to {values.max()}" if len(values) else "no samples"
            raise UserError(
                f"data set '{spec.name}': {split} labels must lie in 0 to {spec.classes - 1}, found {seen}"
            )
        write_npy(folder / f"{split}_y.npy", [values], len(values))


def _write_meta(spec: HubSet, files: Files, folder: Path, **values: Any) -> None:
    names = spec.class_names or parquet.class_names(files.train[0])
    (folder / "meta.json").write_text(json.dumps({"class_names": names, **values}))
