"""A run's record: rows of numbers, written in order once they are known, cut back exactly on resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from ..errors import UserError
from ..sim.work import fetch, plain

STREAMS = ("metrics", "updates", "journal")
Row = dict[str, Any] | list[Any]


def _line(row: Row) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


class Record:
    """Rows of several streams, in memory, or as `STREAM.jsonl` files in a folder.

    A row may hold values that are not computed yet; `settle` writes rows whose values are all known by then.
    While `replaying`, rows are dropped: they stand in the files already.
    """

    def __init__(self, folder: Path | None = None, offsets: dict[str, int] | None = None) -> None:
        self.folder = folder
        self.replaying = False
        self.rows: dict[str, list[Any]] = {stream: [] for stream in STREAMS}
        self._pending: list[tuple[str, Row]] = []
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

    def add(self, stream: str, row: Row) -> None:
        if not self.replaying:
            self._pending.append((stream, row))

    def settle(self) -> dict[str, int]:
        """Writes everything that was added, and says how long each file is then."""
        fetched = fetch([row for _, row in self._pending])
        for stream, row in self._pending:
            settled = plain(row, fetched)
            if self.folder is None:
                self.rows[stream].append(settled)
            else:
                self._files[stream].write(_line(settled))
        self._pending.clear()
        for file in self._files.values():
            file.flush()
        return {stream: file.tell() for stream, file in self._files.items()}

    def read(self, stream: str) -> list[Any]:
        """All rows of a stream that were settled."""
        if self.folder is None:
            return self.rows[stream]
        return read_rows(self.folder / f"{stream}.jsonl")

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _check(folder: Path, offsets: dict[str, int]) -> None:
    """Before anything is cut: all that a checkpoint counts on must be there."""
    for stream, offset in offsets.items():
        path = folder / f"{stream}.jsonl"
        if offset > (path.stat().st_size if path.exists() else 0):
            raise UserError(f"{path} is shorter than when the checkpoint was made, so the run cannot be resumed")


def read_rows(path: Path, end: int | None = None) -> list[Any]:
    """The rows of a stream's file, up to a length in bytes; an unfinished last line is left out."""
    if not path.exists():
        return []
    data = path.read_bytes()[:end]
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
