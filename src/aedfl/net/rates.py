"""How often somebody may ask: a rate with a burst, by name."""

from __future__ import annotations

import time
from collections import OrderedDict


class Bucket:
    """A rate with one second's worth of burst."""

    def __init__(self, rate: float) -> None:
        self.rate = self.level = rate
        self._time = time.monotonic()

    def take(self, amount: float) -> bool:
        """True if there was room; what is larger than a burst passes when the bucket is full."""
        now = time.monotonic()
        self.level = min(self.rate, self.level + (now - self._time) * self.rate)
        self._time = now
        if self.level < min(amount, self.rate):
            return False
        self.level -= amount
        return True


class Rates:
    """One bucket per name; of too many names the one that asked longest ago is forgotten."""

    def __init__(self, rate: float, names: int = 4096) -> None:
        self.rate, self._names = rate, names
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, name: str) -> bool:
        bucket = self._buckets.setdefault(name, Bucket(self.rate))
        self._buckets.move_to_end(name)
        if len(self._buckets) > self._names:
            self._buckets.popitem(last=False)
        return bucket.take(1.0)
