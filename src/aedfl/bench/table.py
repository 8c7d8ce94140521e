"""A table of figures, as every benchmark returns one beside its JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Tell = Callable[[str, int, int], None]
"""Progress: what is being measured, how many parts are done, how many there are."""


@dataclass(frozen=True)
class Figures:
    """Columns and rows of text, and what the reader must know about them."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()
    names: int = 1
    """Columns that hold names, which come first."""


def quiet(_: str, __: int, ___: int) -> None:
    """Tells nobody."""


def short(value: float) -> str:
    """Three significant digits at least, and narrow: 2.16 M, 1,234, 12.3 or 0.0123."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.2f} M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def optional(value: float | None, places: int) -> str:
    """A dash for what there is not."""
    return "–" if value is None else f"{value:,.{places}f}"
