"""Tensors as safetensors bytes, without copying them: a header of names, types and places, then the raw numbers.

The library of that name reads and writes whole files; here the sender streams straight from the tensors'
memory, and the receiver's tensors are views of the one buffer that the bytes arrived in.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PeerError
from ..forms import LARGEST

Buffer = bytearray | memoryview
DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_LIMIT = 64 << 10
DIMENSIONS = 8
KNOWN, SHORT = 64, 1 << 10
"""Headers that are kept read and written, and bytes up to which one that came is: a device sees few different ones."""


def dump(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The bytes as a list of buffers: the header, then views of the tensors, widest types first."""
    ordered = sorted(tensors.items(), key=lambda pair: -pair[1].element_size())
    arrays = [tensor.detach().cpu().contiguous().numpy().reshape(-1) for _, tensor in ordered]
    text = _table(tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered))
    return [memoryview(text), *(array.view(np.uint8).data for array in arrays if array.nbytes)]


@lru_cache(KNOWN)
def _table(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> bytes:
    """The header of tensors that follow each other in this order, behind its length."""
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in entries:
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def load(data: Buffer) -> dict[str, Tensor]:
    """The tensors, as views of `data`, which must hold them exactly: no gap, no overlap, nothing behind."""
    if len(data) < 8:
        raise PeerError(f"tensors of {len(data)} bytes have no header")
    length = struct.unpack_from("<Q", data)[0]
    if length > min(HEADER_LIMIT, len(data) - 8):
        raise PeerError(f"the tensors' header claims {length} bytes")
    text, body = bytes(data[8 : 8 + length]), len(data) - 8 - length
    places = _places(text, body) if length <= SHORT else _places.__wrapped__(text, body)
    return {name: _view(data, 8 + length + begin, shape, dtype) for name, dtype, shape, begin in places}


@lru_cache(KNOWN)
def _places(text: bytes, body: int) -> tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]:
    """What a header says of the `body` bytes behind it: names, types, shapes, and where each tensor begins."""
    places = []
    end = 0
    for name, entry in sorted(_parse(text).items(), key=lambda pair: _offsets(pair[0], pair[1])):
        dtype, shape = _kind(name, entry)
        begin, stop = _offsets(name, entry)
        if begin != end or stop > body or stop - begin != prod(shape) * dtype.itemsize:
            raise PeerError(f"tensor {name!r} claims bytes {begin} to {stop}, which do not fit its shape or its place")
        places.append((name, dtype, tuple(shape), begin))
        end = stop
    if end != body:
        raise PeerError(f"{body - end} bytes follow the last tensor")
    return tuple(places)


def _view(data: Buffer, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    if offset % dtype.itemsize:
        raise PeerError("a tensor does not begin at a multiple of its element's size")
    if dtype == torch.bool:  # a byte that is neither 0 nor 1 is no truth value
        return (torch.frombuffer(data, dtype=torch.uint8, count=count, offset=offset) != 0).reshape(shape)
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
    return flat if len(shape) == 1 else flat.reshape(shape)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError("the tensors' header is not JSON") from error
    if not isinstance(header, dict):
        raise PeerError("the tensors' header is not a table")
    return header


def _kind(name: str, entry: Any) -> tuple[torch.dtype, list[int]]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise PeerError(f"tensor {name[:40]!r} has type {str(dtype)[:40]!r}; allowed are {', '.join(DTYPES)}")
    if not (isinstance(shape, list) and len(shape) <= DIMENSIONS and all(_natural(side) for side in shape)):
        raise PeerError(f"tensor {name[:40]!r} has no valid shape")
    return DTYPES[dtype], shape


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    place = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (isinstance(place, list) and len(place) == 2 and all(_natural(number) for number in place)):
        raise PeerError(f"tensor {name[:40]!r} has no valid place")
    return place[0], place[1]


def is_sane(values: Tensor) -> bool:
    """All finite and within `LARGEST`, so that sums of them are finite too. A NaN makes least and greatest a NaN."""
    if not values.numel():
        return True
    least, greatest = values.aminmax()
    return float(least) >= -LARGEST and float(greatest) <= LARGEST


def _natural(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 48
