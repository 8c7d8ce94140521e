"""The virtual clock: many devices in one process, in simulated time, reproducible to the bit."""

from .simulation import Simulation

__all__ = ["Simulation"]
