"""A device's folder: its lock, its identity, its durable state, its record and its model.

State is written by a thread of its own, newest first: what is waiting to be written is replaced by what is newer.
So saving never holds up training, and a disk that is full or slow costs nothing but the age of the state.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from ..context import Message
from ..errors import AedflError, UserError
from ..experiment.record import read_rows
from . import state

log = logging.getLogger(__name__)
SPOOLED = 64 << 20
"""Bytes of a model above which an arrived message is not put on the disk as well."""
DIGITS = 12
"""Of a message's number, which is the name of its file."""


class Store:
    """One device's folder. Only one process at a time may have it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = _locked(folder)
        self.instance = _instance(folder / "instance")
        self.trouble = ""
        self._pending: Any = None
        self._writing: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(1, "store")
        self._record: IO[bytes] | None = None
        (folder / "inbox").mkdir(exist_ok=True)
        self._kept: dict[int, int] = {}
        self._wanted: dict[int, Message] = {}
        """The messages in the box; the writer's thread looks there too, so that no taken one waits for a slow disk."""
        self._count = 0

    def load(self, find: state.Find) -> Any:
        return state.read(self.folder / "state.safetensors", find)

    def save(self, snapshot: Any) -> None:
        """Hands the newest snapshot to the writer and returns at once. The snapshot must not change any more."""
        self._pending = snapshot
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._pending is not None:
                snapshot, self._pending = self._pending, None
                await loop.run_in_executor(self._pool, self._put, snapshot)
        finally:
            self._writing = None

    def _put(self, snapshot: Any) -> None:
        self.attempt(lambda: state.write(self.folder / "state.safetensors", snapshot))

    def attempt(self, action: Callable[[], Any]) -> None:
        """A disk that will not take it is trouble to report, not a reason to stop; a state of odd parts likewise."""
        try:
            action()
            self.trouble = ""
        except OSError as error:
            self._complain(f"cannot write to {self.folder}: {error.strerror or error}; the older state is kept")
        except AedflError as error:
            self._complain(f"{error}; the older state is kept")

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.error(trouble, extra={"event": "disk"})
        self.trouble = trouble

    # ---- messages that have arrived and were not taken yet

    def keep(self, message: Message) -> None:
        """Puts the message where it survives a crash; one that is too large for that is held in memory alone."""
        if message.model is not None and message.model.vector.get().nbytes > SPOOLED:
            return
        self._count += 1
        self._kept[id(message)] = self._count
        self._wanted[self._count] = message
        self._pool.submit(self._spool, self._count)

    def _place(self, number: int) -> Path:
        return self.folder / "inbox" / f"{number:0{DIGITS}d}.safetensors"

    def _spool(self, number: int) -> None:
        if (message := self._wanted.get(number)) is not None:
            self.attempt(lambda: state.write(self._place(number), vars_of(message), durable=False))
        if number not in self._wanted:  # taken meanwhile
            self._erase(number)

    def _erase(self, number: int) -> None:
        self.attempt(lambda: self._place(number).unlink(missing_ok=True))

    def drop(self, message: Message) -> None:
        """The program has it: after a crash it does not come again."""
        number = self._kept.pop(id(message), None)
        if number is not None:
            self._wanted.pop(number, None)
            self._erase(number)

    def messages(self, find: state.Find) -> list[Message]:
        """What an earlier process had received and not taken, oldest first.

        They are not synced, so after a power cut one may be damaged; it counts as lost on the way.
        """
        found = []
        for path in (self.folder / "inbox").glob("*.partial"):
            path.unlink(missing_ok=True)
        for path in sorted((self.folder / "inbox").glob("[0-9]" * DIGITS + ".safetensors")):
            self._count = int(path.name.partition(".")[0])
            try:
                message = Message(**state.read(path, find))
            except AedflError as error:
                log.warning(f"a message that had arrived is lost: {error}", extra={"event": "inbox"})
                self._erase(self._count)
                continue
            self._kept[id(message)] = self._count
            self._wanted[self._count] = message
            found.append(message)
        return found

    async def settle(self) -> None:
        """Waits until everything that was handed over is on the disk (or could not be written)."""
        while self._writing is not None:
            await asyncio.shield(self._writing)

    def open_record(self, update: int) -> None:
        """Rows of local updates that the state does not know of are cut off: they will be written again."""
        path = self.folder / "updates.jsonl"
        rows = [row for row in read_rows(path) if row["update"] <= update]
        text = b"".join(_line(row) for row in rows)
        self.attempt(lambda: state.replace(path, [memoryview(text)]))
        self.attempt(lambda: setattr(self, "_record", path.open("ab", buffering=0)))

    def add(self, row: dict[str, Any]) -> None:
        record = self._record
        if record is not None:
            self.attempt(lambda: record.write(_line(row)))

    def append(self, name: str, row: dict[str, Any]) -> None:
        """One more line of a small file."""

        def write() -> None:
            with (self.folder / name).open("ab") as file:
                file.write(_line(row))

        self.attempt(write)

    def dump(self, name: str, content: Any) -> None:
        text = json.dumps(content, indent=2).encode() + b"\n"
        self.attempt(lambda: state.replace(self.folder / name, [memoryview(text)]))

    def close(self) -> None:
        self._pool.shutdown()
        if self._record is not None:
            self._record.close()
        self._lock.close()


def vars_of(message: Message) -> dict[str, Any]:
    return {"source": message.source, "kind": message.kind, "model": message.model, "fields": dict(message.fields)}


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _locked(folder: Path) -> IO[bytes]:
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(f"{folder} is in use by another device process; give each device a folder of its own") from None
    return file


def _instance(path: Path) -> int:
    """Drawn once per folder, so that a device that comes back is told from a second one of the same name."""
    if not path.exists():
        state.replace(path, [memoryview(f"{secrets.randbits(63)}\n".encode())])
    text = path.read_text().strip()
    if not text.isdecimal():
        raise UserError(f"{path} holds {text[:40]!r} instead of a number; move it away to join as another device")
    return int(text)
