"""What is found out about a module by trying it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from aedfl.training.traits import mixes_samples


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    products = torch.backends.cuda.matmul  # whose attributes pytest cannot put back
    before = products.allow_tf32
    yield
    products.allow_tf32 = before


class Watching(nn.Linear):
    """Notes whether products may be rounded to TF32 while it runs."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]
        return super().forward(x)

    def __deepcopy__(self, _: object) -> Watching:
        return self


@pytest.mark.parametrize("rounded", [True, False])
def test_a_module_is_tried_in_full_precision_whatever_the_run_has(
    rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", rounded)
    torch.backends.cuda.matmul.allow_tf32 = rounded
    module = Watching()
    assert not mixes_samples(module, torch.randn(2, 3))
    assert module.seen and not any(module.seen)
    assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is rounded


def test_the_precision_comes_back_after_a_module_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with pytest.raises(RuntimeError):
        mixes_samples(nn.Linear(4, 2), torch.randn(2, 3))
    assert torch.backends.cudnn.allow_tf32
