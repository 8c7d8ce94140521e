"""Links: latency, bandwidth, loss. Every link is shared by all that use it, served in order of sending."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..context import SERVER
from ..randomness import generator


@dataclass(frozen=True)
class Links:
    """The network's figures: seconds, bits per second, share of messages lost."""

    latency: float = 0.02
    bandwidth: float = 100e6
    server_bandwidth: float = 1e9
    loss: float = 0.0

    def seconds(self, node: int, count: int) -> float:
        """Time that `count` bytes occupy the link of `node`."""
        return 8.0 * count / (self.server_bandwidth if node == SERVER else self.bandwidth)


class Network:
    """Says when a message arrives, and keeps the traffic's books."""

    def __init__(self, links: Links, seed: int) -> None:
        self.links = links
        self.seed = seed
        self.edges: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        self.bytes_sent = 0
        self.sent = 0
        self.lost = 0
        self._up: dict[int, float] = {}
        self._down: dict[int, float] = {}
        self._left: dict[tuple[int, int], float] = {}

    def transfer(self, source: int, target: int, count: int, now: float) -> float | None:
        """Books a message of `count` bytes; the time of its arrival, or None if it is lost on the way."""
        self.sent += 1
        self.bytes_sent += count
        edge = self.edges[source, target]
        edge[0] += 1
        edge[1] += count
        up = max(now, self._up.get(source, 0.0)) + self.links.seconds(source, count)
        self._up[source] = self._left[source, target] = up
        if self._dropped(source, target):
            self.lost += 1
            return None
        down = max(now, self._down.get(target, 0.0)) + self.links.seconds(target, count)
        self._down[target] = down
        return max(up, down) + self.links.latency

    def waiting(self, source: int, target: int, now: float) -> bool:
        """Whether a message to that target has not left its source whole."""
        return self._left.get((source, target), 0.0) > now

    def _dropped(self, source: int, target: int) -> bool:
        if not self.links.loss:
            return False
        return bool(generator(self.seed, source, target, self.sent, "loss").random() < self.links.loss)
