"""A folder of decoded data sets: built once, as a whole or not at all, and memory-mapped afterwards.

Several processes may ask for the same entry at once: one builds it while the others wait.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError

T = TypeVar("T")
_BLOCK = 1 << 16
_SAMPLES = 16


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The argument, or else the variable AEDFL_CACHE, or else `~/.cache/aedfl`."""
    return Path(cache or os.environ.get("AEDFL_CACHE") or "~/.cache/aedfl").expanduser()


def fingerprint(files: Iterable[Path], *extra: str) -> str:
    """Depends on names, sizes and blocks spread over the files (the footer is one), not on times."""
    state = blake2b("\n".join(extra).encode(), digest_size=8)
    for path in files:
        try:
            for block in _blocks(path):
                state.update(block)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    return state.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield f"\n{path.name} {size}\n".encode()
    with path.open("rb") as file:
        for k in range(_SAMPLES + 1):
            file.seek(max(0, size - _BLOCK) * k // _SAMPLES)
            yield file.read(_BLOCK)


def cached(folder: Path, name: str, key: str, build: Callable[[Path], None], read: Callable[[Path], T]) -> T:
    """`read` of the entry's folder, after `build` has filled it if it is missing or cannot be read."""
    final = folder / f"{name}-{key}"
    entry = _try(read, final)
    if entry is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _lock(folder / f".{name}.lock") as alone:
                entry = _try(read, final)
                return _build(final, build, read, alone) if entry is None else entry
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(
                f"the decoded data set '{name}' cannot be kept in {folder}: {reason}; "
                "make room or choose another folder with AEDFL_CACHE"
            ) from error
    return entry


def _try(read: Callable[[Path], T], final: Path) -> T | None:
    """None where the entry is missing or damaged, so that it is built anew."""
    try:
        return read(final)
    except (OSError, ValueError, KeyError):
        return None


def _build(final: Path, build: Callable[[Path], None], read: Callable[[Path], T], alone: bool) -> T:
    """Fills a folder beside the final one and renames it, so that no half-written entry is ever seen."""
    name = final.name.rpartition("-")[0]
    if alone:  # nobody else builds this set, so these are what a killed process left behind
        for leftover in final.parent.glob(f".{name}-*.part"):
            shutil.rmtree(leftover, ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)
    part = final.parent / f".{final.name}-{uuid4().hex}.part"
    part.mkdir()
    try:
        build(part)
        _rename(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return read(final)


def _rename(part: Path, final: Path) -> None:
    """Where locks do not work, another process may have been faster: its entry is as good."""
    try:
        part.rename(final)
    except OSError:
        if not final.is_dir():
            raise


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Waits for the lock, which dies with its process; False where the file system has no locks."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def write_npy(path: Path, chunks: Iterable[NDArray[Any]], rows: int) -> None:
    """Writes chunks [k, ...] one after the other as one array [rows, ...].

    Plain writes, not a memory map: on a full disk a map kills the process instead of raising.
    """
    written = 0
    with path.open("wb") as file:
        for chunk in chunks:
            if not written:
                header = {"descr": chunk.dtype.str, "fortran_order": False, "shape": (rows, *chunk.shape[1:])}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(np.ascontiguousarray(chunk).data)
            written += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    if written != rows:
        raise UserError(f"{path.stem} has {written} rows instead of the {rows} that the files announce")


def map_npy(path: Path) -> Tensor:
    """The array as a tensor, memory-mapped copy-on-write: writing to it never reaches the file."""
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
