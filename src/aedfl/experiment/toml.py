"""Writing TOML: the part of it that a config needs. Reading is `tomllib`'s."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .sections import NONE

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(table: Mapping[str, Any], sections: tuple[str, ...] = ()) -> str:
    """The table as a TOML document; the named keys become `[sections]`, which come last."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if key not in sections]
    for name in sections:
        lines += ["", f"[{name}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in table[name].items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if value is None:
        return _string(NONE)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(part) for part in value) + "]"
    return repr(value)
