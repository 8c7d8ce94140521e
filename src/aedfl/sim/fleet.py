"""Devices: how fast each one computes, and when it is there."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ..errors import UserError
from ..randomness import generator

EVENTS = ("join", "crash", "leave")
"""`join` starts a device (again); `crash` stops it at once; `leave` stops it for good."""

Change = tuple[float, str]


@dataclass(frozen=True)
class Fleet:
    """Seconds of an unpruned local update per device, and each device's comings and goings."""

    seconds: tuple[float, ...]
    changes: dict[int, tuple[Change, ...]]
    mean_up: float | None = None
    mean_down: float | None = None
    seed: int = 0

    def life(self, device: int) -> Iterator[Change]:
        """The device's changes in order of time; endless where they are drawn from a distribution."""
        if device in self.changes:
            return iter(self.changes[device])
        return chain([(0.0, "join")], self._drawn(device) if self.mean_up else ())

    def _drawn(self, device: int) -> Iterator[Change]:
        assert self.mean_up is not None and self.mean_down is not None
        time, number = 0.0, 0
        while True:
            number += 1
            up, down = generator(self.seed, device, number, "availability").exponential([self.mean_up, self.mean_down])
            yield time + up, "crash"
            time += up + down
            yield time, "join"


def uniform_seconds(devices: int, fastest: float, slowest: float, seed: int) -> tuple[float, ...]:
    """Update times spread uniformly between the fastest and the slowest."""
    return tuple(generator(seed, "speeds").uniform(fastest, slowest, devices).tolist())


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    try:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.reader(file), 1):
                cells = [cell.strip() for cell in row]
                if not any(cells) or cells[0].startswith("#") or cells == list(columns):
                    continue
                if len(cells) != len(columns):
                    raise UserError(f"{path} line {number} is {','.join(row)!r}; expected {','.join(columns)}")
                yield number, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _number(path: Path, line: int, name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise UserError(f"{path} line {line}: {name} is {text!r}; allowed is a number from {low:g} to {high:g}")
    return value


def _device(path: Path, line: int, text: str, devices: int) -> int:
    if text.isdecimal() and int(text) < devices:
        return int(text)
    raise UserError(f"{path} line {line}: device is {text!r}; allowed is a whole number from 0 to {devices - 1}")


def read_trace(path: Path, devices: int) -> dict[int, tuple[Change, ...]]:
    """Availability from a CSV file with lines `device,time,event`; devices it does not name are always there."""
    changes: dict[int, list[Change]] = {}
    for line, (device, time, event) in _rows(path, ("device", "time", "event")):
        index = _device(path, line, device, devices)
        if event not in EVENTS:
            raise UserError(f"{path} line {line}: event is {event!r}; allowed are {', '.join(EVENTS)}")
        changes.setdefault(index, []).append((_number(path, line, "time", time, 0, float("inf")), event))
    for index, life in changes.items():
        life.sort(key=lambda change: change[0])
        if life[0][1] != "join":
            life.insert(0, (0.0, "join"))
        changes[index] = life
    return {index: tuple(life) for index, life in changes.items()}


def read_speeds(path: Path, devices: int) -> tuple[float, ...]:
    """Update times from a CSV file with lines `device,seconds`, one for every device."""
    found: dict[int, float] = {}
    for line, (device, text) in _rows(path, ("device", "seconds")):
        index = _device(path, line, device, devices)
        if index in found:
            raise UserError(f"{path} line {line}: device {index} is listed twice; one line per device is allowed")
        found[index] = _number(path, line, "seconds", text, 1e-9, 1e9)
    missing = [index for index in range(devices) if index not in found]
    if missing:
        raise UserError(f"{path} gives no seconds for device {missing[0]}; one line per device is needed")
    return tuple(found[index] for index in range(devices))
