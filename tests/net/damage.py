"""Damage that gets past checksums and lengths, so that it reaches the inner checks."""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np
from google.protobuf.message import DecodeError

from aedfl.net.protocol_pb2 import Field, Header, Item, Items
from aedfl.net.wire import CHUNK

KINDS = ("model", "update", "order", "ready", "urgent", "average", "answer", "labels", "rate")
NAMES = ("loss", "samples", "rate", "age", "worth", "version", "question", "effort", "counts", "round", "a")
"""What the methods' messages are called, and their fields: in another's place they get past the first look."""


def sealed(bodies: list[bytes]) -> list[bytes]:
    """Bodies as frames, each with the checksum that it ought to have."""
    checksum, frames = 0, []
    for body in bodies:
        checksum = zlib.crc32(body, checksum)
        frames.append(checksum.to_bytes(4, "little") + body)
    return frames


def damaged(frames: list[bytes], rng: np.random.Generator) -> list[bytes]:
    """The message with one to three things wrong; nine times in ten wrapped as if all were well."""
    whole = head, body = frames[0][4:], b"".join(frame[4:] for frame in frames[1:])
    for _ in range(int(rng.integers(1, 4))):
        head, body = _hurt(head, body, rng)
    while (head, body) == whole:
        head, body = _hurt(head, body, rng)
    head = _announced(head, len(body))
    parts = [head, *(body[begin : begin + CHUNK] for begin in range(0, len(body), CHUNK))]
    if rng.random() < 0.9:
        return sealed(parts)
    return [bytes(rng.bytes(4)) + part for part in parts]


def _hurt(head: bytes, body: bytes, rng: np.random.Generator) -> tuple[bytes, bytes]:
    """One thing wrong, or once in a while none."""
    kind = int(rng.integers(0, 6))
    if kind == 0:
        return _flipped(head, rng), body
    if kind == 1:
        return _other_header(head, rng), body
    change = (_flipped, _other_table, _resized, _special)[kind - 2]
    return head, change(body, rng)


def _flipped(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5)) if changed else 0):
        changed[int(rng.integers(0, len(changed)))] = int(rng.integers(0, 256))
    return bytes(changed)


def _resized(data: bytes, rng: np.random.Generator) -> bytes:
    cut = int(rng.integers(0, len(data) + 1))
    return data[:cut] if rng.random() < 0.5 else data + rng.bytes(int(rng.integers(1, 64)))


def _special(body: bytes, rng: np.random.Generator) -> bytes:
    """A number that is none, somewhere among the values."""
    if len(body) < 16:
        return body
    place = len(body) - 4 * int(rng.integers(1, max(2, len(body) // 8)))
    number = [np.nan, np.inf, -np.inf, 3e38][int(rng.integers(0, 4))]
    return body[:place] + struct.pack("<f", number) + body[place + 4 :]


def _other_header(head: bytes, rng: np.random.Generator) -> bytes:
    """Fields of the header exchanged for wrong ones of the right type."""
    try:
        header = Header.FromString(head)
    except DecodeError:
        return head
    kind = int(rng.integers(0, 12))
    if kind >= 9 and header.fields:
        _other_field(header.fields[int(rng.integers(0, len(header.fields)))], kind - 9, rng)
    elif kind == 0:
        header.model.parameters = int(rng.integers(0, 1 << 40))
    elif kind == 1:
        header.model.macs = float(rng.choice([np.nan, np.inf, -1.0, 0.0, 1e30]))
    elif kind == 2:
        header.model.masked = not header.model.masked
    elif kind == 3:
        header.fields.add(name="x" * int(rng.integers(0, 80)), item=Item(tensor=int(rng.integers(0, 100))))
    elif kind == 4:
        del header.fields[:]
    elif kind == 5:
        header.ClearField("model")
    elif kind == 6:
        header.protocol = int(rng.integers(0, 5))
    elif kind == 7:
        header.kind = KINDS[int(rng.integers(0, len(KINDS)))]
    else:
        header.model.layout = bytes(rng.bytes(16))
    return header.SerializeToString()


def _other_field(field: Field, kind: int, rng: np.random.Generator) -> None:
    """Another name, a value of another type, or one that points at another tensor."""
    number = int(rng.integers(-9, 1 << 60))
    others = [
        Item(text="many"), Item(integer=number), Item(real=float(rng.choice([np.nan, np.inf, -1.0, 2.0, 1e300]))),
        Item(truth=True), Item(nothing=True), Item(items=Items(items=[field.item] * int(rng.integers(0, 4)))),
    ]  # fmt: skip
    if kind == 0:
        field.item.CopyFrom(others[int(rng.integers(0, len(others)))])
    elif kind == 1:
        field.item.CopyFrom(Item(tensor=int(rng.integers(0, 4))))
    else:
        field.name = NAMES[int(rng.integers(0, len(NAMES)))]


def _other_table(body: bytes, rng: np.random.Generator) -> bytes:
    """The tensors' table with one entry made wrong."""
    if len(body) < 8:
        return body
    (length,) = struct.unpack_from("<Q", body)
    try:
        table = json.loads(body[8 : 8 + length])
        name = str(rng.choice(list(table)))
        entry = table[name]
        begin, end = entry["data_offsets"]
    except (ValueError, KeyError, TypeError, IndexError):
        return body
    shape = entry["shape"] if isinstance(entry.get("shape"), list) else []
    wrong = [
        {**entry, "dtype": str(rng.choice(["F64", "I64", "I32", "U8", "BOOL", "F16", "X"]))},
        {**entry, "shape": [1, *shape] if rng.random() < 0.5 else [*shape, 1]},
        {**entry, "shape": [int(rng.integers(-3, 1 << 20))]},
        {**entry, "shape": [1] * int(rng.integers(2, 2000))},
        {**entry, "data_offsets": [end, begin]},
        {**entry, "data_offsets": [begin, end + int(rng.integers(1, 1 << 50))]},
        {**entry, "data_offsets": [begin + 4, end + 4]},
        {**entry, "shape": "many"},
        None,
    ]
    table[name] = wrong[int(rng.integers(0, len(wrong)))]
    if rng.random() < 0.2:
        table["another"] = entry
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body[8 + length :]


def _announced(head: bytes, length: int) -> bytes:
    try:
        header = Header.FromString(head)
    except DecodeError:
        return head
    header.length = length
    return header.SerializeToString()
