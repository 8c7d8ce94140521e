"""Comparisons: several configs run side by side, each into a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

from ..errors import UserError
from .config import RunConfig, config_hash, from_toml
from .folder import CONFIG, beginning, ended, entries, held, read_summary
from .progress import Progress, Silent, Together
from .run import Run, Summary, claim, drive_all
from .workshop import Workshop

AT_ONCE = 24
"""Runs that are advanced together; more would share batches no better and hold more memory."""


def compare(
    configs: Sequence[RunConfig],
    out: Path,
    resume: bool = False,
    progress: Progress | None = None,
    workshop: Workshop | None = None,
) -> list[Summary]:
    """Runs several configs, batched together where they share a model; one folder each and one report."""
    from ..report import write_report

    folders = [out / f"{Path(config.method).stem}-seed{config.seed}" for config in configs]
    shared_by = next((folder for folder in folders if folders.count(folder) > 1), None)
    if shared_by is not None:
        raise UserError(f"two methods would run in {shared_by}; give their files different names")
    for folder, config in zip(folders, configs, strict=True):
        _fits(folder, config, resume)
        if ended(folder):
            read_summary(folder)
    left = [(f, c) for f, c in zip(folders, configs, strict=True) if not ended(f)]
    with nullcontext(workshop) if workshop else Workshop() as shop:
        shared = Together(progress or Silent(), len(left), lambda: shop.place)
        for begin in range(0, len(left), AT_ONCE):
            _side_by_side(left[begin : begin + AT_ONCE], shop, shared)
    write_report(folders, out / "report.html")
    return [read_summary(folder) for folder in folders]


def _side_by_side(part: Sequence[tuple[Path, RunConfig]], shop: Workshop, shared: Together) -> None:
    """Runs some configs to their end. If one of them cannot begin, none does."""
    with ExitStack() as locks:
        for folder, _ in part:
            locks.enter_context(held(folder))
        with ExitStack() as begun:
            for folder, config in part:
                if not (folder / CONFIG).exists():
                    claim(folder, config, force=False)
                    begun.enter_context(beginning(folder))
            runs = [Run(config, shop, folder, shared.one()) for folder, config in part]
        drive_all(runs, shop)


def _fits(folder: Path, config: RunConfig, resume: bool) -> None:
    """A comparison begins where nothing is, and goes on only with the runs it was begun with."""
    file = folder / CONFIG
    if not (resume and file.exists()):
        if folder.exists() and entries(folder):
            raise UserError(f"run folder {folder} exists; use --resume to go on with it, or choose another --out")
    elif config_hash(from_toml(file.read_text(), str(file))) != config_hash(config):
        raise UserError(f"{file} is of another comparison than the one to go on with; choose another --out")
