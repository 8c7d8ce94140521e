"""Checkpoints: the tensors that are alive at an evaluation, and how long the record was then.

Programs cannot be saved, but they can be replayed: the events follow from the config and from what programs
read, which the journal holds. So a checkpoint is small, and resuming replays without training anything.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from ..sim.work import Work

log = logging.getLogger(__name__)


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
        text = json.dumps(asdict(position))
        save(tensors, partial, {"position": text, "checksum": checksum(text, sorted(tensors.items()))})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    for old in sorted(place.glob("*.safetensors"))[:-keep]:
        old.unlink()


def latest(run: Path, fingerprint: str) -> tuple[Position, Path] | None:
    """The newest checkpoint of a run folder that is not damaged, if there is any checkpoint."""
    damage = ""
    for path in sorted(folder(run).glob("*.safetensors"), reverse=True):
        try:
            position = _verified(path)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            damage = damage or f"checkpoint {path} is damaged ({error})"
            continue
        if position.fingerprint != fingerprint:
            raise UserError(f"checkpoint {path} was made with another config than {run / 'config.toml'}")
        if damage:
            log.warning("%s; the run goes on from %s", damage, path.name)
        return position, path
    if damage:
        raise UserError(f"{damage}, and no other one is whole; delete {folder(run)} to begin the run anew")
    return None


def _verified(path: Path) -> Position:
    """The position of a checkpoint, all of which was read. One without a checksum is taken as it is."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        found = checksum(metadata["position"], ((name, file.get_tensor(name)) for name in sorted(file.keys())))
        if metadata.keys() != {"position"} and metadata["checksum"] != found:
            raise ValueError("its checksum is wrong")
        return Position(**json.loads(metadata["position"]))


def checksum(position: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """CRC-32 (hex) of a position and of the tensors in that order: names, types, shapes, bytes."""
    total = zlib.crc32(position.encode())
    for name, tensor in tensors:
        total = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def tensors(path: Path, device: str) -> dict[str, Tensor]:
    with safe_open(path, "pt", device=device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
