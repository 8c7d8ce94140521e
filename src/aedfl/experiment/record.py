"""A run's record: rows of numbers, written in order once they are known, cut back exactly on resume."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from ..sim.work import fetch
from ..transfer import Later

STREAMS = ("metrics", "updates", "journal")
Row = dict[str, Any] | list[Any]
Coming = Row | Later[dict[str, Any]]
"""A row, or one that is being measured."""


def _line(row: Row) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


class Record:
    """Rows of several streams, in memory, or as `STREAM.jsonl` files in a folder.

    A row may hold values that are not computed yet; by the time of `begin` (of those it begins) or `settle` they must
    be. What has begun to be brought over from an accelerator is written by the next `begin`, or when somebody wants to
    read it.
    While `replaying`, rows are dropped: they stand in the files already.
    """

    def __init__(self, folder: Path | None = None, offsets: dict[str, int] | None = None) -> None:
        self.folder = folder
        self.replaying = False
        self.rows: dict[str, list[Any]] = {stream: [] for stream in STREAMS}
        self._pending: list[tuple[str, Coming]] = []
        self._begun = 0
        self._under_way: tuple[list[str], Later[list[Row]]] | None = None
        self._files: dict[str, IO[bytes]] = {}
        if folder is not None:
            _check(folder, offsets or {})
            for stream in STREAMS:
                self._files[stream] = self._open(folder / f"{stream}.jsonl", (offsets or {}).get(stream, 0))

    @staticmethod
    def _open(path: Path, offset: int) -> IO[bytes]:
        file = path.open("r+b" if path.exists() else "w+b")
        file.truncate(offset)
        file.seek(offset)
        return file

    def add(self, stream: str, row: Coming) -> None:
        if not self.replaying:
            self._pending.append((stream, row))

    @property
    def added(self) -> int:
        """Rows that were added so far."""
        return self._begun + len(self._pending)

    def begin(self, until: int | None = None, last: tuple[str, Coming] | None = None) -> None:
        """Begins to bring over what was added (`until` so many rows were) and a `last` row, and only then waits for
        what was under way before.
        """
        count = len(self._pending) if until is None else until - self._begun
        chosen, self._pending = self._pending[:count], self._pending[count:]
        self._begun += count
        chosen += [last] if last else []
        streams, rows = [stream for stream, _ in chosen], fetch([row for _, row in chosen])
        self._finish()
        self._under_way = streams, rows
        if rows.ready:
            self._finish()

    def _finish(self) -> None:
        """Writes what is under way."""
        if self._under_way is None:
            return
        (streams, rows), self._under_way = self._under_way, None
        for stream, row in zip(streams, rows.get(), strict=True):
            if self.folder is None:
                self.rows[stream].append(row)
            else:
                self._files[stream].write(_line(row))
        for file in self._files.values():
            file.flush()

    def settle(self) -> dict[str, int]:
        """Writes everything that was added, and says how long each file is then."""
        self.begin()
        self._finish()
        return {stream: file.tell() for stream, file in self._files.items()}

    def read(self, stream: str) -> list[Any]:
        """All rows of a stream but those that were added since the last `begin` or `settle`."""
        self._finish()
        if self.folder is None:
            return self.rows[stream]
        return read_rows(self.folder / f"{stream}.jsonl")

    def close(self) -> None:
        self._finish()
        for file in self._files.values():
            file.close()


def _check(folder: Path, offsets: dict[str, int]) -> None:
    """Before anything is cut: all that a checkpoint counts on must be there."""
    for stream, offset in offsets.items():
        path = folder / f"{stream}.jsonl"
        if offset > (path.stat().st_size if path.exists() else 0):
            raise UserError(f"{path} is shorter than when the checkpoint was made, so the run cannot be resumed")
    read_rows(folder / "metrics.jsonl", offsets.get("metrics", 0))


def read_rows(path: Path, end: int | None = None) -> list[Any]:
    """The rows of a stream's file, up to a length in bytes; an unfinished last line is left out."""
    if not path.exists():
        return []
    data = path.read_bytes()[:end]
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return [_row(line, path, number) for number, line in enumerate(lines, 1)]


def _row(line: bytes, path: Path, number: int) -> Any:
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict | list):
            return row
    raise UserError(f"{path} is damaged: line {number} is no row of a record")
