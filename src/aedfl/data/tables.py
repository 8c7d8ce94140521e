"""A user's Parquet file as arrays: one image or list column, or many columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..errors import UserError
from .images import Look, decode
from .parquet import column_names, image_bytes, open_parquet, read

TARGETS = ("label", "labels", "target", "y")


def read_table(path: Path, features: Sequence[str] | None, target: str | None) -> tuple[Any, Any]:
    """x and y. Without names, y is the column `label`, `target` or `y`, and x is all the others.

    One image column gives uint8 [n, C, H, W]; one list column gives [n, ...] of its number type;
    columns of plain numbers give float32 [n, columns] in the order of the file (or of `features`).
    """
    names = column_names(path)
    y = _pick_target(path, names, target)
    chosen = list(features) if features else [name for name in names if name != y]
    for name in chosen:
        if name not in names:
            raise UserError(f"{path} has no column '{name}', only {', '.join(map(repr, names))}")
    if not chosen:
        raise UserError(f"{path} has no column of inputs beside '{y}'")
    columns = [_column(path, name) for name in chosen]
    if len(columns) == 1 and columns[0].ndim > 1:
        return columns[0], _numbers(path, y)
    for name, column in zip(chosen, columns, strict=True):
        if column.ndim > 1:
            raise UserError(f"column '{name}' of {path} is whole inputs, so name it alone in `features`")
    return np.column_stack([c.astype(np.float32) for c in columns]), _numbers(path, y)


def _pick_target(path: Path, names: Sequence[str], target: str | None) -> str:
    wanted = (target,) if target else TARGETS
    for name in wanted:
        if name in names:
            return name
    looked = " or ".join(f"'{name}'" for name in wanted)
    raise UserError(f"{path} has no target column {looked}, only {', '.join(map(repr, names))}: name it")


def _column(path: Path, name: str) -> NDArray[Any]:
    kind = open_parquet(path).schema_arrow.field(name).type
    if pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _pictures(path, name)
    if _is_list(kind):
        return _lists(read(path, name).combine_chunks(), path, name)
    return _numbers(path, name)


def _pictures(path: Path, name: str) -> NDArray[Any]:
    """Grey if the first image is, else RGB; all of one size."""
    from io import BytesIO

    from PIL import Image

    blobs = image_bytes(read(path, name).combine_chunks(), path)
    try:
        grey = bool(blobs) and Image.open(BytesIO(blobs[0])).mode in ("1", "L")
    except OSError as error:
        raise UserError(f"image 0 of {path} cannot be decoded") from error
    if not blobs:
        raise UserError(f"{path} has no rows")
    return decode(blobs, Look("L" if grey else "RGB"), where=str(path))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _lists(array: pa.Array, path: Path, name: str) -> NDArray[Any]:
    """A list column, nested or not, as a dense array; all lists of a level must be equally long."""
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    shape = [len(array)]
    while _is_list(array.type):
        inner = array.flatten()
        lengths = set(array.value_lengths().to_pylist()) if len(array) else {0}
        if len(lengths) != 1:
            raise UserError(f"the lists in column '{name}' of {path} are not all equally long")
        shape.append(lengths.pop())
        array = inner
    return _numeric(array, path, name).reshape(shape)


def _numbers(path: Path, name: str) -> NDArray[Any]:
    return _numeric(read(path, name), path, name)


def _numeric(array: Any, path: Path, name: str) -> NDArray[Any]:
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    if not any(fits(array.type) for fits in kinds):
        raise UserError(
            f"column '{name}' of {path} holds {array.type}, not numbers: leave it out or encode it"
        )
    return np.asarray(array)
