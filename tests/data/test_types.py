import pytest
import torch

from aedfl.data import Dataset, Normalisation, Split


def dataset(x: torch.Tensor, scale: Normalisation | None = None) -> Dataset:
    split = Split(x, torch.zeros(len(x), dtype=torch.int64))
    return Dataset("toy", split, split, 2, scale)


def test_normalisation_is_the_formula() -> None:
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3).repeat(1, 2, 1, 1)
    y = Normalisation((0.5, 0.2), (0.25, 0.4))(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y[0, 0, 0], torch.tensor([-2.0, -1.2, 2.0]))
    torch.testing.assert_close(y[0, 1, 0], torch.tensor([-0.5, 0.0, 2.0]))


@pytest.mark.parametrize("lead", [(), (4,), (3, 4)])
def test_rows_of_any_leading_shape_are_normalised(lead: tuple[int, ...]) -> None:
    data = dataset(
        torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8), Normalisation((0.5,) * 3, (0.5,) * 3)
    )
    rows = torch.randint(0, 5, lead)
    torch.testing.assert_close(data.inputs(data.train.x[rows]), data.inputs(data.train.x)[rows])


def test_token_ids_become_int64_and_floats_stay_as_they_are() -> None:
    ids = dataset(torch.tensor([[1, 2]], dtype=torch.int16))
    assert ids.inputs(ids.train.x).dtype == torch.int64
    x = torch.rand(2, 3)
    assert dataset(x).inputs(x) is x


def test_shape_length_and_task() -> None:
    data = dataset(torch.rand(7, 1, 8, 8))
    assert data.input_shape == (1, 8, 8)
    assert len(data.train) == 7
    assert data.task == "classification"
