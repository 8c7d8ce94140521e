"""What a device counts, for its heartbeats and its record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    messages_lost: int = 0
    """Own messages that were replaced by newer ones, refused, or given up."""
    refused: int = 0
    """Others' messages that did not fit."""
    filtered: int = 0
    """Others' models that a robust rule kept out."""
