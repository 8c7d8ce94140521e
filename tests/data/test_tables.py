from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from aedfl.data import as_split, from_user
from aedfl.errors import UserError


def table(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_columns_of_numbers_are_features(tmp_path: Path) -> None:
    path = table(
        tmp_path / "t.parquet", b=[1, 2, 3], y=[0.5, 1.5, 2.5], a=[0.25, 0.5, 0.75], ok=[True, False, True]
    )
    split = as_split(path)
    assert split.x.dtype == torch.float32
    assert split.x.tolist() == [[1, 0.25, 1], [2, 0.5, 0], [3, 0.75, 1]]
    assert split.y.tolist() == [0.5, 1.5, 2.5]
    assert as_split(str(path), features=["a", "b"], target="ok").x.tolist() == [
        [0.25, 1],
        [0.5, 2],
        [0.75, 3],
    ]
    assert as_split(path, features="a").x.shape == (3, 1)


def test_list_columns_are_whole_inputs(tmp_path: Path) -> None:
    nested = np.arange(24.0).reshape(3, 2, 4)
    path = table(tmp_path / "l.parquet", m=nested.tolist(), label=[0, 1, 0], ids=[[1, 2], [3, 4], [5, 6]])
    assert torch.equal(as_split(path, features=["m"]).x, torch.from_numpy(nested).float())
    ids = as_split(path, features="ids").x
    assert ids.tolist() == [[1, 2], [3, 4], [5, 6]] and not ids.is_floating_point()
    fixed = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    assert as_split(table(tmp_path / "f.parquet", v=fixed, target=[1, 0])).x.tolist() == [[1, 2], [3, 4]]


def test_image_columns(tmp_path: Path, write_images: Callable[..., Path]) -> None:
    colour = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    path = write_images(tmp_path / "i.parquet", colour, [0, 1, 0, 1])
    assert torch.equal(as_split(path).x, torch.from_numpy(colour).permute(0, 3, 1, 2))
    grey = write_images(tmp_path / "g.parquet", colour[..., 0], [0, 1, 0, 1])
    assert as_split(grey).x.shape == (4, 1, 5, 6)
    assert from_user(path, path).scale is not None


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"a": [1.0], "b": [2]}, {}, "has no target column 'label' or"),
        ({"a": [1.0], "y": [2]}, {"target": "z"}, "has no target column 'z', only 'a', 'y'"),
        ({"a": [1.0], "y": [2]}, {"features": ["q"]}, "has no column 'q', only 'a', 'y'"),
        ({"y": [2]}, {}, "no column of inputs beside 'y'"),
        ({"a": ["text"], "y": [2]}, {}, "column 'a' of"),
        ({"a": [1.0, None], "y": [2, 1]}, {}, "has 1 missing values"),
        ({"a": [[1.0], [1.0, 2.0]], "y": [2, 1]}, {}, "not all equally long"),
        ({"a": [[1.0]], "b": [1.0], "y": [2]}, {}, "name it alone"),
        ({"a": [{"q": 1}], "y": [2]}, {}, "not encoded images"),
        ({"a": [b"no image"], "y": [2]}, {}, "image 0 of"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, columns: dict[str, list[object]], options: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as error:
        as_split(table(tmp_path / "bad.parquet", **columns), **options)
    assert words in str(error.value)
    assert str(tmp_path / "bad.parquet") in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file .*nowhere.parquet"):
        as_split(tmp_path / "nowhere.parquet")
    path = table(tmp_path / "t.parquet", a=[1.0] * 100, y=[1] * 100)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="not a readable Parquet file"):
        as_split(path)
