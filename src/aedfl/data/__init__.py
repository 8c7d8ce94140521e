"""Data sets, a user's own data, and how samples are shared out to devices."""

from .adapters import as_split, from_user
from .partition import SCHEMES, hold_out, partition, split_validation
from .registry import NAMES, Row, describe, load
from .types import Dataset, Normalisation, Split

__all__ = [
    "NAMES",
    "SCHEMES",
    "Dataset",
    "Normalisation",
    "Row",
    "Split",
    "as_split",
    "describe",
    "from_user",
    "hold_out",
    "load",
    "partition",
    "split_validation",
]
