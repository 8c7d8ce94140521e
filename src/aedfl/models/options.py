"""What the options of a built-in model may be: whole numbers, and lists of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from aedfl.errors import UserError

MOST = 10_000_000
"""Of channels, neurons, words or outputs: more would fit into no memory."""


def whole(name: str, value: Any) -> int:
    """The value as a number from 1 to `MOST`, or a sentence about the option of that name."""
    if not _fits(value):
        raise UserError(f"{name} = {value!r}: must be a whole number from 1 to {MOST}")
    return int(value)


def wholes(name: str, value: Any, count: int | None = None) -> tuple[int, ...]:
    """The value as that many such numbers, or as any number of them."""
    fits = isinstance(value, list | tuple) and all(map(_fits, value))
    if not fits or count not in (None, len(value)):
        many = "whole numbers" if count is None else f"{count} whole numbers"
        raise UserError(f"{name} = {value!r}: must be a list of {many} from 1 to {MOST}")
    return tuple(map(int, value))


def _fits(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 1 <= int(value) <= MOST
