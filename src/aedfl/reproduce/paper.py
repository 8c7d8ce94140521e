"""The paper's own numbers, typed in from its tables and its text."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..report.comparison import Column


@dataclass(frozen=True)
class Printed:
    """What a table of the paper says of one method; `time` is None where the target was not reached."""

    accuracy: float
    time: float | None
    mmacs: float


@cache
def _numbers() -> dict[str, Any]:
    return tomllib.loads((files("aedfl.reproduce") / "paper.toml").read_text())


def printed(setting: str, method: str) -> Printed | None:
    """The paper's row, if that setting and method are in its tables."""
    row = _numbers()["tables"].get(setting, {}).get(method)
    if row is None:
        return None
    accuracy, time, mmacs = row
    return Printed(accuracy, None if time == "/" else float(time), mmacs)


def shown(setting: str, method: str, column: Column) -> str:
    """The paper's number of a column, as the paper writes it; empty where it has none."""
    row = printed(setting, method)
    if row is None or column.key not in ("accuracy", "time", "mmacs"):
        return ""
    value = getattr(row, column.key)
    return "/" if value is None else f"{value:{column.form}}"


def claims(figure: str) -> dict[str, Any]:
    """Numbers that the text gives for a figure."""
    return dict(_numbers()["figures"].get(figure, {}))
