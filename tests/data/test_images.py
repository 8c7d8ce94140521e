from collections.abc import Callable

import numpy as np
import pytest

from aedfl.data.images import Look, decode
from aedfl.errors import UserError

RNG = np.random.default_rng(0)


def test_lossless_formats_mixed_come_out_exact(encode_image: Callable[..., bytes]) -> None:
    images = RNG.integers(0, 256, (6, 8, 10, 3), dtype=np.uint8)
    kinds = ["PNG", "WEBP", "WEBP", "BMP", "PNG", "PNG"]
    blobs = [encode_image(image, kind) for image, kind in zip(images, kinds, strict=True)]
    pixels = decode(blobs, Look("RGB", (8, 10)))
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, images.transpose(0, 3, 1, 2))


def test_modes_are_converted(encode_image: Callable[..., bytes]) -> None:
    grey = RNG.integers(0, 256, (2, 4, 4), dtype=np.uint8)
    blobs = [encode_image(image) for image in grey]
    assert np.array_equal(decode(blobs, Look("L"))[:, 0], grey)
    assert np.array_equal(decode(blobs, Look("RGB"))[:, 2], grey)


def test_mistakes_name_the_image(encode_image: Callable[..., bytes]) -> None:
    good = encode_image(np.zeros((4, 4), dtype=np.uint8))
    with pytest.raises(UserError, match=r"^image 11 of f\.parquet cannot be decoded$"):
        decode([good, b"rubbish"], Look("L"), 10, "f.parquet")
    with pytest.raises(UserError, match="image 1 of .* cannot be decoded"):
        decode([good, good[:45]], Look("L"))
    with pytest.raises(UserError, match="image 1 of the data is 5x4, not 4x4"):
        decode([good, encode_image(np.zeros((5, 4), dtype=np.uint8))], Look("L"))
    with pytest.raises(UserError, match="image 0 of the data is 4x4, not 28x28"):
        decode([good], Look("L", (28, 28)))
