"""Small data sets in the hub's layout, and the real ones where they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

Writer = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the user's data nor the user's cache are touched; the real data are asked for by fixture."""
    monkeypatch.delenv("AEDFL_DATA", raising=False)
    monkeypatch.setenv("AEDFL_CACHE", str(tmp_path / "default-cache"))


_REAL = os.environ.get("AEDFL_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture
def real_data() -> Path:
    if not (Path(_REAL) / "cifar10").is_dir():
        pytest.skip(f"the real data sets are not in {_REAL}; set AEDFL_DATA to their folder")
    return Path(_REAL)


@pytest.fixture
def encode_image() -> Callable[..., bytes]:
    def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
        """Pixels [H, W] or [H, W, 3] as a file's bytes; lossless for PNG and WEBP."""
        file = BytesIO()
        Image.fromarray(pixels).save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
        return file.getvalue()

    return encode


@pytest.fixture
def write_images(encode_image: Callable[..., bytes]) -> Writer:
    def write(path: Path, images: np.ndarray, labels: Sequence[int], column: str = "image") -> Path:
        """A Parquet file with an image struct and a label column."""
        structs = [{"bytes": encode_image(image), "path": None} for image in images]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({column: pa.array(structs, kind), "label": pa.array(labels, pa.int64())})
        pq.write_table(table, path, compression="zstd")
        return path

    return write


@pytest.fixture
def small_cifar(tmp_path: Path, write_images: Writer) -> Path:
    """A data directory with 40 training images in two shards and 10 test images; returns the directory."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    labels = [i % 10 for i in range(50)]
    home = tmp_path / "data"
    for name, a, b in (("train-00000-of-00002", 0, 25), ("train-00001-of-00002", 25, 40), ("test", 40, 50)):
        write_images(home / "cifar10" / f"{name}.parquet", images[a:b], labels[a:b], "img")
    return home
