"""A run's config: from a preset or a TOML file and overrides, to TOML, and to a fingerprint.

A file may name a preset to start from (`preset = "digits"`) and then says only what differs. Keys are
overridden one by one, but another method or model does not inherit the options of the one that it replaces.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import UserError
from .complaints import complaint, unknown
from .hyper import make_hyper
from .sections import NONE, RunConfig, Section
from .toml import dumps

__all__ = ["RunConfig", "config_hash", "elsewhere", "from_toml", "load", "make_hyper", "presets", "to_toml"]

Table = dict[str, Any]

_FILES = (("fleet", "trace"), ("fleet", "speeds"), ("topology", "path"))
WITHOUT_EFFECT = {
    "preset": None,
    "record": None,
    "data": ("directory",),
    "engine": ("threads", "lookahead", "overlap", "cache_budget_mib", "ray", "actors"),
}
"""What `config_hash` leaves out: names, places and pace, but nothing that a result depends on."""


def load(source: str | Path | None = None, overrides: Sequence[str] = (), **top: Any) -> RunConfig:
    """The config of a preset or of a TOML file, with `key=value` overrides and then the given top-level keys.

    Keys are dotted (`training.lr=0.1`, `hyper.mu=1`); values are TOML, or else plain strings. Relative paths
    are taken from the file's folder when they stand in a file, else from the current one, and made absolute.
    An argument may also be a dict for a section, or have a dotted name; None leaves the key as it is.
    """
    table = _source(source) if source is not None else {}
    changes = _parse(overrides)
    for key, value in top.items():
        if value is not None:
            _put(changes, tuple(key.split(".")), value)
    return validate(_over(table, _absolute(changes, Path.cwd())))


def validate(table: Table) -> RunConfig:
    """The table as a config, or a `UserError` that says what is wrong with it."""
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise UserError(complaint(error, RunConfig)) from None


def to_toml(config: RunConfig) -> str:
    """The resolved config, every key written out. `from_toml` and `load` read it back as the same config."""
    table = config.model_dump()
    return dumps(table, tuple(key for key in table if isinstance(getattr(config, key), Section)))


def from_toml(text: str, name: str = "config") -> RunConfig:
    """A complete config, without looking at any preset."""
    return validate(_toml(text, name))


def elsewhere(config: RunConfig, ray: str) -> RunConfig:
    """The config with its work on another Ray cluster, or with 'none' on no cluster; its record is the same."""
    return validate(_over(config.model_dump(), {"engine": {"ray": ray}}))


def config_hash(config: RunConfig) -> str:
    """SHA-256 (hex) of all that determines a run's record on one machine.

    Left out: `preset` (a name), `record.*`, `data.directory` and `engine.threads`, `.lookahead`,
    `.overlap`, `.cache_budget_mib`, `.ray`, `.actors`. Traces, speeds, edge lists and a user's method count by content,
    not by path.
    """
    table = config.model_dump()
    for section, keys in WITHOUT_EFFECT.items():
        for key in keys or ():
            del table[section][key]
        if keys is None:
            del table[section]
    for section, key in _FILES:
        table[section][key] = _content(table[section][key])
    if config.method.endswith(".py"):
        table["method"] = _content(config.method)
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode()).hexdigest()


def presets() -> dict[str, str]:
    """Name and one line of description (the file's first comment) of every preset."""
    found = sorted(_folder().iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): _first_comment(file.read_text()) for file in found}


def _folder() -> Any:
    return files("aedfl.experiment") / "presets"


def _first_comment(text: str) -> str:
    return text.partition("\n")[0].removeprefix("#").strip()


def _source(source: str | Path) -> Table:
    path = Path(source)
    if path.suffix == ".toml" or len(path.parts) > 1:
        return _file(path)
    return _preset(str(source))


def _preset(name: str) -> Table:
    if name not in presets():
        hint = " (a config file's name ends in .toml)" if Path(name).exists() else ""
        raise UserError(unknown("preset", name, presets()) + hint)
    return _toml((_folder() / f"{name}.toml").read_text(), name) | {"preset": name}


def _file(path: Path) -> Table:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UserError(f"cannot read the config file '{path}': {reason}") from None
    table = _absolute(_toml(text, str(path)), path.parent.absolute())
    base = table.get("preset", NONE)
    return table if base == NONE else _over(_preset(str(base)), table)


def _toml(text: str, name: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"'{name}' is not valid TOML: {error}") from None


def _parse(overrides: Iterable[str]) -> Table:
    table: Table = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override '{override}' must look like key=value")
        _put(table, tuple(part.strip() for part in key.split(".")), _literal(value.strip()))
    return table


def _literal(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _put(table: Table, path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"override '{'.'.join(path)}': '{part}' is already set to a value")
        table = inner
    old = table.get(path[-1])
    if isinstance(old, dict) and old and not isinstance(value, dict):
        name = ".".join(path)
        raise UserError(f"override '{name}.{next(iter(old))}': '{name}' is set to a value, {value!r}, and has no keys")
    table[path[-1]] = old | value if isinstance(old, dict) and isinstance(value, dict) else value


def _over(base: Table, changes: Table) -> Table:
    """`changes` over `base`, key by key. A new method or model starts from its own defaults."""
    merged = dict(base)
    for name, options in (("method", "hyper"), ("name", "options")):
        if changes.get(name, base.get(name)) != base.get(name):
            merged.pop(options, None)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _absolute(table: Table, folder: Path) -> Table:
    """The table with its paths made absolute, so that a run can be resumed from anywhere."""
    for section, key in (*_FILES, ("data", "directory"), ("data", "name"), ("", "method")):
        inner = table.get(section) if section else table
        value = inner.get(key) if isinstance(inner, dict) else None
        is_path = key not in ("name", "method") or str(value).endswith((".py", ".parquet"))
        if isinstance(value, str) and value != NONE and is_path:
            assert isinstance(inner, dict)
            inner[key] = str((folder / Path(value).expanduser()).resolve())
    return table


def _content(path: str | None) -> str | None:
    if path is None or not Path(path).is_file():
        return path
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
