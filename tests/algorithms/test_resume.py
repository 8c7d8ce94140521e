"""Every method's run, dropped and resumed again and again, ends as if it had not been."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from aedfl.algorithms import METHODS
from aedfl.experiment.run import claim
from aedfl.experiment.workshop import Workshop
from experiment.small import interrupted, record, simple_run, small

EARLY: dict[str, dict[str, Any]] = {
    "hrank": {"update": 3},
    "fedap": {"update": 3, "lanczos_steps": 4},
    "hap": {"update": 3, "probes": 4},
}
"""Pruning comes within the run."""


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith("aedfl")])
def test_a_dropped_run_ends_the_same(method: str, tmp_path: Path) -> None:
    config = small(
        method, hyper=EARLY.get(method, {}), fleet={"mean_up": 15.0, "mean_down": 3.0}, stop={"virtual_seconds": 20.0}
    )
    whole = simple_run(config, tmp_path / "whole")
    folder = tmp_path / "torn"
    claim(folder, config, force=False)
    draw, workshop, drops = random.Random(method), Workshop(), 0
    while not interrupted(folder, draw.randint(2, 6 if drops < 3 else 1000), workshop):
        drops += 1
    assert drops >= 2
    assert record(folder) == whole
