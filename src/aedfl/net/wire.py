"""The codec between devices: messages to frames and back. Bytes in, messages out; it never waits for anything.

A message is a stream of frames. Every frame is a checksum (CRC-32 of all bytes of the message so far, four
bytes, little-endian) and a body. The first body is a protobuf `Header`; the others, put together, are the
tensors as safetensors: the kept values as float32, the mask as packed bits, then the fields' tensors. Since the
checksum runs on from frame to frame, a frame that is lost, repeated or belongs to another message shows at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from ..context import Model
from ..errors import AedflError, PeerError
from . import fields as typed
from . import tensors as bytewise
from .protocol_pb2 import Header

try:
    from isal.isal_zlib import crc32  # the same numbers, several times as fast
except ImportError:
    from zlib import crc32

PROTOCOL = 2
"""Devices of another number cannot talk to this one."""
CHUNK = 1 << 20
"""Bytes of tensors per frame, but for the last."""
HEADER = 64 << 10
KIND = 64
VALUES, MASK = "values", "mask"


@dataclass(frozen=True)
class Stamp:
    """Who sends, in which run, and the how-manieth message to this receiver it is."""

    run: str
    source: int
    boot: int
    number: int


@dataclass(frozen=True)
class Packed:
    """A message made ready: the same bytes may go to several receivers, each under its own stamp."""

    kind: str
    header: Header
    buffers: tuple[memoryview, ...]
    length: int
    model: bool


@dataclass(frozen=True)
class Incoming:
    """A whole message as it came: checked by itself, not yet against the own model."""

    header: Header
    tensors: dict[str, Tensor]
    checksum: int
    length: int


def check_kind(kind: str, fault: type[AedflError]) -> None:
    if not 0 < len(kind) <= KIND:
        raise fault(f"message kind {kind[:80]!r} must have 1 to {KIND} characters")


def pack(kind: str, model: Model | None, layout: bytes, fields: Mapping[str, Any]) -> Packed:
    """A message of this kind; what messages do not carry is `Unsendable`."""
    check_kind(kind, typed.Unsendable)
    return assemble(kind, model, layout, typed.pack(fields))


def assemble(kind: str, model: Model | None, layout: bytes, fields: typed.Fields) -> Packed:
    """Gathers the kept values and packs the mask; a model without a mask is not copied."""
    named, small = fields
    tensors = {typed.place(number): tensor for number, tensor in enumerate(small)}
    header = Header(protocol=PROTOCOL, kind=kind, fields=named)
    if model is not None:
        vector, mask = model.vector.get(), None if model.mask is None else model.mask.get().bool()
        tensors[VALUES] = vector if mask is None else vector[mask]
        if mask is not None:
            tensors[MASK] = torch.from_numpy(np.packbits(mask.cpu().numpy()))
        info = header.model
        info.parameters, info.macs, info.masked = tensors[VALUES].numel(), model.size.macs, mask is not None
        info.layout = layout
    buffers = bytewise.dump(tensors) if tensors else []
    header.length = sum(len(buffer) for buffer in buffers)
    return Packed(kind, header, tuple(buffers), header.length, model is not None)


def frames(packed: Packed, stamp: Stamp) -> Iterator[bytes]:
    """The frames of one message to one receiver. Only one chunk at a time is a copy."""
    header = Header()
    header.CopyFrom(packed.header)
    header.run, header.source, header.boot, header.number = stamp.run, stamp.source, stamp.boot, stamp.number
    body = header.SerializeToString()
    checksum = crc32(body)
    yield checksum.to_bytes(4, "little") + body
    for chunk in _chunks(packed.buffers):
        for part in chunk:
            checksum = crc32(part, checksum)
        yield b"".join((checksum.to_bytes(4, "little"), *chunk))


def _chunks(buffers: tuple[memoryview, ...]) -> Iterator[list[memoryview]]:
    """The buffers as lists of views, each list `CHUNK` bytes long but for the last."""
    chunk: list[memoryview] = []
    room = CHUNK
    for buffer in buffers:
        while len(buffer):
            part, buffer = buffer[:room], buffer[room:]
            chunk.append(part)
            room -= len(part)
            if not room:
                yield chunk
                chunk, room = [], CHUNK
    if chunk:
        yield chunk


def bundle(parts: Iterable[bytes]) -> bytes:
    """The frames of a small message, or several such messages, as one piece: each behind its length (`<I`)."""
    return b"".join(each for part in parts for each in (struct.pack("<I", len(part)), part))


def unbundle(data: bytes, most: int) -> list[bytes]:
    """The parts again, 1 to `most`; `PeerError` unless they are the data, no more and no less."""
    parts: list[bytes] = []
    begin = 0
    while begin < len(data) and len(parts) < most:
        end = begin + 4 + (struct.unpack_from("<I", data, begin)[0] if begin + 4 <= len(data) else len(data))
        if end > len(data) or end == begin + 4:
            raise PeerError("a bundle's lengths do not add up to its size")
        parts.append(data[begin + 4 : end])
        begin = end
    if begin < len(data) or not parts:
        raise PeerError(f"a bundle is empty or has more than {most} parts")
    return parts


Look = Callable[[Header], int]
"""Looks at a header before its tensors come: raises `PeerError`, or says how many bytes they may be."""


class Decoder:
    """Takes the frames of one message as they come. Memory is reserved only after `look` has agreed."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._checksum = 0
        self._header: Header | None = None
        self._data = memoryview(b"")
        self._filled = 0

    @property
    def done(self) -> bool:
        return self._header is not None and self._filled == self._header.length

    def feed(self, frame: bytes) -> None:
        """Takes the next frame; raises `PeerError` at the first byte that cannot be right."""
        if len(frame) < 5 or len(frame) > 4 + max(HEADER, CHUNK):
            raise PeerError(f"a frame has {len(frame)} bytes")
        body = memoryview(frame)[4:]
        self._checksum = crc32(body, self._checksum)
        if self._checksum != int.from_bytes(frame[:4], "little"):
            raise PeerError("a frame's checksum is wrong")
        if self._header is None:
            self._begin(body)
        else:
            self._add(self._header, body)

    def _begin(self, body: memoryview) -> None:
        if len(body) > HEADER:
            raise PeerError(f"the header has {len(body)} bytes; allowed are {HEADER}")
        try:
            header = Header.FromString(bytes(body))
        except DecodeError as error:
            raise PeerError("the header cannot be read") from error
        if header.protocol != PROTOCOL:
            raise PeerError(f"the sender speaks protocol {header.protocol}, this device {PROTOCOL}")
        check_kind(header.kind, PeerError)
        if header.length > (allowed := self._look(header)):
            raise PeerError(f"the tensors are announced with {header.length} bytes; allowed are {allowed}")
        self._header = header
        self._data = np.empty(header.length, np.uint8).data  # not touched before the bytes come

    def _add(self, header: Header, body: memoryview) -> None:
        end = self._filled + len(body)
        if end > header.length or (len(body) != CHUNK and end != header.length):
            raise PeerError("the frames do not add up to the announced length")
        self._data[self._filled : end] = body
        self._filled = end

    def finish(self) -> Incoming:
        """The message; `PeerError` if the stream ended too early."""
        header = self._header
        if header is None or not self.done:
            raise PeerError("the stream ended in the middle of a message")
        tensors = bytewise.load(self._data) if header.length else {}
        return Incoming(header, tensors, self._checksum, header.length)
