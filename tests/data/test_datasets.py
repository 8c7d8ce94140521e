"""The named data sets: small ones written here, and the real ones where they are."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from aedfl import data
from aedfl.data.emnist import is_transposed
from aedfl.errors import UserError

Writer = Callable[..., Path]


def test_digits() -> None:
    digits = data.load("digits")
    x = torch.cat([digits.train.x, digits.test.x])
    assert x.shape == (1797, 1, 8, 8) and x.dtype == torch.float32
    assert (x.min(), x.max()) == (0, 1)
    assert len(digits.train) == 1438 and digits.classes == 10
    every = torch.bincount(torch.cat([digits.train.y, digits.test.y]))
    share = torch.bincount(digits.train.y) / every
    assert ((share - 0.8).abs() < 0.004).all()
    assert torch.equal(data.load("digits").test.x, digits.test.x)


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    digits, original = data.load("digits"), load_digits()
    ours = torch.cat([digits.train.x, digits.test.x]).flatten(1) * 16
    assert sorted(ours.tolist()) == sorted(original.data.tolist())


def test_cifar(small_cifar: Path, tmp_path: Path) -> None:
    cifar = data.load("cifar10", small_cifar)
    images = np.load(tmp_path / "images.npy")
    assert np.array_equal(cifar.train.x.numpy(), images[:40].transpose(0, 3, 1, 2))
    assert np.array_equal(cifar.test.x.numpy(), images[40:].transpose(0, 3, 1, 2))
    assert cifar.train.y.tolist() == [i % 10 for i in range(40)]
    assert cifar.input_shape == (3, 32, 32) and cifar.class_names[9] == "truck"
    assert cifar.scale is not None
    assert cifar.scale.mean == pytest.approx(images[:40].mean((0, 1, 2)) / 255)
    assert cifar.scale.std == pytest.approx(images[:40].std((0, 1, 2)) / 255)


def letters(side: str) -> np.ndarray:
    """26 images: an upright bar for I (number 8), noise for the others; `side` may transpose all."""
    images = np.random.default_rng(0).integers(0, 50, (26, 28, 28), dtype=np.uint8)
    images[8] = 0
    images[8, 4:24, 13:15] = 255
    return images.swapaxes(1, 2) if side == "transposed" else images


@pytest.mark.parametrize(("side", "first"), [("upright", 0), ("transposed", 1), ("transposed", 0)])
def test_emnist_conventions_all_come_out_upright_from_0(
    tmp_path: Path, write_images: Writer, side: str, first: int
) -> None:
    for split in ("train", "test"):
        path = tmp_path / "emnist_letters" / f"{split}.parquet"
        write_images(path, letters(side), list(range(first, first + 26)))
    emnist = data.load("emnist-letters", tmp_path)
    assert np.array_equal(emnist.train.x[:, 0].numpy(), letters("upright"))
    assert np.array_equal(emnist.test.x[:, 0].numpy(), letters("upright"))
    assert emnist.train.y.tolist() == emnist.test.y.tolist() == list(range(26))


def test_no_letter_i_means_no_transposing() -> None:
    assert not is_transposed(np.zeros((0, 1, 28, 28), dtype=np.uint8))


def write_reviews(folder: Path, **splits: list[str]) -> None:
    folder.mkdir(parents=True)
    for split, texts in splits.items():
        pq.write_table(pa.table({"text": texts, "label": [0, 1]}), folder / f"{split}.parquet")


def test_imdb_vocabulary_is_of_the_training_split(tmp_path: Path) -> None:
    write_reviews(
        tmp_path / "imdb", train=["good good film", "Bad<br />film"], test=["good plot", "film " * 300]
    )
    imdb = data.load("imdb", tmp_path)
    assert imdb.train.x.shape == (2, 256) and imdb.train.x.dtype == torch.int16
    assert imdb.train.x[:, :4].tolist() == [[3, 3, 2, 0], [4, 2, 0, 0]]
    assert imdb.test.x[0, :3].tolist() == [3, 1, 0] and imdb.test.x[1].tolist() == [2] * 256
    assert imdb.vocabulary == 5
    (words,) = (tmp_path / "default-cache").glob("imdb-*/vocabulary.txt")
    assert words.read_text().split() == ["<pad>", "<unknown>", "film", "good", "bad"]


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"'tiny_imagnet' is not known, did you mean 'tiny-imagenet'\?"):
        data.load("tiny_imagnet")
    with pytest.raises(UserError, match="allowed: digits, cifar10"):
        data.load("zzz")


def test_damaged_files_and_columns(small_cifar: Path, write_images: Writer) -> None:
    path = small_cifar / "cifar10" / "test.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"test.parquet is not a readable Parquet file"):
        data.load("cifar10", small_cifar)
    path.write_bytes(whole[:2000] + bytes(20_000) + whole[22_000:])
    with pytest.raises(UserError, match=r"test.parquet"):
        data.load("cifar10", small_cifar)
    pq.write_table(pa.table({"img": [b""]}), path)
    with pytest.raises(UserError, match="test.parquet has no column 'label', only 'img'"):
        data.load("cifar10", small_cifar)
    write_images(path, np.zeros((1, 32, 32, 3), dtype=np.uint8), [10], "img")
    with pytest.raises(UserError, match="test labels must lie in 0 to 9, found 10 to 10"):
        data.load("cifar10", small_cifar)
    write_images(path, np.zeros((1, 16, 16, 3), dtype=np.uint8), [1], "img")
    with pytest.raises(UserError, match="image 0 of .*test.parquet is 16x16, not 32x32"):
        data.load("cifar10", small_cifar)
    write_images(path, np.zeros((1, 32, 32, 3), dtype=np.uint8), [1], "picture")
    with pytest.raises(UserError, match="no column 'img' or 'image', only 'picture', 'label'"):
        data.load("cifar10", small_cifar)


def test_no_damage_is_worse_than_one_sentence(tmp_path: Path, write_images: Writer) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        images = rng.integers(0, 2, (10, 32, 32, 3), dtype=np.uint8) * 200
        path = write_images(tmp_path / "cifar10" / f"{split}.parquet", images, list(range(10)), "img")
    whole, refused = path.read_bytes(), 0
    for number in range(100):
        broken = bytearray(whole)
        if number % 2:
            del broken[rng.integers(len(broken)) :]
        else:  # more often in the footer, which is where a wrong byte does most
            first = len(broken) - 1000 if number % 4 else 0
            broken[rng.integers(first, len(broken))] ^= 1 + int(rng.integers(255))
        path.write_bytes(broken)
        try:
            data.load("cifar10", tmp_path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused >= 50


def test_describe_says_what_is_where(small_cifar: Path) -> None:
    rows = {row.name: row for row in data.describe(small_cifar)}
    assert list(rows) == list(data.NAMES)
    assert rows["digits"].found and rows["digits"].train == 1438
    assert (rows["cifar10"].found, rows["cifar10"].train, rows["cifar10"].test) == (True, 40, 10)
    assert not rows["imdb"].found and rows["imdb"].train is None
    assert str(small_cifar / "imdb") in rows["imdb"].place and "train.parquet" in rows["imdb"].problem


def take(real: Path, home: Path, name: str, rows: int) -> None:
    """The first rows of each split of a real data set."""
    (home / name).mkdir(parents=True)
    for path in sorted((real / name).glob("*.parquet")):
        batch = next(pq.ParquetFile(path).iter_batches(batch_size=rows))
        split = path.stem.partition("-")[0]
        if not (home / name / f"{split}.parquet").exists():
            pq.write_table(pa.Table.from_batches([batch]), home / name / f"{split}.parquet")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cifar10", (3, 32, 32)),
        ("emnist-letters", (1, 28, 28)),
        ("tiny-imagenet", (3, 64, 64)),
        ("imdb", (256,)),
    ],
)
def test_slices_of_the_real_sets(real_data: Path, tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    take(real_data, tmp_path, name.replace("-", "_"), 200)
    slice_ = data.load(name, tmp_path)
    assert slice_.train.x.shape == (200, *shape) and slice_.test.x.shape == (200, *shape)
    inputs = slice_.inputs(slice_.train.x)
    if name == "imdb":
        assert 0 < int(inputs.max()) < 8_002 and (inputs != 0).float().mean() > 0.5
    else:
        assert abs(float(inputs.mean())) < 1e-3 and abs(float(inputs.std()) - 1) < 0.05


def test_the_real_emnist_is_upright(real_data: Path, tmp_path: Path) -> None:
    from aedfl.data.emnist import LETTER_I, _letters_i
    from aedfl.data.images import Look
    from aedfl.data.parquet import read_labels

    path = real_data / "emnist_letters" / "test.parquet"
    images = _letters_i(read_labels([path]), [path], ["image"], Look("L", (28, 28)))
    assert len(images) == 200 and LETTER_I == 8
    assert not is_transposed(images)
    assert is_transposed(images.swapaxes(2, 3))


def test_all_of_real_cifar(real_data: Path, tmp_path: Path) -> None:
    cifar = data.load("cifar10", real_data, tmp_path / "c")
    assert cifar.train.x.shape == (50_000, 3, 32, 32) and len(cifar.test) == 10_000
    assert torch.bincount(cifar.train.y).tolist() == [5000] * 10
    assert cifar.scale is not None
    assert np.multiply(cifar.scale.mean, 255) == pytest.approx([125.30691805, 122.95039414, 113.86538318])
    assert cifar.test.x.double().mean((0, 2, 3)).numpy() == pytest.approx(
        [126.02464141, 123.7085042, 114.85431865]
    )
