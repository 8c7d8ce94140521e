"""Checkpoints: the tensors that are alive at an evaluation, and how long the record was then.

Programs cannot be saved, but they can be replayed: the events follow from the config and from what programs
read, which the journal holds. So a checkpoint is small, and resuming replays without training anything.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from ..sim.work import Work


@dataclass(frozen=True)
class Position:
    """Where a run stood: evaluations done, length of each stream in bytes, wall-clock seconds used."""

    evaluations: int
    offsets: dict[str, int]
    wall: float
    fingerprint: str
    """Hash of the config; a checkpoint fits no other."""
    values: int
    """Values that programs had asked for: tensors are found by their numbers."""


def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """As `save_file`, but a full disk is an `OSError`, as everywhere else."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def folder(run: Path) -> Path:
    return run / "checkpoints"


def write(run: Path, position: Position, work: Work, keep: int) -> None:
    """Writes a checkpoint whole or not at all, then drops the oldest ones."""
    place = folder(run)
    place.mkdir(exist_ok=True)
    path = place / f"{position.evaluations:08d}.safetensors"
    partial = path.with_suffix(".partial")
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in work.snapshot()}
    try:
        save(tensors, partial, {"position": json.dumps(asdict(position))})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    for old in sorted(place.glob("*.safetensors"))[:-keep]:
        old.unlink()


def latest(run: Path, fingerprint: str) -> tuple[Position, Path] | None:
    """The newest checkpoint of a run folder, if there is one."""
    files = sorted(folder(run).glob("*.safetensors"))
    if not files:
        return None
    path = files[-1]
    try:
        with safe_open(path, "pt") as file:
            position = Position(**json.loads(file.metadata()["position"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"checkpoint {path} is damaged ({error}); delete it to resume from the one before") from error
    if position.fingerprint != fingerprint:
        raise UserError(f"checkpoint {path} was made with another config than {run / 'config.toml'}")
    return position, path


def tensors(path: Path, device: str) -> dict[str, Tensor]:
    with safe_open(path, "pt", device=device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
