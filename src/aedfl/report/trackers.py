"""Optional sinks for a run's metrics: TensorBoard, Weights & Biases, MLflow. Each needs its extra."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import UserError
from .record import number

Row = Mapping[str, Any]


class Tracker(Protocol):
    """Told every evaluation of one run."""

    def log(self, row: Row) -> None:
        """A row of `metrics.jsonl`; its `time` (virtual seconds) is the step."""

    def close(self) -> None:
        """The run ended."""


class TensorBoard:
    """Event files in the run folder; `tensorboard --logdir DIR` shows them."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        board = _module("torch.utils.tensorboard", "tensorboard")
        self._writer = board.SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in flat(config)))

    def log(self, row: Row) -> None:
        for key, value in numbers(row):
            self._writer.add_scalar(key, value, round(row["time"]))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the project `aedfl`; the environment variables of W&B say where it goes."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = _module("wandb", "wandb")
        self._run = wandb.init(project="aedfl", name=folder.name, dir=str(folder), config=dict(flat(config)))

    def log(self, row: Row) -> None:
        self._run.log(dict(numbers(row)))

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the active experiment; `MLFLOW_TRACKING_URI` says where it goes."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._mlflow = _module("mlflow", "mlflow")
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(dict(flat(config)))

    def log(self, row: Row) -> None:
        self._mlflow.log_metrics(dict(numbers(row)), step=round(row["time"]))

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, type[TensorBoard] | type[WandB] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


class Trackers:
    """Several trackers as one; none is fine too."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def log(self, row: Row) -> None:
        for tracker in self._trackers:
            tracker.log(row)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> Trackers:
    """The named trackers for a run; `UserError` naming the extra when one is not installed."""
    return Trackers([TRACKERS[name](folder, config) for name in names])


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def numbers(row: Row) -> Iterator[tuple[str, float]]:
    """The finite numbers of a row, nested ones under `section/key`."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{name}", inner) for name, inner in numbers(value))
        elif (found := number(value)) is not None:
            yield key, found


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"record.trackers: {extra} is not installed; pip install 'aedfl[{extra}]'") from None
