"""What comes from others, held against the own model: run, layout, shapes, types, finiteness. Misfits never get in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ..context import SERVER, Message, Model, Size
from ..errors import PeerError
from ..forms import LARGEST, Form
from ..graph import Value
from ..layout import Layout
from . import fields as typed
from .protocol_pb2 import Header
from .tensors import HEADER_LIMIT, is_sane
from .wire import MASK, VALUES, Incoming


def layout_digest(layout: Layout) -> bytes:
    """Names, shapes, types and places of all tensors in 16 bytes."""
    text = "\n".join(f"{e.name} {e.shape} {e.offset} {e.dtype} {e.trainable}" for e in layout.entries)
    return blake2b(text.encode(), digest_size=16).digest()


class Checker:
    """Knows the own model, and so what another's may look like; and the messages that the method has."""

    def __init__(
        self, layout: Layout, macs: float, forms: Mapping[str, Form] | None = None, units: Callable[[], int] = lambda: 0
    ) -> None:
        """`units` tells how many can be pruned; it is asked only where a message has a number for each."""
        self.size, self.macs, self._forms, self._units = layout.size, macs, forms or {}, units
        self.digest = layout_digest(layout)

    def bytes_allowed(self, header: Header) -> int:
        """Bytes that the tensors of this header may have; refuses a model that is announced as another."""
        if not header.HasField("model"):
            return HEADER_LIMIT + 8 * self.size
        info = header.model
        if info.layout != self.digest:
            raise PeerError("the model has another layout than the own one: names, shapes or types of tensors differ")
        if not 0 < info.parameters <= self.size or (not info.masked and info.parameters != self.size):
            raise PeerError(f"the model claims {info.parameters} values; the own one has {self.size}")
        if not (isfinite(info.macs) and 0 < info.macs <= self.macs * (1 + 1e-6)):
            raise PeerError(f"the model claims {info.macs:g} operations per sample; the own one has {self.macs:g}")
        return HEADER_LIMIT + 4 * self.size + self.size // 8 + 1 + 8 * self.size * bool(header.fields)

    def message(self, incoming: Incoming, source: int) -> Message:
        """The message of `source`, safe to hand to a program; `PeerError` says what does not fit."""
        header, tensors = incoming.header, dict(incoming.tensors)
        model = self._model(header, tensors) if header.HasField("model") else None
        fields = typed.unpack(list(header.fields), tensors)
        message = Message(source, header.kind, model, fields)
        self._formed(message)
        return message

    def _formed(self, message: Message) -> None:
        """The program reads fields without asking whether they are there, so they must be."""
        if not self._forms:
            return
        form = self._forms.get(message.kind)
        by_server = message.source == SERVER
        problem = "the method has no such message" if form is None else form.problem(message, by_server, self._units)
        if problem:
            raise PeerError(f"message of kind {message.kind[:40]!r}: {problem}")

    def _model(self, header: Header, tensors: dict[str, Tensor]) -> Model:
        info = header.model
        values, packed = tensors.pop(VALUES, None), tensors.pop(MASK, None)
        if values is None or values.dtype != torch.float32 or values.shape != (info.parameters,):
            raise PeerError(f"the model's values are not {info.parameters} float32 numbers")
        if not is_sane(values):
            raise PeerError(f"the model holds numbers that are not finite, or beyond {LARGEST:g}")
        if (packed is not None) != info.masked:
            raise PeerError("the mask is announced but missing, or the other way round")
        if packed is None:
            return Model(Value(values), Size(info.parameters, info.macs))
        mask = self._mask(packed, info.parameters)
        vector = torch.zeros(self.size)
        vector[mask] = values
        return Model(Value(vector), Size(info.parameters, info.macs), Value(mask))

    def _mask(self, packed: Tensor, kept: int) -> Tensor:
        if packed.dtype != torch.uint8 or packed.shape != (-(-self.size // 8),):
            raise PeerError(f"the mask is not {self.size} packed bits")
        bits = np.unpackbits(packed.numpy())
        if bits[self.size :].any() or int(bits.sum(dtype=np.int64)) != kept:
            raise PeerError(f"the mask does not keep the {kept} values that came")
        return torch.from_numpy(bits[: self.size].astype(np.bool_))
