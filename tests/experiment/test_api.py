"""`simulate`: a user's own model, data, loss and metric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from aedfl.errors import UserError
from aedfl.experiment.api import Result, simulate

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(200, 5, generator=GENERATOR)
LABELS = (X[:, 0] > 0).long() + 2 * (X[:, 1] > 0).long()
TARGETS = X @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + 0.5
QUICK: dict[str, Any] = {
    "devices": 4,
    "updates": 12,
    "training": {"lr": 0.2, "batch_size": 10, "epochs": 2},
    "engine": {"device": "cpu"},
    "evaluation": {"every": 40.0},
}


@pytest.fixture(autouse=True)
def _same_start_values() -> None:
    torch.manual_seed(1)


def classified(module: nn.Module, train: Any = (X[:160], LABELS[:160]), **settings: Any) -> Result:
    return simulate(module, train, (X[160:], LABELS[160:]), **QUICK | settings)


def accuracy(module: nn.Module) -> float:
    with torch.no_grad():
        return float((module(X[160:]).argmax(1) == LABELS[160:]).float().mean())


def test_a_module_learns_from_arrays() -> None:
    module = nn.Linear(5, 4)
    before = module.weight.detach().clone()
    result = classified(module)
    assert result.accuracy > 0.8 and result.accuracy == pytest.approx(accuracy(result.model))
    assert result.metrics[0]["accuracy"] == pytest.approx(accuracy(module)), "it starts from the given weights"
    assert torch.equal(module.weight, before), "and leaves them as they are"
    assert result.summary["updates"] == 48


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return X[number].numpy(), int(LABELS[number])


def test_all_sorts_of_data_give_the_same_run(tmp_path: Path) -> None:
    module = nn.Linear(5, 4)
    numpy = (X[:160].numpy(), LABELS[:160].numpy())
    sorts = [numpy, TensorDataset(X[:160], LABELS[:160]), Pairs()]
    tensors = classified(module)
    assert all(classified(module, data).metrics == tensors.metrics for data in sorts)


def parquet(path: Path, rows: slice) -> str:
    columns = {f"x{number}": X[rows, number].numpy() for number in range(5)}
    pq.write_table(pa.table(columns | {"label": LABELS[rows].numpy()}), path)
    return str(path)


def test_a_module_learns_from_parquet_files(tmp_path: Path) -> None:
    train, test = parquet(tmp_path / "train.parquet", slice(160)), parquet(tmp_path / "test.parquet", slice(160, 200))
    module = nn.Linear(5, 4)
    assert simulate(module, train, test, **QUICK).metrics == classified(module).metrics


@pytest.mark.parametrize("module", [nn.Linear(5, 1), nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))])
def test_float_targets_are_regression(module: nn.Module) -> None:
    result = simulate(module, (X[:160], TARGETS[:160]), (X[160:], TARGETS[160:]), **QUICK | {"training.lr": 0.05})
    assert result.summary["metric"] == "negative_squared_error"
    assert result.metrics[0]["accuracy"] < -5.0 < -0.1 < result.accuracy < 0.0
    assert result.summary["loss"] == pytest.approx(-result.accuracy, rel=1e-4)


def test_users_loss_and_metric_are_used() -> None:
    def margin(output: Tensor, target: Tensor) -> Tensor:
        right = output.gather(1, target[:, None])
        return (1.0 - right + output).clamp(min=0).mean()

    def sureness(output: Tensor, target: Tensor) -> Tensor:
        return output.softmax(1).gather(1, target[:, None])[:, 0]

    result = classified(nn.Linear(5, 4), loss=margin, metric=sureness)
    with torch.no_grad():
        output = result.model(X[160:])
    assert result.summary["metric"] == "sureness"
    assert result.accuracy == pytest.approx(float(sureness(output, LABELS[160:]).mean()), rel=1e-5)
    assert result.summary["loss"] == pytest.approx(float(margin(output, LABELS[160:])), rel=1e-5)
    assert result.metrics[-1]["loss"] < 0.7 * result.metrics[0]["loss"]


class Busy(nn.Module):
    """Dropout, batch statistics, a constant buffer, tied and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.norm, self.dropout = nn.BatchNorm1d(5), nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((5,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x)).relu() * self.scale)
        output: Tensor = self.last(self.dropout(x))
        return output


@pytest.mark.parametrize("trainer", ["batched", "sequential"])
def test_a_busy_module_goes_all_the_way(trainer: str, tmp_path: Path) -> None:
    result = classified(Busy(), out=tmp_path / "run", engine={"device": "cpu", "trainer": trainer})
    assert result.accuracy > 0.4 and result.accuracy == pytest.approx(accuracy(result.model))
    assert type(result.model.dropout) is nn.Dropout
    assert torch.equal(result.model.scale, torch.full((5,), 2.0)) and not result.model.norm.running_mean.eq(0).all()
    again = Busy().eval()
    again.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert accuracy(again) == pytest.approx(result.accuracy)


def test_a_seed_gives_one_result() -> None:
    module = nn.Linear(5, 4)
    first, same, other = (classified(module, seed=seed) for seed in (0, 0, 1))
    assert first.metrics == same.metrics != other.metrics
    assert torch.equal(first.model.weight, same.model.weight)


def test_built_in_names_take_options() -> None:
    result = simulate("mlp", "digits", model_options={"hidden": [4]}, **QUICK | {"updates": 1})
    assert result.model.hidden[0].out_features == 4


def test_a_run_folder_is_written_and_never_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = classified(nn.Linear(5, 4), out=folder)
    assert {path.name for path in folder.iterdir()} >= {"config.toml", "metrics.jsonl", "summary.json", "report.html"}
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=f"run folder {folder} exists"):
        classified(nn.Linear(5, 4), out=folder)
    assert (folder / "metrics.jsonl").read_bytes() == before and result.accuracy > 0.5


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: classified(nn.Linear(5, 4), trainning={"lr": 1.0}), "trainning"),
        (lambda: classified(nn.Linear(5, 4), training={"lr": -1.0}), "lr"),
        (lambda: classified(nn.Linear(5, 4), devices=500), "devices = 500, but there are only 160 samples"),
        (lambda: classified(nn.Linear(6, 4)), "model Linear does not fit data set custom"),
        (lambda: classified(nn.Linear(5, 3)), "it has 3 outputs for 4 classes"),
        (lambda: classified(nn.Linear(5, 4), method="aedfl-00"), "did you mean aedfl-0"),
        (lambda: simulate(nn.Linear(5, 4), (X, LABELS)), "test data are missing"),
    ],
)
def test_mistakes_are_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert sentence in str(error.value) and "\n" not in str(error.value)
