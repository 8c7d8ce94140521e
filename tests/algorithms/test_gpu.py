"""Every method on a CUDA device: its ops keep their tensors together, and it learns what it learns on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aedfl import simulate
from aedfl.algorithms import METHODS, dispfl
from aedfl.layout import Layout
from experiment.small import simple_run, small

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EARLY: dict[str, dict[str, Any]] = {
    "aedfl": {"prune_start": 3, "prune_every": 2, "prune_end": 6},
    "aedfl-p": {"prune_start": 3, "prune_every": 2, "prune_end": 6},
    "hrank": {"update": 3},
    "fedap": {"update": 3},
    "hap": {"update": 3},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_a_gpu_is_like_one_on_the_cpu(method: str, tmp_path: Path) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        config = small(method, hyper=EARLY.get(method, {}), engine={"device": device, "precision": "fp32"})
        summary = simple_run(config, tmp_path / device)["summary"]
        losses.append((summary["loss"], summary["updates"]))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.05)
    assert losses[0][1] == losses[1][1]


@pytest.mark.parametrize("method", ["aedfl", "fedbuff", "dispfl"])
def test_work_in_a_thread_of_its_own_gives_the_same(method: str, tmp_path: Path) -> None:
    """Graphs are captured there while the simulation uses the GPU too; batches may differ, so rounding may."""
    found = []
    for overlap in (False, True):
        engine = {"device": "cuda", "precision": "fp32", "overlap": overlap, "lookahead": 5}
        config = small(method, hyper=EARLY.get(method, {}), engine=engine, record={"checkpoint_seconds": 3600.0})
        found.append(simple_run(config, tmp_path / str(overlap))["summary"])
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=0.02)
    assert found[0]["updates"] == found[1]["updates"]


def test_masks_regrow_on_a_gpu_as_on_a_cpu() -> None:
    """For all devices at once, to the last entry; many numbers are equal."""
    layout = Layout.of(nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 10)))
    op = dispfl.Regrow(tuple(entry for entry in layout.entries if entry.trainable))
    random = torch.Generator().manual_seed(0)
    work = [
        (
            torch.randint(-40, 40, (layout.size,), generator=random) / 8.0,
            torch.rand(layout.size, generator=random) < 0.5,
            torch.randn(layout.size, generator=random),
            0.3 * number / 7,
        )
        for number in range(7)
    ]
    there = [(vector.cuda(), mask.cuda(), gradient.cuda(), share) for vector, mask, gradient, share in work]
    for (here,), (other,) in zip(op.run(work), op.run(there), strict=True):
        assert other.dtype == torch.bool and torch.equal(here, other.cpu())


class Own(nn.Module):
    """Has an operation that grouped layers do not know, so that `vmap` trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.sin(self.inner(x.flatten(1))))


def test_so_does_a_module_of_ones_own() -> None:
    found = []
    for overlap in (False, True):
        engine = {"device": "cuda", "precision": "fp32", "overlap": overlap, "lookahead": 5}
        data = {"samples": 180, "test_samples": 60}
        torch.manual_seed(0)
        found.append(simulate(Own(), devices=6, virtual_seconds=60.0, data=data, engine=engine).summary)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=0.02)
    assert found[0]["updates"] == found[1]["updates"] > 0
