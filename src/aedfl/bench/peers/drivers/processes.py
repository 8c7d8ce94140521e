"""What a process and all that it started use, read from /proc. Needs the standard library only."""

from __future__ import annotations

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def family(root: int) -> list[int]:
    """The process and everything below it, as far as they are alive."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, left = [], [root]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def below(parent: int) -> int:
    """The child of `parent` that this process descends from; launchers may have put others between."""
    pid = os.getpid()
    while (fields := _stat(pid)) and int(fields[1]) not in (parent, 0, 1):
        pid = int(fields[1])
    return pid


def cpu_seconds(pids: list[int]) -> float:
    """Processor time in user and system mode, with that of children that have ended."""
    return sum(sum(int(part) for part in fields[11:15]) for pid in pids if (fields := _stat(pid))) / TICKS


def pss_bytes(pids: list[int]) -> int:
    """Proportional set size: memory that several processes share counts once."""
    return sum(_pss(pid) for pid in pids)


def _stat(pid: int) -> list[str]:
    """The fields behind the command's name; empty for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
