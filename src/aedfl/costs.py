"""What things cost, in floating-point operations and bytes. Never measured time: same seed, same events, anywhere."""

from __future__ import annotations

from typing import Any

ENVELOPE = 256
"""Bytes of a message beside its values and its mask: protobuf envelope, checksum, safetensors header."""
FIELD = 16
"""Bytes of one named number."""


def forward(macs: float, samples: float) -> float:
    """FLOPs of a forward pass: a multiply-accumulate is two."""
    return 2.0 * macs * samples


def training(macs: float, samples: float) -> float:
    """FLOPs of forward and backward passes: the backward pass costs twice the forward one."""
    return 3.0 * forward(macs, samples)


def hessian_product(macs: float, samples: float) -> float:
    """FLOPs of one Hessian-vector product: forward over reverse, twice a gradient."""
    return 2.0 * training(macs, samples)


def merging(parameters: int, models: int) -> float:
    """FLOPs of a weighted mean of `models` vectors."""
    return 2.0 * parameters * models


def message(kept: int, full: int, masked: bool, fields: dict[str, Any], entries: int = 0) -> int:
    """Bytes on the wire: kept values and the `entries` of fields that are vectors as float32, the mask as bits, some
    for names and numbers."""
    return ENVELOPE + 4 * (kept + entries) + (-(-full // 8) if masked else 0) + FIELD * len(fields)
