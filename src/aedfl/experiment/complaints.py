"""A user's mistake in a config as one sentence: the key, the value, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

Details = Any  # pydantic's ErrorDetails
"""One entry of `ValidationError.errors()`."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """'unknown method 'fedavgg'; did you mean 'fedavg'?', or the list of what is known."""
    known = sorted(known)
    guess = nearest(name, known)
    hint = f"did you mean '{guess}'?" if guess else f"known: {', '.join(known)}"
    return f"unknown {what} '{name}'; {hint}"


def complaint(error: ValidationError, schema: type[BaseModel]) -> str:
    """The first mistake in a sentence, and how many more there are."""
    errors = error.errors(include_url=False)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _sentence(errors[0], schema) + more


def allowed(message: str) -> str:
    """Pydantic's words for what a value must be, in ours."""
    return message.removeprefix("Value error, ").replace("Input should be", "must be")


def shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def keys(schema: type[BaseModel]) -> list[str]:
    """Every key of a config, dotted: `seed`, `training.lr`, …"""
    found: list[str] = []
    for name, field in schema.model_fields.items():
        inner = _section(field.annotation)
        found += [f"{name}.{key}" for key in inner.model_fields] if inner else [name]
    return found


def _sentence(details: Details, schema: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return _unknown_key([str(part) for part in details["loc"]], schema)
    if details["type"] == "missing":
        return f"{_place(key, schema)} is missing; it has no default"
    if details["type"] == "value_error":
        return f"[{key}] {allowed(details['msg'])}" if key else allowed(details["msg"])
    if details["type"] == "model_type":
        return f"[{key}] is a section, not the value {shown(details['input'])}"
    return f"{key} = {shown(details['input'])}: {allowed(details['msg'])}"


def _place(key: str, schema: type[BaseModel]) -> str:
    field = schema.model_fields.get(key)
    return f"section [{key}]" if field is not None and _section(field.annotation) else f"key '{key}'"


def _unknown_key(path: list[str], schema: type[BaseModel]) -> str:
    section = _section(schema.model_fields[path[0]].annotation) if len(path) > 1 else schema
    known = list((section or schema).model_fields)
    where = f" in section [{path[0]}]" if len(path) > 1 else ""
    guess = nearest(path[-1], known) or _elsewhere(path[-1], schema)
    hint = f"did you mean '{guess}'?" if guess else f"known keys: {', '.join(known)}"
    return f"unknown key '{path[-1]}'{where}; {hint}"


def _elsewhere(name: str, schema: type[BaseModel]) -> str | None:
    """The dotted key, in any section, whose last part looks like `name`."""
    dotted = {key.rpartition(".")[2]: key for key in reversed(keys(schema))}
    guess = nearest(name, dotted)
    return dotted[guess] if guess else None


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
