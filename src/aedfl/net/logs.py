"""Structured logs: one JSON object per line, with the time, the level, a sentence, and what it is about."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

_USUAL = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
FILE_BYTES, FILES = 10 << 20, 3


class Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _USUAL},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(folder: Path | None, verbose: bool = False) -> None:
    """Warnings (or everything of interest) to stderr; all of it, every message included, to `log.jsonl`."""
    logger = logging.getLogger("aedfl.net")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers.clear()
    screen = logging.StreamHandler()
    screen.setLevel(logging.INFO if verbose else logging.WARNING)
    screen.setFormatter(Lines())
    logger.addHandler(screen)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = RotatingFileHandler(folder / "log.jsonl", maxBytes=FILE_BYTES, backupCount=FILES)
        file.setFormatter(Lines())
        logger.addHandler(file)
    logging.raiseExceptions = False  # a full disk must not fill the screen as well
