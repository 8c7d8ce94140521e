"""A method's hyper-parameters: its frozen dataclass, with a user's values put in and checked."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from ..errors import UserError
from .complaints import allowed, shown, unknown
from .sections import NONE

Hyper = TypeVar("Hyper")


def make_hyper(default: Hyper, overrides: Mapping[str, Any]) -> Hyper:
    """`default` (a frozen dataclass instance) with the overrides, each checked against its field's type.

    Raises `UserError` for a name that the method does not have, and for a value that does not fit.
    """
    if not overrides:
        return default
    if not dataclasses.is_dataclass(default) or isinstance(default, type):
        raise UserError(f"hyper.{next(iter(overrides))}: this method has no hyper-parameters")
    fields = [field.name for field in dataclasses.fields(default)]
    for name in overrides:
        if name not in fields:
            raise UserError(unknown("hyper-parameter", name, fields))
    types = _types(default)
    values = {name: _fit(name, value, types[name]) for name, value in overrides.items()}
    try:
        return dataclasses.replace(default, **values)
    except ValueError as error:
        raise UserError(f"hyper: {error}") from None


def _types(default: Any) -> dict[str, Any]:
    """Field types; those of the default values where annotations cannot be resolved (a user's own file)."""
    guessed = {field.name: type(getattr(default, field.name)) for field in dataclasses.fields(default)}
    try:
        types = guessed | typing.get_type_hints(type(default))
    except NameError:
        types = guessed
    return {field.name: _bounded(types[field.name], field.metadata) for field in dataclasses.fields(default)}


def _bounded(kind: Any, metadata: Mapping[str, Any]) -> Any:
    """The type with the bounds that an `option` has given; only numbers have any."""
    if kind not in (int, float) or "least" not in metadata:
        return kind
    return Annotated[kind, Field(ge=metadata["least"], le=metadata["most"])]


def _fit(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, bool) and (kind in (int, float) or typing.get_origin(kind) is Annotated):
        raise UserError(f"hyper.{name} = {shown(value)}: must be a number")
    if value == NONE and type(None) in typing.get_args(kind):
        return None
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise UserError(f"hyper.{name} = {shown(value)}: {allowed(message)}") from None
