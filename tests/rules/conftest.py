"""Tensors here are tiny: one thread is faster than two, and leaves a core to other tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1234)


@pytest.fixture
def normal(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return draw


@pytest.fixture
def uniform(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=dtype)

    return draw
