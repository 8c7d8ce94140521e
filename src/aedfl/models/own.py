"""A user's own model, named by where its class lies: 'package.module:Class' or 'path/to/file.py:Class'."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from aedfl.errors import UserError


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"aedfl_model_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"model file {str(path)!r} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"model package {name!r} cannot be imported: {error}") from error


def load(path: str) -> Callable[..., Any]:
    """The class or function that `path` names."""
    place, _, attribute = path.rpartition(":")
    if not attribute or not (place.endswith(".py") or all(map(str.isidentifier, place.split(".")))):
        raise UserError(f"model {path!r} is not known; write 'package.module:Class' or 'path/to/file.py:Class'")
    module = _file(Path(place)) if place.endswith(".py") else _package(place)
    if not callable(found := getattr(module, attribute, None)):
        raise UserError(f"model {path!r}: {place} has no class {attribute!r}")
    return found  # type: ignore[no-any-return]


def build_own(
    path: str, input_shape: tuple[int, ...], classes: int, words: int | None = None, **options: Any
) -> nn.Module:
    """Calls what `path` names with those of `input_shape`, `classes` and `vocabulary` that its signature takes."""
    factory = load(path)
    known: dict[str, Any] = {"input_shape": input_shape, "classes": classes}
    known |= {} if words is None else {"vocabulary": words}
    parameters = inspect.signature(factory).parameters
    given = {name: value for name, value in known.items() if name in parameters} | options
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise UserError(f"model {path!r} cannot be called with {sorted(given)}: {error}") from error
    if not isinstance(module := factory(**given), nn.Module):
        raise UserError(f"model {path!r} gave a {type(module).__name__}, not a torch.nn.Module")
    return module
