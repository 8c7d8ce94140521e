"""Kernels in C for a CPU: compiled once for this processor, by the compiler that is there, and kept in the cache.

Where there is no compiler, or it fails, there are no kernels, and PyTorch's own functions do their work.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import subprocess
from functools import cache, partial
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path

from torch import Tensor

from ..data.cache import cache_folder, cached
from ..errors import UserError

SOURCES = ("chain.c", "conv_pool.c", "line_max.c", "merge.c")
HEADERS = ("conv_pool.h", "vectors.h")
OPTIONS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
TARGETS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
"""Options for the processor, the best first; not every compiler knows all of them."""
SECONDS = 60
"""A compiler that takes longer has failed."""
BINARY = "kernels.so"

_log = logging.getLogger(__name__)


class Shape(ctypes.Structure):
    """`shape` in conv_pool.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("samples", "channels", "height", "width", "filters", "rows", "columns", "over", "left")
    ]


class Line(ctypes.Structure):
    """`line` in line_max.c."""

    _fields_ = [(name, ctypes.c_int64) for name in ("samples", "channels", "places", "filters", "width")]


class Layer(ctypes.Structure):
    """`layer` in chain.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "level", "relu", "inputs", "outputs", "column")),
        *((name, ctypes.c_int64) for name in ("weight", "bias")),
        ("image", Shape),
        *((name, ctypes.c_int64) for name in ("table", "words", "channels", "width")),
    ]


class Steps(ctypes.Structure):
    """`plan` in chain.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "parameters", "batch", "samples", "steps")),
        *((name, ctypes.c_float) for name in ("lr", "momentum", "weight_decay", "proximal", "clip_norm")),
    ]


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a contiguous tensor's numbers lie."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, ready to be called, or None where they cannot be had."""
    reason = ""
    for target in TARGETS:
        try:
            return compiled(target)
        except subprocess.TimeoutExpired as error:
            reason = str(error)
            break
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError, UserError) as error:
            reason = str(error)
    _log.info("no kernels in C, PyTorch's functions do their work: %s", reason)
    return None


def compiled(target: tuple[str, ...]) -> ctypes.CDLL:
    """The kernels for one set of options, from the cache or anew; raises what compiler or disk have against it."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), *OPTIONS, *target]
    version = _run([command[0], "--version"])
    texts = {name: (files(__package__) / name).read_bytes() for name in (*SOURCES, *HEADERS)}
    key = b"\0".join((*texts.values(), version, _processor().encode(), shlex.join(command).encode()))
    build = partial(_build, command, texts)
    return cached(cache_folder(), "kernels", blake2b(key, digest_size=12).hexdigest(), build, _read)


def _build(command: list[str], texts: dict[str, bytes], folder: Path) -> None:
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    _run([*command, "-o", BINARY, *SOURCES, "-lm"], folder)
    with (folder / BINARY).open("rb") as file:
        os.fsync(file.fileno())  # a library that was cut short would end the process that loads it


def _read(folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(folder / BINARY))


def _run(command: list[str], folder: Path | None = None) -> bytes:
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{shlex.join(command)}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def _processor() -> str:
    """A cache may be shared by machines with different processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
