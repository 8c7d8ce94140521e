"""The wall clock of a run: seconds since it began, which never go back, whatever happens to the date."""

from __future__ import annotations

import time


class Clock:
    """Counts from a start value by the monotonic clock; may be told that more time has passed elsewhere."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def begun(self) -> bool:
        return self._since is not None

    @property
    def now(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)

    def at_least(self, seconds: float) -> None:
        """Moves forward to `seconds` if that is later."""
        now = self.now
        if seconds > now:
            self._seconds += seconds - now

    def begin(self) -> None:
        """Lets time pass from here on."""
        if self._since is None:
            self._since = time.monotonic()
