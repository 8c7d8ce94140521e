"""`simulate`: the whole thing as one function call, for a user's own model and data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..data import from_user
from ..errors import UserError
from ..task import Loss
from .config import RunConfig, load
from .progress import Live, Progress, Silent
from .run import claim, complete
from .workshop import Own, Workshop


@dataclass(frozen=True)
class Result:
    """What a simulation gives back."""

    summary: dict[str, Any]
    """The figures of `summary.json`."""
    metrics: list[dict[str, Any]]
    """One row per evaluation: time, accuracy, loss, bytes_sent, …"""
    model: nn.Module
    """The model with the mean (or the server's) final weights."""

    @property
    def accuracy(self) -> float:
        """The metric of the mean model on the test data at the end."""
        return float(self.summary["accuracy"])


def simulate(
    model: nn.Module | str = "cnn",
    train: Any = "digits",
    test: Any = None,
    *,
    method: str = "aedfl-0",
    devices: int = 20,
    virtual_seconds: float | None = None,
    updates: int | None = None,
    loss: Loss | None = None,
    metric: Loss | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = False,
    **settings: Any,
) -> Result:
    """Simulates a fleet that trains `model` on `train`, and measures it on `test`.

    `model` is any `nn.Module` or the name of a built-in one. `train` and `test` are a
    `torch.utils.data.Dataset`, a pair of arrays, or a Parquet file; or `train` is the name of a data set.
    `loss(output, target)` and `metric(output, target)` default to cross-entropy and accuracy for integer
    targets, and to the squared error for others. Further `settings` are sections or dotted keys of a run's
    config: `training={"lr": 0.1}`, `topology={"kind": "ring"}`; `model_options={"hidden": [32]}` are those of a
    built-in model. With `out`, a run folder is written too.
    """
    if virtual_seconds is None and updates is None:
        virtual_seconds = 120.0
    named = isinstance(train, str) and test is None
    if not named and test is None:
        raise UserError("test data are missing: `train` is not the name of a data set, so `test` must be given too")
    own = Own(
        module=model if isinstance(model, nn.Module) else None,
        dataset=None if named else from_user(train, test),
        loss=loss,
        metric=metric,
    )
    config: RunConfig = load(
        None,
        (),
        method=method,
        devices=devices,
        seed=seed,
        data={"name": train if named else "own", **settings.pop("data", {})},
        model={"name": model if isinstance(model, str) else "own", "options": settings.pop("model_options", {})},
        stop={"virtual_seconds": virtual_seconds, "updates": updates, **settings.pop("stop", {})},
        **settings,
    )
    watcher: Progress = Live() if progress else Silent()
    folder = None if out is None else Path(out)
    if folder is not None:
        claim(folder, config, force=False)
    with Workshop(own) as workshop:
        run = complete(config, folder, watcher, workshop)
    return Result(run.summary, run.record.read("metrics"), run.final_model())
