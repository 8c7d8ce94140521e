"""Where, when and how figures were measured: without this no figure can be compared."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__


def stamp(device: str = "cpu") -> dict[str, Any]:
    """Machine, date, versions and command line, as JSON can hold them."""
    return {
        "command": shlex.join(["aedfl", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": versions("torch", "numpy", "simpy") | {"aedfl": __version__, "python": platform.python_version()},
    }


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, cores, memory and how busy they were; the accelerator where one is measured."""
    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def versions(*packages: str) -> dict[str, str | None]:
    """Of installed packages; None for one that is not there."""

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: of(name) for name in packages}
