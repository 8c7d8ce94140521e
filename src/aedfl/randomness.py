"""Counter-based randomness: a key, such as (seed, device, update, purpose), always gives the same numbers.

Nothing is global and no generator's position matters, so what is drawn does not depend on what ran before.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

Key = int | str

_START = np.zeros(4, np.uint64)
"""Philox's counter at its beginning; by default NumPy makes such an array each time."""


def digest(*key: Key) -> int:
    """A 64-bit number that depends on every part of the key."""
    text = "\x1f".join([f"{type(part).__name__[0]}{part}" for part in key])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*key: Key) -> np.random.Generator:
    """A NumPy generator for that key."""
    return np.random.Generator(np.random.Philox(_Seed(digest(*key)), counter=_START))  # type: ignore[arg-type]


class _Seed(ISeedSequence):
    """Philox's key as it stands. `Philox(key=…)` means the same, but first gathers entropy that it does not use."""

    def __init__(self, number: int) -> None:
        self.number = number

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray[Any, Any]:
        return np.array([self.number] + [0] * (n_words - 1), dtype)


def torch_seed(*key: Key) -> int:
    """A seed for PyTorch, with room to add a step number to it."""
    return digest(*key) >> 2
