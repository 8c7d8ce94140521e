"""What tracing a module for pruning brings with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys, torch
from aedfl.sparsity import ChannelGroups
assert "torch_pruning" not in sys.modules
ChannelGroups.of(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), torch.zeros(1, 3))
assert "torch_pruning" in sys.modules and "timm" not in sys.modules
import timm
"""


def test_a_large_library_is_not_imported_only_because_it_is_installed(tmp_path: Path) -> None:
    """And whoever wants it can still import it."""
    (tmp_path / "timm.py").write_text("print('imported')")
    found = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "imported\n"
