from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Subset, TensorDataset

from aedfl.data import Split, as_split, from_user
from aedfl.errors import UserError


class Pairs(TorchDataset):  # type: ignore[type-arg]
    def __init__(self, make: Callable[[int], tuple[object, object]], n: int = 6) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[object, object]:
        return self.make(i)


def test_arrays_lists_and_tensors() -> None:
    for x in (np.ones((4, 3)), torch.ones(4, 3, dtype=torch.float64), [[1.0] * 3] * 4):
        split = as_split((x, [0, 1, 0, 1]))
        assert split.x.dtype == torch.float32 and split.x.shape == (4, 3)
        assert split.y.dtype == torch.int64 and split.y.tolist() == [0, 1, 0, 1]


def test_a_split_comes_back_the_same() -> None:
    split = Split(torch.rand(3, 2), torch.tensor([0, 1, 2]))
    assert torch.equal(as_split(split).x, split.x)


@pytest.mark.parametrize("shape", [(5, 9, 9), (5, 9, 9, 3), (5, 3, 9, 9)])
def test_uint8_images_in_any_order_of_axes(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    split = as_split((x, np.zeros(5, dtype=np.int32)))
    assert split.x.dtype == torch.uint8
    assert split.x.shape == (5, 1 if len(shape) == 3 else 3, 9, 9)
    if shape[-1] == 3:
        assert torch.equal(split.x[:, 1], torch.from_numpy(x[..., 1]))


def test_torch_datasets() -> None:
    tensors = TensorDataset(torch.rand(6, 2), torch.arange(6))
    assert torch.equal(as_split(tensors).x, tensors.tensors[0])
    assert as_split(Subset(tensors, [4, 2])).y.tolist() == [4, 2]
    pictures = Pairs(lambda i: (Image.fromarray(np.full((8, 8, 3), i, dtype=np.uint8)), i % 2))
    split = as_split(pictures)
    assert split.x.shape == (6, 3, 8, 8) and split.x.dtype == torch.uint8
    assert split.x[5].unique().tolist() == [5]
    assert as_split(Pairs(lambda i: (np.float64(i), float(i)))).y.dtype == torch.float32


def test_classification_is_inferred_and_images_get_a_scale() -> None:
    x = np.random.default_rng(1).integers(0, 256, (50, 3, 6, 6), dtype=np.uint8)
    data = from_user((x[:40], np.arange(40) % 4), (x[40:], np.arange(10) % 4))
    assert data.classes == 4
    inputs = data.inputs(data.train.x)
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_regression_is_inferred() -> None:
    data = from_user((np.ones((4, 2)), np.ones((4, 1))), (np.ones((2, 2)), np.ones(2)))
    assert data.classes is None and data.task == "regression"
    assert data.train.y.shape == (4,) and data.scale is None
    assert from_user(*[(np.ones((4, 2)), np.ones((4, 3)))] * 2).train.y.shape == (4, 3)


def test_integers_are_token_ids() -> None:
    data = from_user((np.array([[5, 1], [2, 0]]), [0, 1]), (np.array([[9, 9]]), [0]), classes=3)
    assert data.vocabulary == 10 and data.classes == 3
    assert data.inputs(data.train.x).dtype == torch.int64


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[tuple[int, int]]:
        yield 0, 0


X, Y = np.ones((4, 2)), np.array([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: as_split((X, Y[:3])), "(4, 2) and y (3,)"),
        (lambda: as_split((X[:0], Y[:0])), "no samples"),
        (lambda: as_split((X * np.nan, Y)), "x holds values that are not finite"),
        (lambda: as_split((X, Y / 0.0)), "y holds values that are not finite"),
        (lambda: as_split((X, Y - 1)), "labels must be 0 or more, found -1"),
        (lambda: as_split((X, np.zeros((4, 2), dtype=int))), "y has shape (4, 2)"),
        (lambda: as_split((X, ["a", "b", "c", "d"])), "y of type list"),
        (lambda: as_split(Endless()), "Endless cannot be used"),
        (lambda: as_split(42), "int cannot be used"),
        (lambda: as_split(Pairs(lambda i: (1, 2, 3))), "sample 0 of Pairs is not a pair"),
        (lambda: as_split(Pairs(lambda i: (np.ones(i), 0))), "do not all have one shape"),
        (lambda: from_user((X, Y), (X, Y), classes=2), "classes = 2, but y holds the label 2"),
        (lambda: from_user((X, Y / 2), (X, Y / 2), classes=2), "float targets"),
        (lambda: from_user((X, Y), (X, Y / 2)), "in both"),
        (lambda: from_user((X, Y), (X[:, :1], Y)), "float32 [2] each, but test inputs are float32 [1]"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_mistakes_are_one_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
