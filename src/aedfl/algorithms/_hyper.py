"""How methods write their hyper-parameters down."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, text: str) -> Any:
    """A field of a frozen dataclass with its line of help."""
    return field(default=default, metadata={"help": text})
