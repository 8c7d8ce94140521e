"""A message's named numbers on the wire: typed, few and small. Tensors among them travel beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import AedflError, PeerError
from ..forms import LARGEST
from ..graph import Value
from .protocol_pb2 import Field, Item, Items
from .tensors import is_sane

COUNT = 64
"""Fields of a message, and items of a tuple."""
DEPTH = 4
TEXT = 1024
TENSORS = 64
BYTES = 48 << 10
"""Of all fields but their tensors: they share the header with the rest of it."""


Fields = tuple[list[Field], list[Tensor]]
"""Packed fields, and the tensors that they point at."""


class Unsendable(AedflError):
    """The own program's mistake: a field of a kind that messages do not carry."""


def pack(fields: Mapping[str, Any]) -> Fields:
    if len(fields) > COUNT:
        raise Unsendable(f"a message has {len(fields)} fields; allowed are {COUNT}")
    tensors: list[Tensor] = []
    packed = [Field(name=name, item=_item(name, thing, tensors, 0)) for name, thing in fields.items()]
    if (size := sum(field.ByteSize() for field in packed)) > BYTES:
        raise Unsendable(f"the fields of a message take {size} bytes; allowed are {BYTES}")
    return packed, tensors


def _item(name: str, thing: Any, tensors: list[Tensor], depth: int) -> Item:
    if isinstance(thing, np.generic):
        thing = thing.item()
    if thing is None:
        return Item(nothing=True)
    if isinstance(thing, bool):
        return Item(truth=thing)
    if isinstance(thing, int) and -(1 << 63) <= thing < 1 << 63:
        return Item(integer=thing)
    if isinstance(thing, float) and isfinite(thing):
        return Item(real=thing)
    if isinstance(thing, str) and len(thing) <= TEXT:
        return Item(text=thing)
    if isinstance(thing, Value) and len(tensors) < TENSORS:
        tensors.append(thing.get())
        return Item(tensor=len(tensors) - 1)
    if isinstance(thing, (tuple, list)) and depth < DEPTH and len(thing) <= COUNT:
        return Item(items=Items(items=[_item(name, part, tensors, depth + 1) for part in thing]))
    raise Unsendable(f"field {name!r} of a message is {str(thing)[:60]!r}, which messages do not carry")


def unpack(fields: list[Field], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What `pack` was given, tuples for lists; every tensor must be pointed at exactly once."""
    if len(fields) > COUNT:
        raise PeerError(f"the message has {len(fields)} fields; allowed are {COUNT}")
    left = dict(tensors)
    found: dict[str, Any] = {}
    for field in fields:
        if field.name in found or not field.name.isidentifier() or len(field.name) > 64:
            raise PeerError(f"field name {field.name[:40]!r} is not allowed, or comes twice")
        found[field.name] = _thing(field.name, field.item, left, 0)
    if left:
        raise PeerError(f"tensor {next(iter(left))[:40]!r} belongs to no field")
    return found


def _thing(name: str, item: Item, tensors: dict[str, Tensor], depth: int) -> Any:
    kind = item.WhichOneof("value")
    if kind == "integer":
        return item.integer
    if kind == "truth":
        return item.truth
    if kind == "nothing":
        return None
    if kind == "real" and isfinite(item.real):
        return item.real
    if kind == "text" and len(item.text) <= TEXT:
        return item.text
    if kind == "tensor":
        return _value(name, tensors.pop(place(item.tensor), None))
    if kind == "items" and depth < DEPTH and len(item.items.items) <= COUNT:
        return tuple(_thing(name, part, tensors, depth + 1) for part in item.items.items)
    raise PeerError(f"field {name!r} has a value that is not allowed")


def _value(name: str, tensor: Tensor | None) -> Value:
    if tensor is None:
        raise PeerError(f"field {name!r} points at a tensor that did not come")
    if tensor.is_floating_point() and not is_sane(tensor):
        raise PeerError(f"field {name!r} holds numbers that are not finite, or beyond {LARGEST:g}")
    return Value(tensor.clone())


def place(number: int) -> str:
    """The name of a field's tensor among the tensors of a message."""
    return f"field{number}"
