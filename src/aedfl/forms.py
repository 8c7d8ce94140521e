"""What a method's messages look like. A real machine refuses one that its program could not read.

The simulator's messages come from the same program, so it has no need to look. Over a network a neighbour may leave a
field out, send a word for a number, or play the server; without these forms that would end the receiver's program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .graph import Value

if TYPE_CHECKING:
    from .context import Message

LARGEST = 1e15
"""Counts and numbers beyond this are nobody's; sums of them still have room."""
SMALLEST = 1e-6
"""Of numbers that are divided by."""
Check = Callable[[Any], bool]
"""True for what may stand in a field."""


def count(thing: Any) -> bool:
    """A whole number from 0 on: samples, versions, rounds."""
    return type(thing) is int and 0 <= thing <= LARGEST


def some(thing: Any) -> bool:
    """A whole number from 1 on: what a mean is weighted by."""
    return count(thing) and thing > 0


def number(thing: Any) -> bool:
    """A finite number, plain or as a value without dimensions: programs put such side by side."""
    plain = _plain(thing)
    return plain is not None and abs(plain) <= LARGEST


def amount(thing: Any) -> bool:
    """A plain number from 0 on."""
    return type(thing) in (int, float) and 0 <= thing <= LARGEST


def positive(thing: Any) -> bool:
    """A plain number above 0, and not so near that what is divided by it gets out of hand."""
    return amount(thing) and thing >= SMALLEST


def loss(thing: Any) -> bool:
    """A value that is a number, not negative; in the precision that losses have, since networks look at them."""
    if not isinstance(thing, Value) or thing.get().dtype != torch.float32:
        return False
    return number(thing) and float(_plain(thing) or 0.0) >= 0.0


def share(thing: Any) -> bool:
    plain = _plain(thing)
    return plain is not None and 0.0 <= plain <= 1.0


def portion(thing: Any) -> bool:
    """A plain share above 0: of work to do."""
    return positive(thing) and thing <= 1.0


def counts(thing: Any) -> bool:
    """Plain numbers from 0 on, one after the other: labels, for example."""
    return isinstance(thing, tuple) and all(amount(part) for part in thing)


def per_unit(thing: Any) -> bool:
    """A value with a share, from 0 to 1, for every unit that can be pruned; `Form.problem` counts them."""
    if not isinstance(thing, Value):
        return False
    tensor = thing.get()
    return tensor.ndim == 1 and tensor.dtype == torch.float32 and bool(((tensor >= 0) & (tensor <= 1)).all())


def _plain(thing: Any) -> float | None:
    if isinstance(thing, Value):
        tensor = thing.get()
        return float(tensor) if tensor.dim() == 0 and tensor.is_floating_point() else None
    return float(thing) if type(thing) in (int, float) and abs(thing) <= LARGEST else None


@dataclass(frozen=True)
class Form:
    """A kind of message: its fields, whether it carries a model, and who may send it."""

    fields: Mapping[str, Check] = field(default_factory=dict)
    model: bool | None = True
    """None: with or without."""
    masked: bool = False
    """A model without a mask is refused."""
    by_server: bool = False
    optional: Mapping[str, Check] = field(default_factory=dict)

    def vectors(self, names: Iterable[str]) -> int:
        """How many of these fields hold a number for every unit; the length of others does not depend on the model."""
        return len(self._per_unit.intersection(names))

    @cached_property
    def _per_unit(self) -> frozenset[str]:
        return frozenset(name for name, check in {**self.fields, **self.optional}.items() if check is per_unit)

    def problem(self, message: Message, from_server: bool, units: Callable[[], int] = lambda: 0) -> str:
        """What is wrong with this message, in a few words; empty if it fits. `units`: how many can be pruned."""
        if from_server != self.by_server:
            return f"only {'the server' if self.by_server else 'a device'} may send it"
        if self.model is not None and (message.model is not None) != self.model:
            return "its model is missing" if self.model else "it must not carry a model"
        if self.masked and message.model is not None and message.model.mask is None:
            return "its model has no mask"
        allowed = {**self.fields, **self.optional}
        if missing := self.fields.keys() - message.fields.keys():
            return f"field {min(missing)!r} is missing"
        if unknown := message.fields.keys() - allowed.keys():
            return f"field {min(unknown)!r} does not belong there"
        wrong = [name for name, thing in message.fields.items() if not allowed[name](thing)]
        if wrong:
            return f"field {wrong[0]!r} holds what it must not"
        vectors = {name: len(thing.get()) for name, thing in message.fields.items() if self.vectors([name])}
        uneven = [name for name, length in vectors.items() if length != units()]
        return f"field {uneven[0]!r} has {vectors[uneven[0]]} entries instead of {units()}" if uneven else ""
