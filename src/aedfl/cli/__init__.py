"""The command line: `aedfl --help`. Commands import what they need when they run, so that help is quick."""

from .main import app, main

__all__ = ["app", "main"]
