"""An accelerator that is always behind: what is copied from it is garbage until somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from aedfl.transfer import Event


class Copy:
    """The event of one copy, which takes place when it is waited for, with the numbers there were when it was begun."""

    def __init__(self, source: Tensor, waited: Callable[[], None] = lambda: None) -> None:
        self._waited = waited
        self.target = torch.full_like(source, 1)
        self._numbers = source.clone()
        self.arrived = False

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.target.copy_(self._numbers)
        self.arrived = True
        self._waited()


class Accelerator:
    """All tensors lie on it; it notes which copy was begun and waited for when."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.log: list[tuple[str, int]] = []

    def begin_copy(self, source: Tensor) -> tuple[Tensor, Event]:
        number = len(self.copies)
        copy = Copy(source, lambda: self.log.append(("waited", number)))
        self.copies.append(copy)
        self.log.append(("begun", number))
        return copy.target, copy


@contextmanager
def behind() -> Iterator[Accelerator]:
    """Makes this process believe in such an accelerator."""
    found = Accelerator()
    with (
        patch("aedfl.transfer.away", lambda tensor: True),
        patch("aedfl.experiment.measure.away", lambda tensor: True),
        patch("aedfl.transfer.begin_copy", found.begin_copy),
    ):
        yield found
