"""Who may send to whom. Neighbours are asked for one device at a time; no n x n matrix is needed for that.

A neighbourhood never holds the device itself, and no device twice. Device numbers run from 0 to n - 1.
"""

from .drawing import draw_svg
from .edges import Edges, from_edges, random_regular, read_edges
from .kinds import Exponential, Full, Ring, Star, Topology, Torus, Undirected
from .make import KINDS, make
from .measures import describe, diameter, is_strongly_connected, spectral_gap

__all__ = [
    "KINDS",
    "Edges",
    "Exponential",
    "Full",
    "Ring",
    "Star",
    "Topology",
    "Torus",
    "Undirected",
    "describe",
    "diameter",
    "draw_svg",
    "from_edges",
    "is_strongly_connected",
    "make",
    "random_regular",
    "read_edges",
    "spectral_gap",
]
