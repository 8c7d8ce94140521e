"""Handwritten digits of 8x8 pixels (UCI, as shipped with scikit-learn): needs no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UserError
from ..randomness import generator
from .types import Dataset, Split

TRAIN_SHARE = 0.8


def digits() -> Dataset:
    """1,797 samples, x float32 [n, 1, 8, 8] in [0, 1]; 80 % of every class for training, always the same."""
    table = _table()
    x = torch.from_numpy(table[:, :-1].astype(np.float32).reshape(-1, 1, 8, 8) / 16)
    labels = table[:, -1].astype(np.int64)
    train, test = (torch.from_numpy(rows) for rows in _stratified(labels))
    y = torch.from_numpy(labels)
    names = tuple(str(digit) for digit in range(10))
    return Dataset("digits", Split(x[train], y[train]), Split(x[test], y[test]), 10, None, names)


def _table() -> NDArray[Any]:
    """Rows of 64 pixels (0 to 16) and a label."""
    spec = find_spec("sklearn")
    if spec is None:
        raise UserError("data set 'digits' needs scikit-learn, which is not installed")
    # Importing scikit-learn takes longer than a small run, so its file is read directly where it is.
    file = Path((spec.submodule_search_locations or [""])[0], "datasets", "data", "digits.csv.gz")
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    return np.column_stack([bunch.data, bunch.target])


def _stratified(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers for training and for testing, each in ascending order."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = generator("digits", "split", int(label)).permutation(np.flatnonzero(labels == label))
        chosen[rows[: round(TRAIN_SHARE * len(rows))]] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)
