"""Asynchronous decentralised federated learning on heterogeneous devices: one program, two clocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .context import SERVER, Context, Message, Method, Model, Trained, option
    from .experiment.api import Result, simulate
    from .training.plan import Plan

__all__ = [
    "SERVER",
    "Context",
    "Message",
    "Method",
    "Model",
    "Plan",
    "Result",
    "Trained",
    "option",
    "simulate",
]

_PLACES = {"simulate": ".experiment.api", "Result": ".experiment.api", "Plan": ".training.plan"}


def __getattr__(name: str) -> Any:
    """Names are looked up when they are used, so that `aedfl --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'aedfl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES.get(name, ".context"), __name__), name)
