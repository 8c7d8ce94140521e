"""Reading Parquet files in the Hugging Face hub's column layout; every failure is one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..errors import UserError


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises on a missing, truncated or damaged file into a user's error."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise UserError(f"{path} is not a readable Parquet file, truncated or damaged: {reason}") from error


def open_parquet(path: Path) -> pq.ParquetFile:
    """The file with its footer read; rows are not read yet."""
    with _translated(path):
        return pq.ParquetFile(path)


def rows(paths: Iterable[Path]) -> int:
    """Number of rows in all files together, from the footers alone."""
    return sum(int(open_parquet(path).metadata.num_rows) for path in paths)


def column_names(path: Path) -> list[str]:
    """The names of the file's columns, in order."""
    file = open_parquet(path)
    with _translated(path):
        return [str(name) for name in file.schema_arrow.names]


def find_column(path: Path, candidates: Sequence[str]) -> str:
    """The first of these columns that the file has."""
    present = column_names(path)
    for name in candidates:
        if name in present:
            return name
    wanted = " or ".join(f"'{name}'" for name in candidates)
    raise UserError(f"{path} has no column {wanted}, only {', '.join(map(repr, present)) or 'none at all'}")


def batches(path: Path, candidates: Sequence[str], size: int) -> Iterator[pa.Array]:
    """The first of these columns that the file has, in arrays of at most `size` rows, read as needed."""
    column, file = find_column(path, candidates), open_parquet(path)
    with _translated(path):
        for batch in file.iter_batches(batch_size=size, columns=[column]):
            yield no_nulls(batch.column(0), path, column)


def read(path: Path, column: str) -> pa.ChunkedArray:
    """One whole column."""
    find_column(path, [column])
    file = open_parquet(path)
    with _translated(path):
        return no_nulls(file.read(columns=[column]).column(0), path, column)


def no_nulls(array: Any, path: Path, column: str) -> Any:
    """The array (plain or chunked) as it is; missing values are an error."""
    if array.null_count:
        raise UserError(f"column '{column}' of {path} has {array.null_count} missing values")
    return array


def image_bytes(array: pa.Array, path: Path) -> list[bytes]:
    """Encoded images of a hub column: a struct with `bytes`, or plain binary."""
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        array = no_nulls(pc.struct_field(array, "bytes"), path, "bytes")
    if not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        raise UserError(f"the image column of {path} holds {array.type}, not encoded images")
    blobs: list[bytes] = array.to_pylist()
    return blobs


def read_labels(paths: Iterable[Path], candidates: Sequence[str] = ("label",)) -> NDArray[np.int64]:
    """The integer label column of all files, one after the other."""
    parts = []
    for path in paths:
        column = find_column(path, candidates)
        array = read(path, column)
        if not pa.types.is_integer(array.type):
            raise UserError(f"column '{column}' of {path} holds {array.type}, not integer labels")
        parts.append(array.to_numpy().astype(np.int64))
    return np.concatenate(parts)


def class_names(path: Path, column: str = "label") -> tuple[str, ...]:
    """The names of a `ClassLabel` column in the hub's schema metadata, or empty."""
    raw = (open_parquet(path).schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    try:
        names = json.loads(raw)["info"]["features"][column]["names"]
        return tuple(str(name) for name in names)
    except (KeyError, TypeError, ValueError):
        return ()  # the metadata are a courtesy of the writer, never needed
