"""Records of finished cells: one JSON line each, one file per setting; the only source of tables and figures."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from .. import __version__
from ..errors import UserError
from ..experiment.summary import summarise
from .plan import Cell, Key, resolved_hyper
from .pool import Outcome

Record = dict[str, Any]

HEAD = ("setting", "method", "seed", "changes", "tuned", "config", "reached")
"""What every record has, however it ended."""

CURVE = ("time", "accuracy", "local_accuracy", "worst_tenth", "loss", "mmacs", "bytes_sent", "updates")


def make(cell: Cell, outcome: Outcome) -> Record:
    """The record of a cell, whole or as far as it came."""
    rows = outcome.rows
    made: Record = {
        "setting": cell.key.setting,
        "method": cell.key.method,
        "seed": cell.key.seed,
        "changes": list(cell.key.changes),
        "target": cell.target,
        "command": cell.command,
        "config": cell.identity,
        "hyper": resolved_hyper(cell.config),
        "tuned": cell.key.tuned,
        "code": code_version(),
        "device": outcome.device,
        "torch": torch.__version__,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "until": cell.config.stop.virtual_seconds,
        "reached": rows[-1]["time"] if rows else 0.0,
        "complete": outcome.complete,
    }
    if outcome.error:
        made["error"] = outcome.error
    if rows:
        summary = summarise(cell.config, rows, outcome.metric, outcome.wall)
        made["curve"] = {name: [_short(row[name]) for row in rows] for name in CURVE}
        made["costs"] = {name: _short(value) for name, value in summary.pop("costs").items()}
        made["summary"] = {name: _short(value) for name, value in summary.items()}
    return made


def key_of(record: Record) -> Key:
    changes, tuned = tuple(record["changes"]), bool(record["tuned"])
    return Key(record["setting"], record["method"], record["seed"], changes, tuned)


class Store:
    """The records in a folder. Adding writes at once, so that nothing finished is ever lost."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[Key, Record] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for record in read(path):
                self._keep(record, replace=True)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._found.values())

    def prepare(self) -> None:
        """Fails where nothing could be written: before hours of work, not after."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=self.folder):
            pass

    def get(self, key: Key) -> Record | None:
        return self._found.get(key)

    def reached(self, key: Key, identity: str) -> float:
        """Virtual seconds of that cell's curve; 0 if there is none of this config."""
        record = self.get(key)
        return float(record["reached"]) if record is not None and record["config"] == identity else 0.0

    def like(self, identity: str, end: float) -> Record | None:
        """Any record of that config that goes so far, under whatever key."""
        return next((r for r in self if r["config"] == identity and r["reached"] >= end and "error" not in r), None)

    def add(self, record: Record, replace: bool = False) -> bool:
        """Takes a record in and writes it; false if the one that is there goes further."""
        if not self._keep(record, replace):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{record['setting']}.jsonl"
        with path.open("a") as file:
            _end_line(path)
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())
        return True

    def tidy(self) -> None:
        """Rewrites the files: one line per cell, in a fixed order."""
        for path in sorted(self.folder.glob("*.jsonl")):
            mine = [record for record in self if record["setting"] == path.stem]
            mine.sort(key=lambda r: (r["changes"], r["method"], r["seed"], r["tuned"]))
            partial = path.with_suffix(".partial")
            partial.write_text("".join(map(_line, mine)))
            partial.replace(path)

    def _keep(self, record: Record, replace: bool) -> bool:
        """One of the same config takes the place of one that does not go further, one of another config of a shorter
        one; or, with `replace`, of any."""
        old = self._found.get(key_of(record))
        if old is not None:
            before, now, same = _worth(old), _worth(record), old["config"] == record["config"]
            if not (now >= before if same else replace or now > before):
                return False
        self._found[key_of(record)] = record
        return True


def _worth(record: Record) -> tuple[bool, float]:
    return "error" not in record, record["reached"]


def read(path: Path) -> list[Record]:
    """The records of a file; a last line that was cut off is left out."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text, so it is not a file of records") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}, line {number} is no JSON, so it is not a file of records") from None
            break
        if not isinstance(record, dict) or not record.keys() >= set(HEAD):
            raise UserError(f"{path}, line {number} is no record: it has to be an object with {', '.join(HEAD)}")
        found.append(record)
    return found


@functools.cache
def code_version() -> dict[str, str | None]:
    """Package version, git commit where there is one, and a hash of the source itself."""
    root = Path(__file__).parents[1]
    source = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.c", "*.h") for path in root.rglob(kind)):
        source.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return {"version": __version__, "commit": _commit(root), "source": source.hexdigest()[:16]}


def _commit(root: Path) -> str | None:
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None


def _end_line(path: Path) -> None:
    """Cuts a last line off that was not written to its end: what follows it would be lost as well."""
    with path.open("rb+") as file:
        if not file.seek(0, os.SEEK_END):
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def _line(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n"


def _short(value: Any) -> Any:
    """Six digits are more than any figure means."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
