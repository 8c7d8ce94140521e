"""A program's state as a file: containers as JSON, tensors as safetensors, in one file that is whole or not there.

Any tree of numbers, strings, lists, tuples, dicts, arrays, values and dataclasses will do. A dataclass is written
by the name of its class and read back only if that is a dataclass of this package or of the method's own file;
nothing in a file is ever run.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import AedflError, UserError
from ..graph import Chosen, Value
from .tensors import DTYPES, dump

_PLAIN = (bool, int, float, str, type(None))
_SERIES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
Find = Callable[[str, str], Any]
"""From a module's name and a class's to the class; None if it is not allowed."""


class Tree:
    """Turns a tree into JSON; collects its tensors, each once however often it occurs."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def encode(self, thing: Any) -> Any:
        if isinstance(thing, np.generic):
            thing = thing.item()
        if isinstance(thing, _PLAIN):
            return thing
        if isinstance(thing, Value):
            return {"value": self._tensor(thing.get())}
        if isinstance(thing, Tensor):
            return {"tensor": self._tensor(thing)}
        if isinstance(thing, np.ndarray):
            return {"array": self._tensor(torch.from_numpy(np.ascontiguousarray(thing)))}
        if isinstance(thing, Chosen):
            return {"chosen": [self.encode(thing.items), self.encode(thing.flags)]}
        if isinstance(thing, Mapping):
            return {"dict": [[self.encode(key), self.encode(part)] for key, part in thing.items()]}
        if isinstance(thing, (list, tuple, set, frozenset)):
            name = next(name for name, kind in _SERIES.items() if isinstance(thing, kind))
            return {name: [self.encode(part) for part in thing]}
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            kind = type(thing)
            parts = {field.name: self.encode(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
            return {"class": [kind.__module__, kind.__qualname__], "fields": parts}
        raise AedflError(f"a state holds a {type(thing).__name__}, which cannot be saved")

    def _tensor(self, tensor: Tensor) -> str:
        if tensor.dtype not in DTYPES.values():
            raise AedflError(f"a state holds a tensor of type {tensor.dtype}, which cannot be saved")
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name = f"t{len(self.tensors)}"
            self.tensors[name] = tensor
        return self._names[id(tensor)]


class Reader:
    """The way back; values that were one are one again."""

    def __init__(self, tensors: Mapping[str, Tensor], find: Find) -> None:
        self._tensors, self._find = tensors, find
        self._values: dict[str, Value] = {}

    def decode(self, thing: Any) -> Any:
        if not isinstance(thing, dict):
            return thing
        if "class" in thing:
            kind = self._class(*thing["class"])
            return kind(**{name: self.decode(part) for name, part in thing["fields"].items()})
        ((name, inner),) = thing.items()
        if name == "value":
            return self._values.setdefault(inner, Value(self._tensors[inner]))
        if name == "tensor":
            return self._tensors[inner]
        if name == "array":
            return self._tensors[inner].numpy()
        if name == "chosen":
            return Chosen(*(self.decode(part) for part in inner))
        if name == "dict":
            return {self.decode(key): self.decode(part) for key, part in inner}
        return _SERIES[name](self.decode(part) for part in inner)

    def _class(self, module: str, name: str) -> Any:
        kind = self._find(module, name)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise AedflError(f"the state holds a {module}.{name}, which this method does not have")
        return kind


def finder(own: Mapping[str, Any]) -> Find:
    """Classes of this package, and of the method's own module, given as its globals."""

    def find(module: str, name: str) -> Any:
        if module == own.get("__name__"):
            return own.get(name)
        if module.partition(".")[0] != "aedfl":
            return None
        return getattr(sys.modules.get(module) or importlib.import_module(module), name, None)

    return find


def write(path: Path, thing: Any, durable: bool = True) -> int:
    """Writes the tree whole or not at all; how many bytes. `OSError` leaves the old file as it was.

    What is not durable survives the end of the process, but not that of the machine.
    """
    tree = Tree()
    text = json.dumps(tree.encode(thing), separators=(",", ":"))
    buffers = dump({**tree.tensors, "tree": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)})
    return replace(path, buffers, durable)


def replace(path: Path, buffers: list[memoryview], durable: bool = True) -> int:
    """Puts a file with these bytes in the place of the old one, atomically."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for buffer in buffers:
                file.write(buffer)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
        if durable:
            _sync_folder(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return sum(len(buffer) for buffer in buffers)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path, find: Find, only: Sequence[str] = ()) -> Any:
    """The tree in the file, or only these keys of it; None if there is no file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = bytes(tensors.pop("tree").numpy())
        tree = json.loads(text)
        if only:
            tree = {"dict": [pair for pair in tree["dict"] if pair[0] in only]}
        return Reader(tensors, find).decode(tree)
    except (SafetensorError, KeyError, ValueError, TypeError, ImportError) as error:
        raise UserError(
            f"the state in {path} cannot be read ({error}); move it away to begin anew under the same index"
        ) from error
