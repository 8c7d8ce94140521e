"""Decoding images into uint8 arrays [n, C, H, W]."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ..errors import UserError
from .parquet import batches, image_bytes

Pixels = NDArray[np.uint8]
CHUNK = 512
# Pillow holds the interpreter's lock for most of an image, so that more threads only fight over it:
# the second one is there to decompress Parquet pages and write the cache while the first one decodes.
WORKERS = 2


@dataclass(frozen=True)
class Look:
    """How the images of a set must come out: Pillow's mode ("L" or "RGB"), and size in pixels if fixed."""

    mode: str = "RGB"
    size: tuple[int, int] | None = None  # height, width; None: that of the first image of a chunk


def decode(blobs: Sequence[bytes], look: Look, first: int = 0, where: str = "the data") -> Pixels:
    """Pixels [n, C, H, W]; `first` is the number of the first image, for the error message."""
    images: list[Pixels] = []
    known = None
    for number, blob in enumerate(blobs, first):
        try:
            picture = _open(blob, known)
            known = picture.format
            image = np.asarray(picture if picture.mode == look.mode else picture.convert(look.mode))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise UserError(f"image {number} of {where} cannot be decoded") from error
        wanted = look.size or (images[0].shape[:2] if images else image.shape[:2])
        if image.shape[:2] != wanted:
            raise UserError(f"image {number} of {where} is {_size(image.shape)}, not {_size(wanted)}")
        images.append(image)
    stack = np.stack(images)
    return np.ascontiguousarray(stack[:, None] if stack.ndim == 3 else stack.transpose(0, 3, 1, 2))


def _open(blob: bytes, known: str | None) -> Image.Image:
    """Tries the format of the image before first: asking every format costs more than decoding."""
    if known is not None:
        with suppress(UnidentifiedImageError):  # of another format than the one before it
            return Image.open(BytesIO(blob), formats=(known,))
    return Image.open(BytesIO(blob))


def _size(shape: Sequence[int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def decode_files(paths: Iterable[Path], columns: Sequence[str], look: Look) -> Iterator[Pixels]:
    """All images, file after file, of the first of these columns that each has; few chunks live at once."""
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting: deque[Future[Pixels]] = deque()
        for path in paths:
            first = 0
            for array in batches(path, columns, CHUNK):
                job = partial(decode, image_bytes(array, path), look, first, str(path))
                waiting.append(pool.submit(job))
                first += len(array)
                if len(waiting) > 2 * WORKERS:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
