"""The graphs that a formula gives: neighbours cost O(degree) and nothing is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt
from typing import final

Neighbours = tuple[int, ...]


class Topology(ABC):
    """A directed graph over the devices: an edge j -> i means that j may send to i."""

    devices: int

    @abstractmethod
    def in_neighbours(self, device: int) -> Neighbours:
        """Whom the device receives from, in a fixed order."""

    @abstractmethod
    def out_neighbours(self, device: int) -> Neighbours:
        """Whom the device may send to, in a fixed order."""


class Undirected(Topology):
    """Every edge goes both ways."""

    @abstractmethod
    def neighbours(self, device: int) -> Neighbours:
        """Whom the device shares an edge with."""

    @final
    def in_neighbours(self, device: int) -> Neighbours:
        return self.neighbours(device)

    @final
    def out_neighbours(self, device: int) -> Neighbours:
        return self.neighbours(device)


@final
@dataclass(frozen=True)
class Exponential(Topology):
    """Device i receives from i - 2^k (mod n) for k = 0 … ceil(log2 n) - 1: device 0 of 8 from 7, 6 and 4."""

    devices: int

    def in_neighbours(self, device: int) -> Neighbours:
        return tuple((device - step) % self.devices for step in self._steps())

    def out_neighbours(self, device: int) -> Neighbours:
        return tuple((device + step) % self.devices for step in self._steps())

    def _steps(self) -> list[int]:
        # All steps are less than n, so there is neither the device itself nor a duplicate.
        return [1 << k for k in range((self.devices - 1).bit_length())]


@final
@dataclass(frozen=True)
class Ring(Undirected):
    """The device before and the one after."""

    devices: int

    def neighbours(self, device: int) -> Neighbours:
        return _others(device, ((device - 1) % self.devices, (device + 1) % self.devices))


@final
@dataclass(frozen=True)
class Star(Undirected):
    """Device 0 is the centre and knows all others, which know only it."""

    devices: int

    def neighbours(self, device: int) -> Neighbours:
        return (0,) if device else tuple(range(1, self.devices))


@final
@dataclass(frozen=True)
class Torus(Undirected):
    """A grid with wrapped edges, row by row, as near to a square as divisors of n allow.

    A prime n has no grid but 1 x n, which is the ring; 2 x m wraps up and down to the same device.
    """

    devices: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, rows <= columns."""
        rows = next(r for r in range(isqrt(self.devices), 0, -1) if self.devices % r == 0)
        return rows, self.devices // rows

    def neighbours(self, device: int) -> Neighbours:
        rows, columns = self.shape
        row, column = divmod(device, columns)
        beside = [row * columns + (column + step) % columns for step in (-1, 1)]
        above = [(row + step) % rows * columns + column for step in (-1, 1)]
        return _others(device, beside + above)


@final
@dataclass(frozen=True)
class Full(Undirected):
    """Everybody knows everybody."""

    devices: int

    def neighbours(self, device: int) -> Neighbours:
        return (*range(device), *range(device + 1, self.devices))


def _others(device: int, candidates: Iterable[int]) -> Neighbours:
    return tuple(dict.fromkeys(j for j in candidates if j != device))
