"""Takes records that were made elsewhere over into one folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UserError
from . import tune
from .records import Record, Store, read


@dataclass
class Collected:
    """What became of the records that were offered."""

    taken: int = 0
    left: int = 0
    """Not taken, because the record that is there goes further."""
    tuned: set[str] = field(default_factory=set)
    """Settings that trials came in for."""


def collect(sources: Iterable[Path], folder: Path, replace: bool = False) -> Collected:
    """Takes over what is new or goes further; with `replace`, also what was run with another config."""
    cells, trials = Store(folder / "records"), Store(folder / "tuning")
    outcome = Collected()
    for record in [record for source in sources for record in _records(source)]:
        is_trial = record.get("target") == tune.TARGET
        if (trials if is_trial else cells).add(record, replace):
            outcome.taken += 1
            outcome.tuned |= {record["setting"]} if is_trial else set()
        else:
            outcome.left += 1
    cells.tidy()
    trials.tidy()
    for name in outcome.tuned:
        tune.freeze_again(name, trials)
    return outcome


def _records(source: Path) -> list[Record]:
    if not source.exists():
        raise UserError(f"{source} does not exist")
    paths = sorted(source.rglob("*.jsonl")) if source.is_dir() else [source]
    found = [record for path in paths for record in read(path)]
    if not found:
        raise UserError(f"{source} has no records (*.jsonl) in it")
    return found
