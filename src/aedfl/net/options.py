"""How a node is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..experiment.config import RunConfig
from .gate import Robust
from .kit import Kit
from .post import Limits


@dataclass(frozen=True)
class Options:
    """How a node is started. Times are seconds."""

    coordinator: str
    folder: Path
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    """Where others reach it, if that is not where it listens: a port that is forwarded, a tunnel."""
    token: str = ""
    server: bool = False
    method: str | None = None
    """The method's file on this machine, where the run's method is a file: no code comes from others."""
    robust: Robust = field(default_factory=Robust)
    limits: Limits = field(default_factory=Limits)
    patience: float = 15.0
    """How long to wait for the coordinator at the first start."""
    grace: float = 20.0
    """How long the program may take to end once its own stop condition holds."""
    hurry: float = 2.0
    """How long it may take once the run is over, or the process was told to stop."""
    settle: float = 5.0
    """How long messages that still wait may take when the program has ended."""
    lifetime: float = 600.0
    """How long a message may wait for a receiver that cannot be reached."""
    wish: int | None = None
    """The index to ask for at the first start."""
    linger: float = 30.0
    """How long to answer others after the own program has ended, when the coordinator is away."""


Prepare = Callable[[RunConfig], Kit]
"""Makes the model and the data ready under the run's settings."""
