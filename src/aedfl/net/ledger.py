"""What the coordinator must not forget: the run, its members, its tokens. SQLite; no model, no data."""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS members (
  name TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, instance INTEGER NOT NULL, address TEXT NOT NULL,
  serial TEXT NOT NULL, gone INTEGER NOT NULL DEFAULT 0, finished INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS tokens (digest TEXT PRIMARY KEY, expires REAL NOT NULL, uses INTEGER NOT NULL);
"""


@dataclass
class Entry:
    """One member as the ledger knows it."""

    name: str
    index: int
    instance: int
    address: str
    serial: str
    left: bool = False
    finished: bool = False


class Ledger:
    """Every change is on the disk when its method returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._db.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; {_SCHEMA}")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} is not a coordinator's ledger: {error}") from None

    def get(self, key: str, default: str = "") -> str:
        row = self._db.execute("SELECT value FROM run WHERE key = ?", (key,)).fetchone()
        return default if row is None else str(row[0])

    def set(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, value))

    def members(self) -> list[Entry]:
        rows = self._db.execute("SELECT * FROM members ORDER BY number").fetchall()
        return [Entry(n, i, instance, a, s, bool(gone), bool(done)) for n, i, instance, a, s, gone, done in rows]

    def put(self, entry: Entry) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?)",
            (entry.name, entry.index, entry.instance, entry.address, entry.serial, entry.left, entry.finished),
        )

    def new_token(self, hours: float, uses: int) -> str:
        """A secret that lets that many new names in until it expires. Only its digest is kept."""
        token = secrets.token_urlsafe(24)
        expires = time.time() + hours * 3600
        self._db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (_digest(token), expires, uses))
        return token

    def has_tokens(self) -> bool:
        """False only for a run whose coordinator never got as far as making the first one."""
        return self._db.execute("SELECT 1 FROM tokens").fetchone() is not None

    def problem(self, token: str) -> str:
        """Why this token lets nobody in; empty if it does."""
        row = self._db.execute("SELECT expires, uses FROM tokens WHERE digest = ?", (_digest(token),)).fetchone()
        if not token:
            return "a join token is needed"
        if row is None:
            return "the join token is not one of this run"
        if row[0] <= time.time():
            return f"the join token expired {time.time() - row[0]:.0f} s ago"
        return "" if row[1] > 0 else "the join token has been used up"

    def spend(self, token: str) -> None:
        self._db.execute("UPDATE tokens SET uses = uses - 1 WHERE digest = ?", (_digest(token),))

    def close(self) -> None:
        self._db.close()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
