"""Trackers: thin, optional, and clear about what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aedfl.errors import UserError
from aedfl.report.trackers import TRACKERS, make_trackers

ROW = {"time": 15.2, "accuracy": 0.5, "loss": float("nan"), "costs": {"training": 3.0}, "name": "x"}
CONFIG = {"seed": 1, "training": {"lr": 0.1}}


class Spy:
    """Takes any call and remembers it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Spy:
            self.calls.append((name, *args, *sorted(kwargs.items())))
            return self

        return call


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"pip install 'aedfl\[{name}\]'"):
        make_trackers([name], tmp_path, CONFIG)


def test_tensorboard_gets_finite_numbers_by_virtual_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    fake = SimpleNamespace(SummaryWriter=lambda folder: spy)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    trackers = make_trackers(["tensorboard"], tmp_path, CONFIG)
    trackers.log(ROW)
    trackers.close()
    scalars = {call[1]: call[2:] for call in spy.calls if call[0] == "add_scalar"}
    assert scalars == {"time": (15.2, 15), "accuracy": (0.5, 15), "costs/training": (3.0, 15)}
    assert spy.calls[-1] == ("close",)


def test_wandb_and_mlflow_get_config_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, mlflow = Spy(), Spy()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    trackers = make_trackers(["wandb", "mlflow"], tmp_path, CONFIG)
    trackers.log(ROW)
    trackers.close()
    numbers = {"time": 15.2, "accuracy": 0.5, "costs/training": 3.0}
    assert ("config", {"seed": 1, "training.lr": 0.1}) in wandb.calls[0]
    assert ("log", numbers) in wandb.calls and ("finish",) in wandb.calls
    assert ("log_params", {"seed": 1, "training.lr": 0.1}) in mlflow.calls
    assert ("log_metrics", numbers, ("step", 15)) in mlflow.calls and ("end_run",) in mlflow.calls


def test_no_trackers_is_fine(tmp_path: Path) -> None:
    trackers = make_trackers([], tmp_path, CONFIG)
    trackers.log(ROW)
    trackers.close()
    assert not list(tmp_path.iterdir())
