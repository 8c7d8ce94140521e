"""EMNIST's two conventions. Here: labels 0 to 25, letters upright, as a person reads them.

The official files have labels 1 to 26 and every image transposed; the hub's copy has labels 0 to 25 and
transposed images. Both are brought to the convention here while they are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from .images import Look, Pixels, decode
from .parquet import find_column, image_bytes, read

Labels = dict[str, NDArray[np.int64]]
LETTER_I = 8
_ENOUGH = 200


def as_here(
    labels: Labels, train: Sequence[Path], columns: Sequence[str], look: Look
) -> tuple[Labels, Callable[[Pixels], Pixels]]:
    """Labels from 0, and the function that sets a chunk of images upright."""
    shift = 1 if labels["train"].min() == 1 and labels["train"].max() == 26 else 0
    shifted = {split: values - shift for split, values in labels.items()}
    if is_transposed(_letters_i(shifted["train"], train, columns, look)):
        return shifted, lambda pixels: np.ascontiguousarray(pixels.swapaxes(2, 3))
    return shifted, np.ascontiguousarray


def _letters_i(
    labels: NDArray[np.int64], train: Sequence[Path], columns: Sequence[str], look: Look
) -> Pixels:
    """Some images of the letter I, [k, 1, 28, 28]; k may be 0."""
    rows = np.flatnonzero(labels == LETTER_I)[:_ENOUGH]
    if not len(rows):
        return np.zeros((0, 1, *(look.size or (0, 0))), dtype=np.uint8)
    chunks = [chunk for path in train for chunk in read(path, find_column(path, columns)).chunks]
    picked = pa.chunked_array(chunks).take(pa.array(rows)).combine_chunks()
    return decode(image_bytes(picked, train[0]), look, where=str(train[0]))


def is_transposed(letters: Pixels) -> bool:
    """Whether these letters I [k, 1, H, W] lie on their side: ink spreads wider across than down."""
    ink = letters.astype(np.float64).sum((0, 1))
    return _spread(ink.sum(0)) > _spread(ink.sum(1))


def _spread(profile: NDArray[np.float64]) -> float:
    """Variance of a position along one axis, weighted by the ink there."""
    total = profile.sum()
    if total == 0:
        return 0.0
    place = np.arange(len(profile))
    mean = (profile * place).sum() / total
    return float((profile * (place - mean) ** 2).sum() / total)
