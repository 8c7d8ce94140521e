"""What can be said about a graph: connection, diameter, spectral gap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kinds import Neighbours, Topology, Torus


def is_strongly_connected(topology: Topology) -> bool:
    """Whether a model can travel from every device to every other one."""
    return all(
        _reaches_all(topology.devices, ask) for ask in (topology.in_neighbours, topology.out_neighbours)
    )


def _reaches_all(devices: int, neighbours: Callable[[int], Neighbours]) -> bool:
    seen, waiting = {0}, [0]
    while waiting and len(seen) < devices:
        fresh = [j for j in neighbours(waiting.pop()) if j not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return len(seen) == devices


def diameter(topology: Topology) -> int | None:
    """The most hops that a shortest way takes; None where some device cannot be reached."""
    sources = [topology.in_neighbours(i) for i in range(topology.devices)]
    everyone = (1 << topology.devices) - 1
    heard = [1 << i for i in range(topology.devices)]  # as bits: whose news has reached device i
    hops = 0
    while any(known != everyone for known in heard):
        before, hops = heard, hops + 1
        heard = []
        for i, known in enumerate(before):
            for j in sources[i]:
                known |= before[j]
            heard.append(known)
        if heard == before:
            return None
    return hops


def spectral_gap(topology: Topology) -> float:
    """1 - |second eigenvalue| of the matrix by which everybody averages itself and all in-neighbours."""
    n = topology.devices
    if n == 1:
        return 1.0
    mixing = np.eye(n)
    for i in range(n):
        mixing[i, list(topology.in_neighbours(i))] = 1
    mixing /= mixing.sum(1, keepdims=True)
    return float(max(0.0, 1 - np.sort(np.abs(_eigenvalues(mixing)))[-2]))


def _eigenvalues(matrix: NDArray[np.float64]) -> NDArray[Any]:
    """Quick where every row is the one above shifted by one, or the matrix is symmetric; slow otherwise."""
    if all(np.array_equal(row, np.roll(matrix[0], i)) for i, row in enumerate(matrix)):
        return np.fft.fft(matrix[0])
    return np.linalg.eigvalsh(matrix) if np.array_equal(matrix, matrix.T) else np.linalg.eigvals(matrix)


def describe(topology: Topology) -> str:
    """A few lines of text: degrees, connection, and how fast news spreads where that can be computed soon."""
    n = topology.devices
    degrees = [len(topology.in_neighbours(i)) for i in range(n)]
    low, high = min(degrees), max(degrees)
    lines = [
        f"devices             {n}",
        f"in-neighbours       {low if low == high else f'{low} to {high}, mean {sum(degrees) / n:.2f}'}",
        f"edges               {sum(degrees)} directed",
        f"strongly connected  {'yes' if is_strongly_connected(topology) else 'no'}",
    ]
    if isinstance(topology, Torus):
        lines.append("grid                {} x {}".format(*topology.shape))
    if n <= 2000:
        hops = diameter(topology)
        lines.append(f"diameter            {'infinite' if hops is None else hops}")
    if n <= 1000:
        lines.append(f"spectral gap        {spectral_gap(topology):.3g}")
    return "\n".join(lines)
