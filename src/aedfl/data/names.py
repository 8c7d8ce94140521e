"""The error for a name that does not exist, with the nearest one that does."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ..errors import UserError


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """One sentence: what was asked for, the nearest known name, and all that are allowed."""
    allowed = list(known)
    near = get_close_matches(name.lower().replace("_", "-"), allowed, n=1)
    hint = f", did you mean '{near[0]}'?" if near else ","
    return UserError(f"{what} '{name}' is not known{hint} allowed: {', '.join(allowed)}")
