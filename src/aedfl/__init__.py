"""Asynchronous decentralised federated learning on heterogeneous devices: one program, two clocks."""

__version__ = "0.1.0"
