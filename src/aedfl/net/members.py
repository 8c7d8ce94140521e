"""Who takes part, and who is whose neighbour when devices come and go.

The rule. Whenever a device joins or leaves, the graph of the run's kind is made anew over the devices that have
not left for good, in the order of their indices; a graph from a file keeps its edges. A device that is away (no
heartbeat) keeps its place, for it is expected back; after `forget` seconds of silence it counts as one that has
left. One that comes back after that finds its old index again, and the graph is made anew with it. Random graphs
are drawn by the run's seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UserError
from ..experiment.sections import Topology
from ..topology import Topology as Kind
from ..topology import make

Pair = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Graph:
    """In- and out-neighbours by index."""

    pairs: dict[int, Pair]

    def neighbours(self, index: int) -> Pair:
        return self.pairs.get(index, ((), ()))

    def edges(self) -> list[tuple[int, int]]:
        return [(source, index) for index, (sources, _) in self.pairs.items() for source in sources]


def graph(indices: Iterable[int], settings: Topology, seed: int) -> Graph:
    """The run's graph over these devices."""
    order = sorted(indices)
    if settings.kind == "file":
        return _from_file(order, settings)
    if not order:
        return Graph({})
    made = _made(len(order), settings, seed)
    pairs: dict[int, Pair] = {}
    for place, index in enumerate(order):
        sources, targets = made.in_neighbours(place), made.out_neighbours(place)
        pairs[index] = tuple(order[j] for j in sources), tuple(order[j] for j in targets)
    return Graph(pairs)


def _from_file(order: list[int], settings: Topology) -> Graph:
    """A file names indices, so its edges stay what they are; those of devices that are not there are left out."""
    made = make("file", 1 + max(order, default=0), path=settings.path)
    there = set(order)
    return Graph(
        {
            index: (
                tuple(j for j in made.in_neighbours(index) if j in there),
                tuple(j for j in made.out_neighbours(index) if j in there),
            )
            for index in order
        }
    )


def _made(count: int, settings: Topology, seed: int) -> Kind:
    """A degree that this number of devices cannot have gives way to the usual one."""
    try:
        return make(settings.kind, count, seed=seed, degree=settings.degree)
    except UserError:
        return make(settings.kind, count, seed=seed)
