"""The folder of a run: one process holds it at a time, and what is replaced in it goes only once the new run begins."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from .record import STREAMS

CONFIG, SUMMARY = "config.toml", "summary.json"
LOCK, ASIDE, GONE = ".lock", ".replaced", ".gone"
"""In a run folder: what its process holds; the run that was there until the new one begins; the same, being deleted."""
FILES = ("traffic.json", "wall.json", "model.safetensors", "report.html", "checkpoints", "tensorboard", "wandb")
WRITTEN = {CONFIG, SUMMARY, *FILES, *(f"{stream}.jsonl" for stream in STREAMS)}
"""All that a run writes into its folder, each file as `.partial` first."""


def ended(folder: Path) -> bool:
    """Whether a run came to its end in that folder."""
    return (folder / CONFIG).is_file() and (folder / SUMMARY).is_file()


def read_summary(folder: Path) -> dict[str, Any]:
    """What `summary.json` says, or a `UserError` if it does not say what it must."""
    try:
        found = json.loads((folder / SUMMARY).read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= {"method", "seed", "accuracy"}:
        raise UserError(f"{folder / SUMMARY} is damaged; delete it, and --resume makes the run anew")
    return found


def entries(folder: Path) -> list[Path]:
    """What is in a folder, but for what holding it leaves there."""
    return [path for path in sorted(folder.iterdir()) if path.name not in (LOCK, ASIDE, GONE)]


def strangers(folder: Path) -> list[str]:
    """The names of what is in a run folder and no run writes."""
    return [path.name for path in entries(folder) if path.name not in WRITTEN and path.suffix != ".partial"]


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """Holds a folder, made if there is none, against other processes; `UserError` if one of them has it.

    A run that was set aside for one that never began comes back. A folder that was made here and stayed empty goes.
    """
    if folder is None:
        yield
        return
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _lock(folder):
            _bring_back(folder)
            try:
                yield
            finally:
                _bring_back(folder)
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """The system lets go of the lock if this process dies."""
    file = _locked(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        file.close()


def _locked(folder: Path) -> IO[bytes]:
    """The folder's lock file, locked where the file system knows locks."""
    path = folder / LOCK
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"run folder {folder} is in use by a run that goes on; let it end, or stop it") from None
        except OSError:
            return file
        with suppress(FileNotFoundError):  # whoever held it may have deleted it meanwhile
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()


@contextmanager
def beginning(folder: Path | None) -> Iterator[None]:
    """While a run is built in a folder that was claimed for it: if that fails, nothing of it stays there.

    If not, what was set aside for it goes.
    """
    try:
        yield
    except BaseException as error:
        if folder is not None:
            _clear(folder)
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt("the run had not begun, and its folder is as it was before") from None
        raise
    if folder is not None and (folder / ASIDE).is_dir():
        (folder / ASIDE).rename(folder / GONE)
        shutil.rmtree(folder / GONE, ignore_errors=True)


def set_aside(folder: Path) -> None:
    """Makes room for another run. The config goes last, so that without it not all is aside."""
    aside = folder / ASIDE
    aside.mkdir()
    for path in sorted(entries(folder), key=lambda path: path.name == CONFIG):
        path.rename(aside / path.name)


def _bring_back(folder: Path) -> None:
    """Undoes `set_aside`, wherever it or this was cut short."""
    aside = folder / ASIDE
    shutil.rmtree(folder / GONE, ignore_errors=True)
    if not aside.is_dir():
        return
    if (aside / CONFIG).exists():
        _clear(folder)
        (aside / CONFIG).rename(folder / CONFIG)
    for path in aside.iterdir():
        path.rename(folder / path.name)
    aside.rmdir()


def _clear(folder: Path) -> None:
    for path in entries(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
