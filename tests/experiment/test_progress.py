"""The progress line."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from aedfl.experiment.progress import Live, Progress, Silent


@pytest.mark.parametrize(("total", "shown"), [(1500.0, "450/1,500 s"), (None, "450 s"), (math.inf, "450 s")])
def test_the_line_shows_time_accuracy_updates_and_rate(total: float | None, shown: str) -> None:
    out = io.StringIO()
    live = Live(Console(file=out, force_terminal=True, width=140))
    live.start("aedfl-0 seed 3", total)
    live.advance(450.0, 0.61234, 1234, 56.7)
    live.finish()
    live.finish()
    text = out.getvalue()
    assert all(part in text for part in (shown, "0.6123", "1,234 updates", "57/s", "left"))


def test_one_run_may_follow_another_and_accuracy_may_be_unknown() -> None:
    out = io.StringIO()
    watcher: Progress
    for watcher in (Live(Console(file=out, force_terminal=True, width=140)), Silent()):
        watcher.advance(0.0, None, 0, 0.0)
        for name in ("first run", "second run"):
            watcher.start(name, 10.0)
            watcher.advance(1.0, None, 2, 3.0)
        watcher.finish()
    text = out.getvalue()
    assert text.index("first run") < text.index("second run") and "2 updates" in text and "None" not in text
