"""Kernels in C for a CPU: compiled once for this processor, by the compiler that is there, and kept in the cache.

Where there is no compiler, or it fails, there are no kernels, and PyTorch's own functions do their work.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import subprocess
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from ..data.cache import cache_folder

SOURCES = ("conv_pool.c", "merge.c")
OPTIONS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
TARGETS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
"""Options for the processor, the best first; not every compiler knows all of them."""
SECONDS = 120
"""A compiler that takes longer has failed."""


class Shape(ctypes.Structure):
    """`shape` in conv_pool.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("samples", "channels", "height", "width", "filters", "rows", "columns", "above", "left")
    ]


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a contiguous tensor's numbers lie."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, ready to be called, or None where they cannot be had."""
    return next((found for target in TARGETS if (found := compiled(target)) is not None), None)


def compiled(target: tuple[str, ...]) -> ctypes.CDLL | None:
    """The kernels for one set of options, from the cache or anew."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    try:
        texts = {name: (files(__package__) / name).read_bytes() for name in SOURCES}
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=SECONDS, check=True).stdout
        key = b"\0".join((*texts.values(), version, _processor().encode(), " ".join((*OPTIONS, *target)).encode()))
        path = cache_folder() / "kernels" / f"{blake2b(key, digest_size=12).hexdigest()}.so"
        if not path.exists():
            _build([*compiler, *OPTIONS, *target], texts, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _build(command: list[str], texts: dict[str, bytes], path: Path) -> None:
    """Another process that builds the same at the same time does no harm: whoever comes last replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_bytes(text)
        made = Path(folder) / "kernels.so"
        subprocess.run(
            [*command, "-o", made.name, *texts], cwd=folder, capture_output=True, timeout=SECONDS, check=True
        )
        made.replace(path)


def _processor() -> str:
    """A cache may be shared by machines with different processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
