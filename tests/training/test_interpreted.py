"""The kernels without a GPU: Triton's interpreter runs them on the CPU, where Triton is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from training import convolutions, descents, lines, pixels, scoring, stepping

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def interpreted(script: str) -> Any:
    """What it prints in a process of its own: Triton looks for the interpreter when it is imported."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_small(found: dict[str, dict[str, float]], most: float) -> None:
    """An error that is not a number is not small."""
    errors = {(case, which): error for case, parts in found.items() for which, error in parts.items()}
    assert not {which: error for which, error in errors.items() if not error < most}


def test_kernels_equal_double_precision() -> None:
    found = interpreted(convolutions.__file__)
    assert len(found) == len(convolutions.FOR_BANDS) + len(convolutions.FOR_TILES)
    assert_small(found, 2e-6)


def test_lines_equal_double_precision() -> None:
    found = interpreted(lines.__file__)
    assert len(found) == 2 * len(lines.CASES) + 2
    assert_small(found, 2e-6)


@pytest.mark.timeout(900)
def test_layers_of_channels_side_by_side_equal_double_precision() -> None:
    found = interpreted(pixels.__file__)
    assert len(found) == 3 * len(pixels.CONVOLUTIONS) + 4 * len(pixels.NORMS) + 7
    assert_small(found, 2e-6)


def test_steps_in_one_pass_are_those_of_the_plain_path() -> None:
    found = interpreted(descents.__file__)
    assert len(found) == 2 * len(descents.PLANS)
    assert_small(found, 2e-6)


def test_models_scored_by_the_kernels_say_what_each_of_them_says() -> None:
    found = interpreted(scoring.__file__)
    assert set(found) == set(scoring.NAMES)
    assert_small({"scores": found}, 1e-5)


@pytest.mark.timeout(900)
def test_models_trained_by_the_kernels_become_what_each_of_them_becomes() -> None:
    found = interpreted(stepping.__file__)
    assert set(found) == set(stepping.PLANS)
    assert_small({"parameters": found}, 1e-5)
